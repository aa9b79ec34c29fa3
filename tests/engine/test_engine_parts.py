from __future__ import annotations

import asyncio

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from miles.engine.attention import DecodePlan, PrefillPlan
from miles.engine.batch import LiveBatch
from miles.engine.kvcache import BLOCK, PromptStore, SampleStore, round_up
from miles.engine.linear import Tiles, fewest_rows, spans, tiled_linear
from miles.engine.policy import LivePolicy
from miles.engine.requests import Call, Row
from miles.engine.stopping import Stopper
from miles.learn.tiny import tiny_model, tiny_tokenizer
from miles.types import Sampling


def test_tiles_cover_every_row_once_and_only_the_last_is_padded() -> None:
    assert spans(112, [16, 32, 48, 64]) == [(0, 64, 64), (64, 112, 48)]
    assert spans(64, [16, 32, 48, 256]) == [(0, 48, 48), (48, 64, 16)]
    assert spans(5, [48]) == [(0, 5, 48)]
    for rows in range(1, 300):
        tiles = spans(rows, [16, 48, 128])
        assert [start for start, _, _ in tiles] == [0, *(stop for _, stop, _ in tiles[:-1])]
        assert tiles[-1][1] == rows
        assert all(stop - start == width for start, stop, width in tiles[:-1])


@pytest.mark.parametrize("bias", [True, False])
def test_a_tiled_product_is_the_product_and_its_rows_stay_put(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(1536, 576, bias=bias)
    widths = Tiles().widths(layer)
    rows = torch.randn(150, 1536, generator=generator)
    with torch.no_grad():
        whole = tiled_linear(layer, widths, rows)
        assert torch.allclose(whole, F.linear(rows, layer.weight, layer.bias), atol=1e-5)
        for place, count in ((0, 1), (70, 3), (100, 50)):
            assert torch.equal(tiled_linear(layer, widths, rows[place : place + count]), whole[place : place + count])
        assert torch.equal(tiled_linear(layer, widths, rows[:, None])[:, 0], whole)


def filled(slots: int, lengths: list[int]) -> tuple[PromptStore, torch.Tensor, torch.Tensor]:
    """A cache of 2 heads and width 16 that a prefill wrote, and the keys and values it was given."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 1, 2, sum(lengths), 16, generator=generator)
    cache = PromptStore()
    cache.reserve(slots, max(lengths))
    PrefillPlan(cache, lengths, range(len(lengths))).attend(0, torch.randn(1, 4, sum(lengths), 16), k, v, 0.25, None)
    return cache, k, v


def test_a_batched_product_has_the_same_bits_from_its_fewest_rows_on() -> None:
    least = fewest_rows(torch.device("cpu"), torch.float32)
    assert 2 <= least <= 64
    left, right = torch.randn(3, 64, 32), torch.randn(3, 32, 80)
    whole = torch.bmm(left, right)
    for rows in (least, least + 1, 2 * least):
        assert torch.equal(torch.bmm(left[:, :rows].contiguous(), right), whole[:, :rows])


@pytest.mark.parametrize(("threads", "rows", "padded"), [(1, 17, 32), (2, 16, 16), (3, 17, 48), (5, 1, 80)])
def test_rows_are_padded_so_that_threads_get_equal_parts(threads: int, rows: int, padded: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        policy = LivePolicy(tiny_model("llama", tied=True, seed=0), Tiles())
    finally:
        torch.set_num_threads(before)
    assert policy.padded_rows(rows) == padded


def test_a_cache_keeps_what_it_holds_when_it_grows_and_moves() -> None:
    cache, k, v = filled(2, [5, 9])
    cache.reserve(4, 200)
    keys, values = cache.layer(0, k)
    assert keys.shape == (4, 2, 16, values.shape[2])
    assert values.shape[2] >= 200
    assert values.shape[2] % BLOCK == 0
    assert torch.equal(keys[1, :, :, :9], k[0, :, 5:].transpose(1, 2))
    assert torch.equal(values[1, :, :9], v[0, :, 5:])
    assert not keys[1, :, :, 9:].any()
    cache.move([1], [3], 9)
    assert torch.equal(values[3, :, :9], v[0, :, 5:])
    cache.wipe([3])
    assert not values[3].any()
    assert torch.equal(values[1, :, :9], v[0, :, 5:])


def test_lengths_are_rounded_up_to_blocks() -> None:
    assert [round_up(n) for n in (1, BLOCK, BLOCK + 1)] == [BLOCK, BLOCK, 2 * BLOCK]


@pytest.mark.parametrize(("heads", "window"), [(4, None), (2, None), (4, 6)])
def test_decoding_attends_to_its_own_prompt_and_tokens_and_to_nothing_else(heads: int, window: int | None) -> None:
    lengths, owners, steps = [5, 9, 9], [2, 0, 2, 1], [3, 3, 3, 3]
    prompts, k, v = filled(3, lengths)
    rows = SampleStore()
    rows.reserve(6, 4)
    generator = torch.Generator().manual_seed(1)
    new_k, new_v = torch.randn(2, 4, 6, 2, 1, 16, generator=generator)
    q = torch.randn(4, 6, heads, 1, 16, generator=generator)
    for step in range(4):
        plan = DecodePlan(
            prompts, rows, [*owners, -1, -1], [*(lengths[o] for o in owners), 1, 1], [step] * 4 + [0, 0], k.device
        )
        out = plan.attend(0, q[step], new_k[step], new_v[step], 0.3, window)
    starts = [0, 5, 14]
    for row, owner in enumerate(owners):
        past = slice(starts[owner], starts[owner] + lengths[owner])
        keys = torch.cat([k[0, :, past], new_k[:, row, :, 0].transpose(0, 1)], dim=1)
        values = torch.cat([v[0, :, past], new_v[:, row, :, 0].transpose(0, 1)], dim=1)
        if window:
            keys, values = keys[:, -window:], values[:, -window:]
        expected = F.scaled_dot_product_attention(q[3, row], keys, values, scale=0.3, enable_gqa=heads != 2)
        assert torch.allclose(out[row, 0], expected[:, 0], atol=1e-5)
    assert steps == [3] * 4


def call(ids: tuple[int, ...], n: int, loop: asyncio.AbstractEventLoop) -> Call:
    sampling = Sampling(50)
    made = Call(ids, sampling, 0, Stopper(sampling, (), tiny_tokenizer()), loop.create_future())
    made.rows = [Row(made, seed) for seed in range(n)]
    return made


async def test_a_prompt_is_run_and_stored_once_for_all_of_its_samples_and_calls() -> None:
    loop = asyncio.get_running_loop()
    model = tiny_model("llama")
    seen: list[int] = []
    hook = model.model.embed_tokens.register_forward_hook(lambda _, args, __: seen.append(args[0].numel()))
    batch = LiveBatch(LivePolicy(model, None), max_batch=16)
    first, twin, other = (call(ids, 4, loop) for ids in ((5, 6, 7), (5, 6, 7), (8, 9)))
    batch.prefill([first, twin, other])
    batch.prefill([later := call((8, 9), 2, loop)])
    assert seen == [5]
    keys = batch._prompt_cache.layer(0, torch.empty(1, 2, 1, 16))[0]
    assert len(keys) == 2
    for row in (*first.rows, *twin.rows, *other.rows, *later.rows):
        batch.place(row)
    assert batch.free == 2
    batch.step()
    assert seen == [5, 14]
    for ended in (first, twin):
        batch.remove(ended)
    for row in first.rows:
        assert row.slot == -1
    batch.step()
    assert seen[-1] == 6  # the batch has become narrower
    hook.remove()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and "</" as one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate([*alphabet, "</"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("<", "/")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize(
    ("text", "stop"), [("so 4</answer> and on", "</answer>"), ("naïve", "ï"), ("日本 → ok", "→"), ("a  b", " b")]
)
def test_a_stop_string_is_seen_at_the_token_that_completes_it(text: str, stop: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    stopper = Stopper(Sampling(1000, stop=(stop,)), (), tokenizer)
    ended = next(n for n in range(1, len(ids) + 1) if stopper.reason(ids[:n]) == "stop")
    assert tokenizer.decode(ids[:ended]) == text[: text.index(stop) + len(stop)]


def test_a_long_completion_is_searched_at_its_end() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("x" * 500 + "</answer>")["input_ids"]
    stopper = Stopper(Sampling(1000, stop=("</answer>",)), (), tokenizer)
    assert [stopper.reason(ids[:n]) for n in (499, len(ids) - 1, len(ids))] == [None, None, "stop"]


def test_an_end_token_comes_before_the_limit() -> None:
    stopper = Stopper(Sampling(2, stop_token_ids=(9,)), (7,), None)
    assert [stopper.reason(ids) for ids in ([9], [7], [1], [1, 2], [1, 7])] == ["stop", "stop", None, "length", "stop"]
