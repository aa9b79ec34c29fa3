"""A plan as tables for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from miles.plan.plan import CONTEXT, FRAGMENTS, GIB, Change, Plan
from miles.plan.simulate import Kinds

KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits")
ABOUT = {
    "gathered": "whole weights of blocks, and buffers of exchanges",
    "activations": "with every temporary",
    "logits": "and whole copies and gradients of head and embedding",
}


def show(plan: Plan, console: Console) -> None:
    """Memory by kind and role, by pass, the engine's, what fits, what to change, and how long a step takes."""
    console.print(_heading(plan), highlight=False)
    console.print(_by_kind(plan))
    console.print(_by_pass(plan))
    for line in _sentences(plan):
        console.print(line, highlight=False)
    if plan.changes:
        console.print(_changes(plan))
    for line in _assumptions(plan):
        console.print(line, highlight=False, style="dim")


def as_json(plan: Plan) -> dict[str, Any]:
    """All numbers of a plan: bytes of one rank, seconds, tokens."""
    simulation = plan.simulation
    return {
        "model": plan.recipe.model.name,
        "parameters": plan.counts.total,
        "gpus": plan.ranks,
        "gpu_memory": plan.capacity,
        "usable": plan.usable,
        "fits": plan.fits,
        "peak": plan.peak,
        "peak_phase": simulation.peak_phase,
        "at_peak": dict(simulation.phases[simulation.peak_phase]),
        "resting": dict(simulation.resting),
        "phases": {phase: sum(kinds.values()) for phase, kinds in simulation.phases.items()},
        "analytic": asdict(plan.analytic),
        "host": simulation.host,
        "engine": asdict(plan.engine),
        "collecting": plan.collecting,
        "roles": list(simulation.roles),
        "tokens_per_microbatch": plan.recipe.learner.tokens_per_microbatch,
        "microbatch": {"tokens": simulation.tokens, "rows": simulation.rows},
        "rank_tokens_per_update": plan.share,
        "largest_tokens_per_microbatch": plan.largest_tokens,
        "simulated_blocks": list(simulation.blocks),
        "changes": [asdict(change) for change in plan.changes],
        "speed": {**asdict(plan.speed), "step": plan.speed.step, "tokens_per_s": plan.speed.tokens_per_s},
        "machine": asdict(plan.machine),
    }


def refusal(plan: Plan) -> str:
    """One paragraph for a run that cannot fit."""
    ways = [f"{change.what} ({gib(change.peak)} GiB)" for change in plan.changes if change.fits and change.peak]
    out = f"One of: {'; '.join(ways)}." if ways else "None of the usual changes is enough: use a smaller model."
    where = plan.simulation.peak_phase if plan.simulation.peak >= plan.collecting else "collect"
    return (
        f"this does not fit: at the fullest moment ({where}) the tensors of a GPU have {gib(plan.peak)} GiB, and it has "
        f"{gib(plan.capacity)}. {out} `miles plan` shows the whole table."
    )


def gib(size: float | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f}"


def _heading(plan: Plan) -> str:
    gpus = f"{plan.ranks} GPU{'s' * (plan.ranks > 1)} of {plan.capacity / GIB:g} GiB"
    return (
        f"{plan.recipe.model.name}: {plan.counts.total / 1e9:.2f} B parameters, {plan.recipe.algorithm.name}, "
        f"{', '.join(plan.simulation.roles)}; {gpus}"
    )


def _by_kind(plan: Plan) -> Table:
    phase = plan.simulation.peak_phase
    table = Table(title="Memory of one rank, GiB", title_justify="left", caption_justify="left")
    table.add_column("kind")
    table.add_column("whose")
    for name in ("between steps", f"fullest: {phase}"):
        table.add_column(name, justify="right")
    rest, top = plan.simulation.resting, plan.simulation.phases[phase]
    for kind in sorted({*rest, *top}, key=_order):
        name, _, owner = kind.partition("/")
        table.add_row(name, owner or ABOUT.get(name, ""), gib(rest.get(kind, 0.0)), gib(top.get(kind, 0.0)))
    table.add_section()
    table.add_row("sum", "", gib(sum(rest.values())), gib(plan.simulation.peak))
    table.add_row("formula", "as a check", gib(plan.analytic.resting), gib(plan.analytic.peak))
    return table


def _order(kind: str) -> tuple[int, str]:
    name = kind.partition("/")[0]
    return (KINDS.index(name) if name in KINDS else len(KINDS), kind)


def _by_pass(plan: Plan) -> Table:
    table = Table(title="Fullest moment of each pass, GiB", title_justify="left")
    table.add_column("pass")
    table.add_column("at")
    for kind in ("sum", *KINDS):
        table.add_column(kind, justify="right")
    for name, place, kinds in _passes(plan):
        sizes = [sum(size for k, size in kinds.items() if k.partition("/")[0] == kind) for kind in KINDS]
        table.add_row(name, place, gib(sum(kinds.values())), *map(gib, sizes))
    engine = plan.engine
    if engine.total:
        what = "copy of the weights, cache, logits: " + ", ".join(
            map(gib, (engine.weights, engine.cache, engine.logits))
        )
        held = [sum(size for k, size in plan.simulation.resting.items() if k.startswith(kind)) for kind in KINDS[:3]]
        table.add_row("collect", what, gib(plan.collecting), *map(gib, held))
    return table


def _passes(plan: Plan) -> Iterator[tuple[str, str, Kinds]]:
    best: dict[str, str] = {}
    phases = plan.simulation.phases
    for phase in phases:
        name = phase.partition("/")[0]
        if name not in best or sum(phases[phase].values()) > sum(phases[best[name]].values()):
            best[name] = phase
    for name, phase in best.items():
        yield name, phase.partition("/")[2], phases[phase]


def _sentences(plan: Plan) -> Iterator[str]:
    tokens = plan.recipe.learner.tokens_per_microbatch
    verdict = "It fits" if plan.fits else "It does not fit"
    yield f"{verdict}: {gib(plan.peak)} GiB at the fullest moment, {gib(plan.usable)} of {gib(plan.capacity)} GiB for tensors."
    rows = f"{plan.simulation.rows} row{'s' * (plan.simulation.rows > 1)}"
    if plan.simulation.host:
        yield f"Beside it {gib(plan.simulation.host)} GiB of each rank wait in the machine's own memory."
    yield f"learner.tokens_per_microbatch = {tokens}: the fullest micro-batch has {plan.simulation.tokens} tokens in {rows}."
    if plan.largest_tokens is not None:
        yield (
            f"The largest that fits: about {plan.largest_tokens} (a straight line through two simulations); a rank reads at "
            f"most {plan.share} tokens in an update."
        )
    speed = plan.speed
    collect = "not here" if speed.collect is None else f"{speed.collect:.0f} s"
    yield (
        f"A step, estimated: {speed.step:.0f} s for {speed.sampled} sampled tokens = {speed.tokens_per_s:.0f} tokens/s; "
        f"score {speed.score:.0f} s, update {speed.update:.0f} s, waiting for links {speed.exchange:.0f} s, collect {collect}."
    )


def _changes(plan: Plan) -> Table:
    table = Table(title="What would change it", title_justify="left")
    table.add_column("change")
    table.add_column("fullest moment, GiB", justify="right")
    table.add_column("fits")
    for change in sorted(plan.changes, key=lambda change: not change.fits):
        table.add_row(change.what, gib(change.peak), _yes(change))
    return table


def _yes(change: Change) -> str:
    return "yes" if change.fits else "no"


def _assumptions(plan: Plan) -> Iterator[str]:
    low, high = plan.simulation.blocks
    machine, lengths = plan.machine, plan.lengths
    yield (
        f"Simulated with {low} and {high} blocks on fake ranks, continued to {plan.counts.blocks}. Every prompt has {lengths.prompt} "
        f"tokens and every answer {lengths.completion}. Not in it: torch.compile, GPU attention kernels (a CPU kernel stands in)."
    )
    yield (
        f"Assumed of a GPU: {CONTEXT / GIB:g} GiB for its driver and libraries, {FRAGMENTS:.0%} lost between allocations; for time "
        f"{machine.tflops:g} TFLOP/s, of which training reaches {machine.mfu:.0%}, {machine.memory_gbps:g} GB/s of memory, "
        f"{machine.link_gbps:g} GB/s to other GPUs. Nothing of it is measured."
    )
