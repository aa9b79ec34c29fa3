"""From per-token metrics of many batches to the exact numbers of one metrics row.

Each metric keeps a sum, a sum of squares and a maximum, so adding batches or ranks in any cut gives the same row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from miles.algo.tokens import select

MIN_RETURN_VARIANCE = 1e-3
"""Below it there is nothing to explain: a nearly solved task has no variance of returns."""

MEANS = {
    "ratio": "ratio/mean",
    "clipped": "ratio/clip_fraction",
    "dual_clipped": "ratio/dual_clip_fraction",
    "kl_ref": "kl/ref",
    "kl_old": "kl/old",
    "kl_behavior": "kl/behavior",
    "entropy": "entropy",
    "correction_masked": "correction/masked_fraction",
    "value": "value/mean",
    "value_clipped": "value/clip_fraction",
    "score": "score/mean",
    "pair_gap": "pairs/gap",
    "pair_right": "pairs/accuracy",
    "value_ref_gap": "value/ref_gap",
}
"""Per-token metric -> key of its mean over trained tokens."""

MAXIMA = {"ratio": "ratio/max", "correction_weight": "correction/weight_max"}

SUMS = {"loss_policy": "loss/policy", "loss_nll": "loss/nll", "loss_total": "loss/total", "loss_value": "loss/value"}
"""Per-token shares of a loss, already weighted -> key of their sum, averaged over the updates of the step."""


@dataclass(frozen=True)
class Totals:
    """Sums over the trained tokens of any number of batches. `+` joins batches, updates and ranks."""

    tokens: float = 0.0
    sums: Mapping[str, float] = field(default_factory=dict)
    squares: Mapping[str, float] = field(default_factory=dict)
    maxima: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, metrics: Mapping[str, Tensor], mask: Tensor) -> Totals:
        """metrics: [T] each; mask: [T] bool. One transfer from the device."""
        if not metrics:
            return cls(tokens=float(mask.sum()))
        stacked = torch.stack([select(value.double(), mask) for value in metrics.values()])
        highest = stacked.masked_fill(~mask, -torch.inf)
        columns = torch.stack(
            [
                stacked.sum(1),
                (stacked**2).sum(1),
                highest.amax(1) if mask.numel() else stacked.sum(1),
                mask.sum().expand(len(stacked)),
            ]
        ).tolist()
        sums, squares, maxima = (dict(zip(metrics, column, strict=True)) for column in columns[:3])
        tokens = columns[3][0]
        return cls(tokens, sums, squares, maxima if tokens else {})

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.tokens + other.tokens,
            _joined(self.sums, other.sums, lambda a, b: a + b),
            _joined(self.squares, other.squares, lambda a, b: a + b),
            _joined(self.maxima, other.maxima, max),
        )

    def row(self, updates: int = 1) -> dict[str, float]:
        """Keys of metrics.jsonl; no tokens, no keys. A metric of a user's own loss becomes the mean `algorithm/<name>`."""
        if not self.tokens:
            return {}
        out: dict[str, float] = {}
        for name, total in self.sums.items():
            if name in SUMS:
                out[SUMS[name]] = total / updates
            elif name == "correction_weight":
                out["correction/ess"] = effective_sample_size(total, self.squares[name], self.tokens)
            else:
                out[MEANS.get(name, f"algorithm/{name}")] = total / self.tokens
        return {**out, **{key: self.maxima[name] for name, key in MAXIMA.items() if name in self.maxima}}


def effective_sample_size(total: float, squares: float, count: float) -> float:
    """(sum w)^2 / (count * sum w^2), in 0..1: 1 when all weights are equal.  Kong 1992."""
    return total**2 / (count * squares)


def quantile(values: Tensor, mask: Tensor, q: float) -> float | None:
    """The q-quantile (linear) of the values on the mask; None where there is none."""
    kept = values[mask]
    return torch.quantile(kept.double(), q).item() if len(kept) else None


def explained_variance(returns: Tensor, values: Tensor) -> float | None:
    """1 - Var(R - V) / Var(R) on Monte-Carlo returns, population variance; None where Var(R) < 1e-3.

    returns, values: [N] float32.
    """
    if not len(returns):
        return None
    variance = returns.double().var(correction=0).item()
    if variance < MIN_RETURN_VARIANCE:
        return None
    return 1 - (returns.double() - values.double()).var(correction=0).item() / variance


def _joined(a: Mapping[str, float], b: Mapping[str, float], join) -> dict[str, float]:
    return {**a, **b, **{name: join(a[name], b[name]) for name in a.keys() & b.keys()}}
