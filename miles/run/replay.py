"""`miles replay`: trains a run again from its ledger alone, with no engine, and compares what comes out to the bit."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from miles.algo import find
from miles.buffer.ledger import LedgerReader
from miles.buffer.rewinding import RewindMode
from miles.errors import BadInput, BufferClosed, RunDirError, TrainingAborted
from miles.learn import checkpoint
from miles.learn.export import check_target, save_trained
from miles.learn.learner import Learner
from miles.learn.load import describe
from miles.loop import train
from miles.observe.rows import METRICS_FILE, read_rows, step_rows
from miles.run.buffer import open_reader
from miles.run.export import tokenizer_of
from miles.run.local import device_of, load_trained
from miles.run.place import mesh, world_size
from miles.run.resume import CHECKPOINTS
from miles.run.rundir import stored_recipe
from miles.types import Collected, FinishedGroup, Group, PolicyUpdate

MEASURED = ("time", "throughput/", "memory/")
"""Beginnings of metric names that are of a machine at a moment."""


def replay_command(run_dir: Path, to: Path | None) -> int:
    """Replay every stored step of `run_dir`; write the model to `to` where given. 0: equal to the bit, 1: it differs."""
    recipe = stored_recipe(run_dir)
    if world_size(recipe) > 1:
        raise BadInput(
            f"{run_dir} trained on {mesh(recipe)}, and a replay, which is compared to the bit, runs on one rank: sums over ranks "
            "round otherwise. `miles train --resume` goes on from its checkpoints on any number of ranks."
        )
    if to is not None:
        check_target(to)
    reader = open_reader(run_dir, recipe.buffer)
    try:
        identity = reader.identity()
        torch.set_num_threads(recipe.run.threads or 1)
        model = load_trained(recipe, find(recipe.algorithm.name), device_of(recipe))
        _check_start(run_dir, identity, describe(model)["weights_sha256"])
        learner = Learner(model, recipe, device=device_of(recipe), total_steps=_total_steps(recipe, identity))
        keeper = ReplayKeeper(learner, {row["step"]: row for row in step_rows(read_rows(run_dir / METRICS_FILE).rows)})
        try:
            train(learner, LedgerSource(reader), NoPublisher(), keeper)
        except TrainingAborted as aborted:  # as the run itself was
            keeper.log_step(aborted.metrics)
    finally:
        reader.close()
    if to is not None:
        facts = {"version": learner.version, "recipe": recipe.model_dump(mode="json")}
        save_trained(model, tokenizer_of(recipe, model), to, facts)
        print(f"model of step {learner.version}: {to}")
    return _verdict(keeper, learner, run_dir)


@dataclass
class LedgerSource:
    """An `ExperienceSource` over a ledger that nobody writes to any more."""

    reader: LedgerReader

    def take(self, version: int) -> list[Group]:
        """The stored groups of the step. Raises BufferClosed behind the last one."""
        if not self.reader.manifest(version):
            raise BufferClosed(f"the ledger ends with step {version}")
        return self.reader.groups(version)

    def finished(self, version: int) -> list[FinishedGroup]:
        return self.reader.finished(version)

    def collected(self, version: int) -> list[Collected]:
        return self.reader.collected(version)

    def advance(self, version: int) -> None:
        """Nothing is written."""

    def commit(self, version: int, checkpoint: Path) -> None:
        """Nothing is written."""

    def rewind(self, version: int, mode: RewindMode = "replay") -> None:
        """Nothing is written."""

    def group(self, ordinal: int) -> Group:
        return self.reader.group(ordinal)

    def short(self, version: int) -> str | None:
        return self.reader.short(version)

    def snapshot(self) -> bytes:
        return b"".join(self.reader.snapshot())


class NoPublisher:
    """There is no engine to publish to."""

    def publish(self, update: PolicyUpdate) -> None:
        """Nobody waits for the weights."""


@dataclass
class ReplayKeeper:
    """The `miles.loop.Keeper` of a replay: says what each step did, and whether the run's own row agrees."""

    learner: Learner
    rows: Mapping[int, Mapping[str, Any]]  # of the run's metrics.jsonl, by step
    differing: list[int] = field(default_factory=list)  # steps whose row says something else

    def span(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self) -> None:
        """There is nothing to evaluate."""

    def wants_more(self) -> bool:
        return True

    def log_step(self, metrics: Mapping[str, float]) -> None:
        step = self.learner.version
        there = self.rows.get(step)
        wrong = [] if there is None else [key for key in metrics if _differs(key, metrics[key], there.get(key))]
        if wrong:
            self.differing.append(step)
        said = "no row in metrics.jsonl" if there is None else "differs: " + ", ".join(wrong) if wrong else "equal"
        print(f"step {step}: grad_norm {metrics.get('grad_norm', math.nan):.6g}, {said}", flush=True)

    def after_step(self) -> None:
        """Nothing is kept on the way."""

    def end(self) -> None:
        """The caller compares."""


def _differs(key: str, here: float, there: Any) -> bool:
    if key.startswith(MEASURED):
        return False
    return here != there and not (there is None and math.isnan(here))


def _total_steps(recipe: Any, identity: Mapping[str, Any]) -> int | None:
    if recipe.data.epochs is None:
        return recipe.algorithm.steps
    return math.ceil(identity["rows of the data"] * recipe.data.epochs / recipe.algorithm.groups_per_step)


def _check_start(run_dir: Path, identity: Mapping[str, Any], weights: str) -> None:
    there = identity["weights of model.name"]
    if there != weights:
        raise RunDirError(
            f"{run_dir} started from the weights {there[:12]}, but model.name gives {weights[:12]} now: a replay needs the "
            "weights that the run started from; put them back"
        )


def _verdict(keeper: ReplayKeeper, learner: Learner, run_dir: Path) -> int:
    """Compare with the newest checkpoint where it is of the same step, and say how it stands."""
    here = _digests(learner)
    path = checkpoint.newest(run_dir / CHECKPOINTS)
    if keeper.differing:
        print(f"replayed {learner.version} steps; {len(keeper.differing)} differ, the first is {keeper.differing[0]}")
        return 1
    if path is None or checkpoint.version_of(path) != learner.version:
        print(f"replayed {learner.version} steps; the run has no checkpoint of step {learner.version} to compare with")
        return 0
    tensors, state = checkpoint.load(path)
    learner.load_state(tensors, state["learner"])
    there = _digests(learner)
    wrong = [name for name in there if here[name] != there[name]]
    if wrong:
        print(f"replayed {learner.version} steps; {len(wrong)} tensors differ from {path}: {wrong[0]}, ...")
        return 1
    print(f"replayed {learner.version} steps; all {len(there)} tensors equal {path} to the bit")
    return 0


def _digests(learner: Learner) -> dict[str, str]:
    """SHA-256 of each tensor of the learner's state, by file and name."""
    tensors, _ = learner.state()
    return {
        f"{file}/{name}": hashlib.sha256(
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for file, named in tensors.items()
        for name, tensor in named.items()
    }
