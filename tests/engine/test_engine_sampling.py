from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from miles.engine import sampling
from miles.engine.sampling import Draw, uniforms


def draw(logits: torch.Tensor, *rest: Any) -> Draw:
    """`sampling.draw` of a copy."""
    return sampling.draw(logits.clone(), *rest)


def test_a_number_depends_on_its_seed_and_place_only() -> None:
    together = uniforms([7, 8, 2**64 - 1], [0, 5, 2**31])
    assert [uniforms([7], [0])[0], uniforms([8], [5])[0], uniforms([2**64 - 1], [2**31])[0]] == together.tolist()


def test_numbers_are_uniform_along_seeds_and_along_places() -> None:
    n = 20000
    for numbers in (uniforms(range(n), [3] * n), uniforms([3] * n, range(n))):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert abs(numbers.mean() - 0.5) < 4 / math.sqrt(12 * n)
        counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
        assert ((counts - n / 50) ** 2 / (n / 50)).sum() < 100  # chi-square, 49 degrees of freedom
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / math.sqrt(n)


def test_the_streams_are_pinned() -> None:
    # A run resumed by a later release must draw the same tokens.
    assert uniforms([0, 1, 2], [0, 0, 9]).tolist() == pytest.approx(PINNED, abs=0)


PINNED = [0.6524484863740322, 0.36818951565166946, 0.2391953152387405]


@pytest.mark.parametrize("vocabulary", [5, 64, 200, 1000])
def test_a_draw_is_the_inverse_of_the_distribution_function(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(300, vocabulary, generator=generator)
    seeds, places = list(range(300)), [4] * 300
    drawn = draw(logits, [0.7] * 300, seeds, places, range(300))
    running = (logits.double() / 0.7).softmax(-1).cumsum(-1)
    expected = (running <= torch.from_numpy(uniforms(seeds, places))[:, None]).sum(-1)
    assert sum(a != b for a, b in zip(drawn.token_ids, expected.tolist(), strict=True)) == 0
    logprobs = (logits.double() / 0.7).log_softmax(-1)[range(300), drawn.token_ids]
    assert drawn.logprobs == pytest.approx(logprobs.tolist(), abs=1e-6)


def test_the_log_prob_is_the_sampled_tokens_own_however_unlikely() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    drawn = draw(logits, [1.0] * 50, range(50), [0] * 50, [0] * 50)
    expected = logits[0].log_softmax(-1)
    assert set(drawn.token_ids) == {0, 1, 2}
    assert drawn.logprobs == pytest.approx([expected[t].item() for t in drawn.token_ids], abs=1e-6)


@pytest.mark.parametrize("shift", [0.0, -1000.0, 1000.0, 3e4])
def test_a_constant_added_to_the_logits_changes_nothing(shift: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -3.0]])
    n = 200
    plain = draw(logits, [1.0] * n, range(n), [0] * n, [0] * n)
    shifted = draw(logits + shift, [1.0] * n, range(n), [0] * n, [0] * n)
    assert shifted.token_ids == plain.token_ids
    assert shifted.logprobs == pytest.approx(plain.logprobs, abs=1e-6)
    assert all(shifted.finite)


def test_an_impossible_token_is_never_drawn() -> None:
    logits = torch.full((1, 130), float("-inf"))
    logits[0, [3, 70, 129]] = torch.tensor([0.0, 1.0, 0.5])
    drawn = draw(logits, [1.0] * 2000, range(2000), [0] * 2000, [0] * 2000)
    assert set(drawn.token_ids) == {3, 70, 129}
    share = Counter(drawn.token_ids)[70] / 2000
    assert abs(share - math.e / (1 + math.e + math.exp(0.5))) < 0.05


def test_rows_have_temperatures_of_their_own() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.5]] * 3)
    drawn = draw(logits, [0.0, 0.1, 5.0], [1, 1, 1], [0, 0, 0], [0, 1, 2])
    for row, temperature in enumerate((1.0, 0.1, 5.0)):  # greedy reports temperature 1
        expected = (logits[row] / temperature).log_softmax(-1)[drawn.token_ids[row]].item()
        assert drawn.logprobs[row] == pytest.approx(expected, abs=1e-6)
    assert drawn.token_ids[0] == 1


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(2, 200)
    logits[0, [60, 150]] = 2.0
    assert draw(logits, [0.0, 0.0], [1, 2], [0, 0], [0, 1]).token_ids == [60, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_marked_and_its_neighbour_is_not(bad: float) -> None:
    logits = torch.zeros(2, 100)
    logits[0, 40] = bad
    drawn = draw(logits, [1.0, 1.0], [1, 2], [0, 0], [0, 1])
    assert drawn.finite == [False, True]
    assert draw(torch.full((1, 9), float("-inf")), [1.0], [1], [0], [0]).finite == [False]


def test_half_precision_logits_are_summed_in_float32() -> None:
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)).bfloat16()
    drawn = draw(logits, [1.0] * 4, range(4), [0] * 4, range(4))
    expected = logits.double().log_softmax(-1)[range(4), drawn.token_ids]
    assert drawn.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_bits_of_a_row_do_not_depend_on_the_other_rows() -> None:
    logits = 3 * torch.randn(80, 5000, generator=torch.Generator().manual_seed(0))
    logits[7] += 500
    whole = draw(logits, [1.0] * 80, range(80), [2] * 80, range(80))
    for row in (0, 7, 66, 79):
        alone = draw(logits[row : row + 1], [1.0], [row], [2], [0])
        assert (alone.token_ids[0], alone.logprobs[0]) == (whole.token_ids[row], whole.logprobs[row])
