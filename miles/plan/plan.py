"""Whether a recipe fits on some GPUs, how many tokens would, and what to change where it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from miles.algo.build import Objective
from miles.plan.analytic import Analytic, Counts, analytic
from miles.plan.counter import GRADIENTS, OPTIMIZER, PARAMETERS
from miles.plan.engine import EngineMemory, engine_memory
from miles.plan.shape import Lengths, empty_model, ranks_of, share_tokens
from miles.plan.simulate import Kinds, Simulation, continued, simulate
from miles.plan.speed import Machine, Speed, estimate

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from miles.config.schema import Recipe

GIB = 2**30
CONTEXT = 1.5 * GIB  # of the driver, the libraries and their workspaces: assumed
FRAGMENTS = 0.05  # part of the memory that the allocator cannot use: assumed
SHARDED = (PARAMETERS, GRADIENTS, OPTIMIZER)
LORA_RANK = 16
MOST_GPUS = 1024


@dataclass(frozen=True)
class Change:
    """One thing to change, and the peak that it would give."""

    what: str
    peak: float | None  # bytes of one rank; None: no amount of it is enough
    fits: bool


@dataclass(frozen=True)
class Plan:
    """Memory in bytes of one rank."""

    recipe: Recipe
    counts: Counts
    lengths: Lengths
    capacity: float  # of one GPU
    simulation: Simulation
    analytic: Analytic
    engine: EngineMemory
    speed: Speed
    largest_tokens: int | None  # tokens_per_microbatch; None: not even the smallest fits
    changes: tuple[Change, ...] = ()
    machine: Machine = field(default_factory=Machine)

    @property
    def ranks(self) -> int:
        return ranks_of(self.recipe)

    @property
    def usable(self) -> float:
        return usable(self.capacity)

    @property
    def share(self) -> int:
        """Most tokens that a rank reads in an update."""
        return share_tokens(self.recipe, self.lengths)

    @property
    def collecting(self) -> float:
        """While completions are sampled: weights and moments stay, nothing of an update does."""
        return sum(self.simulation.resting.values()) + self.engine.total

    @property
    def peak(self) -> float:
        return max(self.simulation.peak, self.collecting)

    @property
    def fits(self) -> bool:
        return self.peak <= self.usable


def usable(capacity: float) -> float:
    """What tensors may have of a GPU's bytes."""
    return max(0.0, capacity * (1 - FRAGMENTS) - CONTEXT)


def make_plan(recipe: Recipe, config: PreTrainedConfig, capacity: float, machine: Machine | None = None) -> Plan:
    """Simulates a step of the recipe on its ranks, each a GPU of `capacity` bytes. Raises ModelError for a config without a model."""
    machine, ranks = machine or Machine(), ranks_of(recipe)
    counts, lengths = Counts.of(empty_model(config)), Lengths.of(recipe, config)
    objective = Objective.build(recipe)
    tokens = recipe.learner.tokens_per_microbatch
    simulation = simulate(recipe, config, tokens)
    share = share_tokens(recipe, lengths)
    other = simulate(recipe, config, _other_tokens(tokens, lengths.total - 1, share))
    line = TokenLine(simulation, other)
    engine = engine_memory(recipe, config, counts.total, _engine_width(recipe), ranks)
    room = usable(capacity)
    resting = sum(simulation.resting.values())
    held = Plan(
        recipe=recipe,
        counts=counts,
        lengths=lengths,
        capacity=capacity,
        simulation=simulation,
        analytic=analytic(recipe, counts, simulation.roles, ranks, simulation.tokens),
        engine=engine,
        speed=estimate(
            recipe, config, counts, simulation.roles, objective.needs_old, ranks, simulation.tokens, machine
        ),
        largest_tokens=line.largest(room, lengths.total - 1, share) if resting + engine.total <= room else None,
        machine=machine,
    )
    return held if held.fits else _with_changes(held, config, line)


def peak_of(recipe: Recipe, config: PreTrainedConfig) -> float:
    """Bytes of one rank at the fullest moment of a run: the one number of a plan, in half of its time."""
    simulation = simulate(recipe, config, recipe.learner.tokens_per_microbatch)
    counts = Counts.of(empty_model(config))
    engine = engine_memory(recipe, config, counts.total, _engine_width(recipe), ranks_of(recipe))
    return max(simulation.peak, sum(simulation.resting.values()) + engine.total)


class TokenLine:
    """Memory against tokens of a micro-batch, from two simulations: kind by kind in each phase a straight line."""

    def __init__(self, one: Simulation, other: Simulation) -> None:
        self.low, self.high = sorted((one, other), key=lambda simulation: simulation.tokens)

    def peak(self, tokens: int) -> float:
        span = self.high.tokens - self.low.tokens
        at = (tokens - self.low.tokens) / span if span else 0.0
        phases = (continued(self.low.phases.get(phase, {}), kinds, at) for phase, kinds in self.high.phases.items())
        return max(sum(kinds.values()) for kinds in phases)

    def largest(self, room: float, smallest: int, most: int) -> int | None:
        """Most tokens that fit, to 64: from `smallest`, one sample, which is never cut, to `most`, all that there are."""
        if self.peak(smallest) > room:
            return None
        low, high = smallest, max(smallest, most)
        if self.peak(high) <= room:
            return high
        while high - low > 64:
            middle = (low + high) // 2
            low, high = (middle, high) if self.peak(middle) <= room else (low, middle)
        return low


def on_more_ranks(kinds: Kinds, factor: float) -> float:
    """Bytes where weights, gradients and moments are spread over `factor` times as many ranks; the rest stays."""
    return sum(size / factor if kind.startswith(SHARDED) else size for kind, size in kinds.items())


def _other_tokens(tokens: int, smallest: int, share: int) -> int:
    """Far enough from what is simulated already for a line, and within what one rank can read."""
    read = max(smallest, min(tokens, share))
    return 2 * read if 2 * read <= share else max(smallest, read // 3)


def _engine_width(recipe: Recipe) -> int:
    return 2 if recipe.lora.rank is not None and recipe.learner.param_dtype == "bf16" else 4


def _with_changes(held: Plan, config: PreTrainedConfig, line: TokenLine) -> Plan:
    changes = [*_fewer_tokens(held, line), *_engine(held), *_more_gpus(held), *_other_settings(held, config)]
    return Plan(**{**vars(held), "changes": tuple(changes)})


def _fewer_tokens(held: Plan, line: TokenLine) -> Iterator[Change]:
    if held.largest_tokens is not None and held.largest_tokens < held.recipe.learner.tokens_per_microbatch:
        tokens = held.largest_tokens
        yield Change(f"learner.tokens_per_microbatch = {tokens}", line.peak(tokens), True)
    elif held.largest_tokens is None:
        smallest = held.lengths.total - 1
        what = f"fewer tokens: one sample alone has {smallest} (data.max_prompt_tokens + rollout.max_new_tokens)"
        yield Change(what, max(line.peak(smallest), held.collecting), False)


def _engine(held: Plan) -> Iterator[Change]:
    """Where sampling is what does not fit."""
    resting = sum(held.simulation.resting.values())
    if held.collecting <= held.usable:
        return
    if held.engine.weights:
        peak = held.simulation.peak
        yield Change('engine.kind = "vllm", on GPUs of its own', peak, peak <= held.usable)
    batch = held.recipe.engine.max_batch
    while batch > 1:
        batch //= 2
        engine = held.engine.smaller(batch / held.recipe.engine.max_batch)
        if resting + engine.total <= held.usable:
            peak = max(held.simulation.peak, resting + engine.total)
            yield Change(f"engine.max_batch = {batch}", peak, peak <= held.usable)
            return


def _more_gpus(held: Plan) -> Iterator[Change]:
    collecting = {**held.simulation.resting, "engine": held.engine.total}
    ranks = held.ranks
    while ranks < MOST_GPUS:
        ranks *= 2
        moments = [*held.simulation.phases.values(), collecting]
        peak = max(on_more_ranks(kinds, ranks / held.ranks) for kinds in moments)
        if peak <= held.usable:
            yield Change(f"{ranks} GPUs", peak, True)
            return
    yield Change(f"more GPUs: {MOST_GPUS} do not help, because of what each of them holds whole", None, False)


def _other_settings(held: Plan, config: PreTrainedConfig) -> Iterator[Change]:
    """Settings that cost something else than memory, each alone, then together."""
    learner, lora = {}, {}
    if held.recipe.learner.param_dtype == "fp32":
        learner["param_dtype"] = "bf16"
    if not held.recipe.learner.gradient_checkpointing:
        learner["gradient_checkpointing"] = True
    if held.recipe.lora.rank is None:
        lora["rank"] = LORA_RANK
    options: list[tuple[dict[str, Any], dict[str, Any]]] = [({key: value}, {}) for key, value in learner.items()]
    options += [({}, lora)] if lora else []
    if len(options) > 1:
        options.append((learner, lora))
    for changed, adapters in options:
        recipe = with_keys(with_keys(held.recipe, "learner", changed), "lora", adapters)
        text = ", ".join([*(f"learner.{k} = {_toml(v)}" for k, v in changed.items()), *(f"lora.{k} = {v}" for k, v in adapters.items())])  # fmt: skip
        simulation = simulate(recipe, config, recipe.learner.tokens_per_microbatch)
        engine = engine_memory(recipe, config, held.counts.total, _engine_width(recipe), held.ranks)
        peak = max(simulation.peak, sum(simulation.resting.values()) + engine.total)
        yield Change(text, peak, peak <= held.usable)


def with_keys(recipe: Recipe, section: str, values: Mapping[str, Any]) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=dict(values))})


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
