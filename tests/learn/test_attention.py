from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen3Config

from miles.config.schema import Model
from miles.learn.attention import FULL, SLIDING, Attention, FlexAttention, ancestors, is_separate, visible
from miles.learn.forward import Compute, hidden_states
from miles.learn.load import load_model
from miles.learn.pack import build_batch, pack
from miles.types import Batch

DOCUMENTED = Batch(
    token_ids=torch.tensor([5, 6, 7, 8, 9, 0]),
    position_ids=torch.tensor([0, 1, 2, 3, 2, 0]),
    node_ids=torch.tensor([0, 0, 1, 1, 2, -1]),
    parents=torch.tensor([-1, 0, 0]),
    source=torch.tensor([-1, 0, 1, 2, 1, -1]),
    loss_mask=torch.tensor([False, False, True, True, True, False]),
    slots=torch.tensor([-1, -1, 0, 1, 2, -1]),
    sample_ids=torch.tensor([-1, -1, 0, 0, 1, -1]),
    rows=1,
)


def test_a_completion_sees_its_prompt_and_itself_and_padding_sees_itself():
    seen, distance = visible(DOCUMENTED)
    assert seen[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert distance[0, 4, 0] == 2, "places in the row are 4 apart, positions 2"


def test_a_window_counts_positions():
    windowed = Attention((SLIDING,), window=2).mask(DOCUMENTED)
    assert windowed[0, 0, 4].int().tolist() == [0, 1, 0, 0, 1, 0]
    both = Attention((FULL, SLIDING), window=2).mask(DOCUMENTED)
    assert both.keys() == {FULL, SLIDING}
    assert both[FULL][0, 0, 4].int().tolist() == [1, 1, 0, 0, 1, 0]
    assert both[SLIDING].shape == (1, 1, 6, 6)


@pytest.mark.parametrize("seed", range(5))
def test_a_mask_shows_each_token_its_own_sequence_and_nothing_else(groups, seed):
    step = groups.step(groups.draw(seed=seed))
    for batch in pack(step, step.samples, groups.TREE):
        seen, _ = visible(batch)
        for q in range(batch.rows * batch.width):
            row, expected, t = q // batch.width, {q % batch.width}, q
            while batch.source[t] >= 0:
                t = int(batch.source[t])
                expected.add(t % batch.width)
            assert set(seen[row, q % batch.width].nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("window", [3, 10**6])
def test_block_masks_show_the_same_places(groups, window):
    step = groups.step(groups.draw(seed=1))
    for batch in pack(step, step.samples, groups.TREE):
        dense = Attention((FULL, SLIDING), window).mask(batch)
        blocks = FlexAttention((FULL, SLIDING), window).mask(batch)
        for kind in (FULL, SLIDING):
            places = create_mask(blocks[kind].mask_mod, batch.rows, 1, batch.width, batch.width, device="cpu")
            assert torch.equal(places, dense[kind])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
def test_a_forward_with_block_masks_is_the_forward_with_dense_ones(groups):
    step = groups.step(groups.draw(seed=1))
    model = load_model(Model(name="tiny-random:gemma3"), seed=0)
    dense, flex = (kind.of(model.config) for kind in (Attention, FlexAttention))
    batch = pack(step, step.samples, groups.TREE)[0]
    with torch.no_grad():
        expected = hidden_states(model.base_model, batch, Compute(dense))
        model.set_attn_implementation("flex_attention")
        found = hidden_states(model.base_model, batch, Compute(flex))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_rows_of_one_sequence_need_no_mask(groups):
    step = groups.step(groups.draw())
    for batch in pack(step, step.samples, groups.SEPARATE):
        assert is_separate(batch)
        assert Attention((FULL, SLIDING), window=4).mask(batch) is None
    row = tuple(part for sample in step.segments[:2] for part in sample)
    assert not is_separate(build_batch([row], share=False))


def test_ancestors_of_padding_are_none():
    related = ancestors(torch.tensor([-1, 0, 1, 0, -1]))
    assert related.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0],
    ]


def test_kinds_and_windows_are_read_from_the_config():
    assert Attention.of(LlamaConfig()) == Attention((FULL,), None)
    assert Attention.of(MistralConfig(sliding_window=7)) == Attention((SLIDING,), 7)
    assert Attention.of(MistralConfig(sliding_window=None)) == Attention((FULL,), None)
    assert Attention.of(Qwen3Config()).kinds == (FULL,)
    assert Attention.of(Gemma3TextConfig(sliding_window=9)) == Attention((FULL, SLIDING), 9)
