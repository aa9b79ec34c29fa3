"""What a step did, added up exactly: sums over tokens while its updates go on, one row of metrics at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from miles.algo.build import Objective
from miles.algo.metrics import Totals, quantile
from miles.learn.gauges import VisibleFraction, peak_bytes
from miles.learn.optim import Stepped
from miles.learn.spmd import Ranks
from miles.types import Signal

Outputs = Sequence[tuple[Tensor, Mapping[str, Tensor]]]  # of each batch: [T] bool mask, [T] metrics


class StepRecord:
    """Skipped updates count as skipped and leave nothing else: their numbers are not finite."""

    def __init__(self, signal: Signal, epochs: int) -> None:
        self._signal, self._epochs = signal, epochs
        self._policy, self._values = Totals(), Totals()
        self._entropies: list[Tensor] = []
        self._actor: list[Stepped] = []
        self._critic: list[Stepped] = []

    def add_policy(self, outputs: Outputs, stepped: Stepped) -> None:
        self._actor.append(stepped)
        if stepped.skipped:
            return
        self._policy = sum((Totals.of(metrics, mask) for mask, metrics in outputs), self._policy)
        self._entropies += [metrics["entropy"][mask] for mask, metrics in outputs if "entropy" in metrics]

    def add_values(self, outputs: Outputs, stepped: Stepped) -> None:
        self._critic.append(stepped)
        if not stepped.skipped:
            self._values = sum((Totals.of(metrics, mask) for mask, metrics in outputs), self._values)

    def _tokens(self, objective: Objective, policy: Totals) -> dict[str, float | None]:
        """Trained ones of the step, and those that the metrics cover; a scorer has none of its own."""
        if objective.row.scorer:
            return {"sequences/trained": len(self._signal.table.lengths)}
        scored = None if objective.row.recorded else round(policy.tokens / self._epochs)
        return {"tokens/trained": len(self._signal.table.sample_ids), "tokens/scored": scored}

    def row(
        self, objective: Objective, beta: float, device: torch.device, visible: VisibleFraction | None, ranks: Ranks
    ) -> dict[str, float]:
        """The learner's keys of metrics.jsonl, over all ranks and equal on each; what was not measured is absent."""
        policy, values = over_ranks(self._policy, ranks), over_ranks(self._values, ranks)
        out: dict[str, float | None] = {
            "update/skipped": sum(stepped.skipped for stepped in [*self._actor, *self._critic]),
            **self._tokens(objective, policy),
            "memory/peak_bytes": ranks.most(peak_bytes(device)),
            "update/visible_fraction": None if visible is None else visible(),
            "value/explained_variance": objective.explained_variance(self._signal, beta),
            **({} if objective.row.recorded else _spread(self._signal.advantages)),
            **policy.row(_applied(self._actor)),
            **values.row(_applied(self._critic)),
            **_rates(self._actor, ""),
            **_rates(self._critic, "/critic"),
        }
        entropies = ranks.join_columns(torch.cat(self._entropies) if self._entropies else torch.empty(0))
        if len(entropies):
            out["entropy/p10"] = quantile(entropies, torch.ones_like(entropies, dtype=torch.bool), 0.1)
        if objective.settings.get("kl_target") is not None:
            out["kl/beta"] = beta
        return {key: value for key, value in out.items() if value is not None}


def over_ranks(totals: Totals, ranks: Ranks) -> Totals:
    """The sum over ranks; floats pass through JSON to the bit."""
    return sum((Totals(**part) for part in ranks.gather(asdict(totals))), Totals())


def _applied(steps: Sequence[Stepped]) -> int:
    return max(1, sum(not stepped.skipped for stepped in steps))


def _rates(steps: Sequence[Stepped], suffix: str) -> dict[str, float]:
    """Mean norm of the gradients that were applied, and the last learning rate."""
    norms = [stepped.norm for stepped in steps if not stepped.skipped]
    out = {f"grad_norm{suffix}": sum(norms) / len(norms)} if norms else {}
    return {**out, f"lr{suffix}": steps[-1].learning_rate} if steps else out


def _spread(advantages: Tensor) -> dict[str, float]:
    """Over the trained tokens of the step; population deviation."""
    if not len(advantages):
        return {}
    wide = advantages.double()
    return {"advantage/mean": wide.mean().item(), "advantage/std": wide.std(correction=0).item()}
