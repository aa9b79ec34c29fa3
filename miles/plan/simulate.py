"""The memory of a step at full depth, from simulated steps of the same model with few blocks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles.plan.counter import HOST, LiveBytes
from miles.plan.fake import fake_numbers, fake_ranks
from miles.plan.shape import Lengths, depths, empty_model, microbatches, new_model, ranks_of, with_layers
from miles.plan.step import FROZEN, PlannedStep

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from miles.config.schema import Recipe

HOST_FROZEN = f"{HOST}/{FROZEN}"
Kinds = Mapping[str, float]  # kind, or kind/owner -> bytes


@dataclass(frozen=True)
class Simulation:
    """What one rank holds in a step."""

    phases: Mapping[str, Kinds]  # at the fullest moment of each phase
    resting: Kinds  # between two steps
    host: float  # bytes of this rank in the machine's own memory
    tokens: int  # that the model reads in the fullest micro-batch
    rows: int  # of it
    blocks: tuple[int, int]  # depths that were simulated
    roles: tuple[str, ...]

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> float:
        """Bytes."""
        return sum(self.phases[self.peak_phase].values())


def simulate(recipe: Recipe, config: PreTrainedConfig, tokens: int) -> Simulation:
    """Two steps (the first has no moments of the optimizer yet) at two small depths, continued to the depth of `config`."""
    low, high = depths(config)
    first = simulate_depth(recipe, config, tokens, low)
    if low == high:
        return first
    second = simulate_depth(recipe, config, tokens, high)
    depth = config.get_text_config().num_hidden_layers
    at = (depth - low) / (high - low)
    return Simulation(
        phases={phase: continued(first.phases.get(phase, {}), kinds, at) for phase, kinds in second.phases.items()},
        resting=continued(first.resting, second.resting, at),
        host=max(0.0, first.host + at * (second.host - first.host)),
        tokens=second.tokens,
        rows=second.rows,
        blocks=(low, high),
        roles=second.roles,
    )


def simulate_depth(recipe: Recipe, config: PreTrainedConfig, tokens: int, layers: int) -> Simulation:
    """The same with `layers` blocks, nothing continued."""
    short = with_layers(config, layers)
    plain = recipe.model_copy(update={"learner": recipe.learner.model_copy(update={"compile": False})})
    step, batches = microbatches(plain, empty_model(short), Lengths.of(recipe, config), tokens)
    counter = LiveBytes(vocabulary=short.get_text_config().vocab_size)
    with fake_ranks(ranks_of(plain)), fake_numbers(), counter, warnings.catch_warnings():
        # Copies of a model look whether a tensor has bytes at all; a fake one has none, and says that it was asked.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        planned = PlannedStep(new_model(short), plain, counter, "cpu")
        planned.run(step, batches[:1])
        counter.forget_peaks()
        planned.run(step, batches[:2])
        return Simulation(
            phases={phase: on_device(kinds) for phase, kinds in counter.peaks.items()},
            resting=on_device(+counter.now),
            host=float(counter.now[HOST_FROZEN]),
            tokens=batches[0].rows * (batches[0].width or 0),
            rows=batches[0].rows,
            blocks=(layers, layers),
            roles=planned.roles.names,
        )


def on_device(kinds: Mapping[str, int]) -> dict[str, int]:
    return {kind: size for kind, size in kinds.items() if kind != HOST_FROZEN}


def continued(low: Kinds, high: Kinds, at: float) -> dict[str, float]:
    """low + at * (high - low), kind by kind, and never below 0."""
    kinds = dict.fromkeys([*low, *high])
    return {kind: max(0.0, low.get(kind, 0.0) + at * (high.get(kind, 0.0) - low.get(kind, 0.0))) for kind in kinds}
