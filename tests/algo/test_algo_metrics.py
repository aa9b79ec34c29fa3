"""Metrics do not depend on how a step was cut into batches or ranks."""

from __future__ import annotations

import math

import pytest
import torch

from miles.algo.metrics import Totals, effective_sample_size, explained_variance, quantile

ALL = torch.tensor([True, True])


def test_a_mean_is_over_tokens_not_over_ranks():
    one = Totals.of({"kl_ref": torch.tensor([1.0])}, torch.tensor([True]))
    nine = Totals.of({"kl_ref": torch.zeros(9)}, torch.ones(9, dtype=torch.bool))
    assert (one + nine).row()["kl/ref"] == pytest.approx(0.1)


def test_maxima_stay_maxima():
    a = Totals.of({"ratio": torch.tensor([3.0, 7.0])}, ALL)
    b = Totals.of({"ratio": torch.tensor([1.0, 9.0])}, ALL)
    assert (a + b).row()["ratio/max"] == 9.0
    assert (a + b).row()["ratio/mean"] == 5.0


@pytest.mark.parametrize("cuts", [1, 2, 4])
def test_a_row_is_the_same_for_any_cut(cuts):
    generator = torch.Generator().manual_seed(0)
    values, mask = torch.rand(24, generator=generator), torch.rand(24, generator=generator) > 0.3
    names = ("ratio", "clipped", "correction_weight", "loss_policy", "mine")
    whole = Totals.of(dict.fromkeys(names, values), mask).row()
    total = Totals()
    for part, part_mask in zip(values.chunk(cuts), mask.chunk(cuts), strict=True):
        total = total + Totals.of(dict.fromkeys(names, part), part_mask)
    assert total.row() == pytest.approx(whole, rel=1e-6)
    assert set(whole) == {
        "ratio/mean",
        "ratio/max",
        "ratio/clip_fraction",
        "correction/ess",
        "correction/weight_max",
        "loss/policy",
        "algorithm/mine",
    }


def test_nothing_is_read_off_the_mask():
    row = Totals.of({"kl_ref": torch.tensor([1.0, float("nan")])}, torch.tensor([True, False])).row()
    assert row == {"kl/ref": 1.0}


def test_no_tokens_no_keys():
    none = Totals.of({"ratio": torch.tensor([float("nan")])}, torch.tensor([False]))
    assert none.row() == {}
    assert Totals.of({}, ALL).tokens == 2
    assert Totals.of({"ratio": torch.zeros(0)}, torch.zeros(0, dtype=torch.bool)).row() == {}
    assert (none + Totals.of({"ratio": torch.ones(2)}, ALL)).row()["ratio/max"] == 1.0


def test_losses_are_summed_over_batches_and_averaged_over_updates():
    total = Totals.of({"loss_policy": torch.tensor([0.25, 0.75])}, ALL)
    assert (total + total).row(updates=2)["loss/policy"] == 1.0


def test_effective_sample_size_is_one_for_equal_weights():
    assert effective_sample_size(3 * 0.5, 3 * 0.25, 3) == pytest.approx(1.0)
    assert effective_sample_size(1.0, 1.0, 4) == 0.25


def test_quantile_leaves_padding_out():
    values = torch.tensor([1.0, 2, 3, 4, 0, 0, 0, 0])
    mask = torch.tensor([True] * 4 + [False] * 4)
    assert quantile(values, mask, 0.5) == 2.5
    assert quantile(values, torch.zeros(8, dtype=torch.bool), 0.5) is None


def test_explained_variance():
    returns = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns, torch.full((4,), 0.5)) == pytest.approx(0.0)
    assert explained_variance(returns, 1 - returns) == pytest.approx(-3.0)
    assert explained_variance(torch.full((4,), 1.0), returns) is None
    assert explained_variance(torch.zeros(0), torch.zeros(0)) is None
    assert math.isclose(explained_variance(returns, returns + 7), 1.0)
