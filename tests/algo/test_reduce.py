"""One denominator: reductions by hand, and what is and is not counted."""

from __future__ import annotations

import pytest
import torch

from miles.algo.reduce import correct_samples, loss_weights


def reduce(losses_of_samples, reduction, update=None, max_new_tokens=4):
    lengths = torch.tensor([len(x) for x in losses_of_samples])
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    chosen = torch.tensor(range(len(lengths)) if update is None else update, dtype=torch.int64)
    weights = loss_weights(ids, lengths, chosen, reduction, max_new_tokens)
    values = torch.tensor([x for sample in losses_of_samples for x in sample], dtype=torch.float32)
    return (weights * values).sum().item()


@pytest.mark.parametrize(("reduction", "value"), [("token_mean", 1.2), ("sequence_mean", 1.5), ("constant", 0.75)])
def test_reductions_by_hand(reduction, value):
    assert reduce([[1, 1, 1, 1], [2]], reduction) == pytest.approx(value)


def test_token_mean_divides_by_the_tokens():
    assert reduce([[0.5] * 10], "token_mean") == pytest.approx(0.5)


def test_masked_samples_leave_numerator_and_denominator():
    # The truncated completion of 8 tokens is masked, so it is not in the table (no trained token of its own).
    assert reduce([[1.0, 1.0], []], "token_mean") == pytest.approx(1.0)
    assert reduce([[1.0, 1.0], []], "sequence_mean") == pytest.approx(1.0)
    assert reduce([[1.0, 1.0], []], "constant") == pytest.approx(0.5)


def test_an_update_counts_its_own_samples_only():
    losses = [[1, 1, 1], [4], [2, 2]]
    assert reduce(losses, "token_mean", update=[0, 1]) == pytest.approx(7 / 4)
    assert reduce(losses, "sequence_mean", update=[2, 1]) == pytest.approx(3.0)
    parts = [reduce(losses, "sequence_mean", update=[i]) for i in range(3)]
    assert parts == pytest.approx([1, 4, 2])


def test_an_empty_update_weighs_nothing():
    for reduction in ("token_mean", "sequence_mean", "constant"):
        assert reduce([[1.0], [2.0]], reduction, update=[]) == 0.0
        assert loss_weights(
            torch.zeros(0).long(), torch.zeros(0).long(), torch.zeros(0).long(), reduction, 4
        ).shape == (0,)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match='no reduction "mean"'):
        reduce([[1.0]], "mean")


def test_correct_is_at_least_one_half():
    assert correct_samples(torch.tensor([0.0, 0.5, 1.0, -1.0])).tolist() == [False, True, True, False]
