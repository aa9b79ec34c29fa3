"""Correction weights by hand."""

from __future__ import annotations

import math

import pytest
import torch

from miles.algo.correction import sequence_weights, token_weights


def tokens(ratios, kind, cap=2.0, low=None, high=None):
    behavior = torch.full((len(ratios),), -3.0)
    old = behavior + torch.tensor([math.log(r) for r in ratios])
    return token_weights(old, behavior, kind, cap, low, high).tolist()


def sequences(ratios_of_samples, kind, cap=2.0, low=None, high=None):
    lengths = torch.tensor([len(r) for r in ratios_of_samples])
    old = torch.tensor([math.log(r) for ratios in ratios_of_samples for r in ratios])
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return sequence_weights(old, torch.zeros_like(old), ids, lengths, kind, cap, low, high).tolist()


def test_truncation_bounds_above_only():
    assert tokens([0.25, 1.0, 7.389], "truncate") == pytest.approx([0.25, 1.0, 2.0])
    assert tokens([7.389], "truncate", cap=5.0) == pytest.approx([5.0])


def test_mask_keeps_the_weight_inside_and_zeroes_it_outside():
    assert tokens([0.4, 0.6, 1.0, 4.5, 5.5], "mask") == pytest.approx([0, 0.6, 1, 4.5, 0])
    assert tokens([0.4, 0.6], "mask", low=0.3, high=0.5) == pytest.approx([0.4, 0])


def test_stale_data_is_not_called_on_policy():
    # The engine's policy gave log-prob -3, the learner's gives -1: the ratio is e^2, cut at 2.
    assert token_weights(torch.tensor([-1.0]), torch.tensor([-3.0]), "truncate", 2.0, None, None).tolist() == [2.0]
    assert token_weights(torch.tensor([-1.0]), torch.tensor([-3.0]), "truncate", 9.0, None, None).tolist() == (
        pytest.approx([math.exp(2)])
    )


def test_an_extreme_ratio_is_finite():
    assert token_weights(torch.tensor([0.0]), torch.tensor([-100.0]), "truncate", 2.0, None, None).tolist() == [2.0]
    assert token_weights(torch.tensor([0.0]), torch.tensor([-100.0]), "mask", 2.0, None, None).tolist() == [0.0]


def test_sequence_truncation_is_of_the_product():
    assert sequences([[1.2, 1.5], [3.0, 1.0, 2.0], [0.5, 0.5]], "sequence_truncate") == pytest.approx(
        [1.8, 1.8, 2, 2, 2, 0.25, 0.25]
    )


def test_product_mask_gives_one_or_nothing_to_whole_samples():
    assert sequences([[1.2, 1.5], [3.0, 1.0], [0.5, 0.9]], "sequence_mask_product") == [1, 1, 0, 0, 0, 0]


def test_geometric_mask_judges_long_samples_only():
    long_good, long_bad, short_bad = [1.001] * 256, [1.02] * 256, [1.02] * 255
    got = sequences([long_good, long_bad, short_bad], "sequence_mask_geometric")
    assert set(got[:256]) == {1.0}
    assert set(got[256:512]) == {0.0}
    assert set(got[512:]) == {1.0}


def test_weights_have_no_gradient():
    old = torch.zeros(2, requires_grad=True)
    assert not token_weights(old, torch.zeros(2), "truncate", 2.0, None, None).requires_grad
    ids, lengths = torch.tensor([0, 0]), torch.tensor([2])
    assert not sequence_weights(old, torch.zeros(2), ids, lengths, "sequence_truncate", 2.0, None, None).requires_grad
