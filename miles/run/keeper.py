"""What happens around the steps of a run: log, evaluate, write checkpoints, keep the best, stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from miles.algo import AlgorithmRow
from miles.buffer.manifests import AT_DROP_LIMIT, AT_STREAM_END
from miles.config.adapters import MARKER
from miles.config.schema import Recipe
from miles.learn import folders
from miles.learn.stepfolders import number
from miles.observe.live import LiveView
from miles.observe.metrics import group_metrics, ready_fraction, recorded_metrics, throughput_metrics
from miles.observe.recorder import Recorder
from miles.observe.rows import METRICS_FILE, eval_rows, read_rows
from miles.protocols import ExperienceSource, Learner
from miles.rollout.evaluate import Evaluation
from miles.run.interrupts import Interrupts
from miles.run.judged import judged_rows
from miles.types import FinishedGroup, Group

log = logging.getLogger(__name__)

FINAL, BEST = "final", "best"
BETTER = {"eval/reward/mean": 1, "eval/pairs/accuracy": 1, "eval/loss": -1}
"""What tells which model is better, the first of them that was measured, and whether more or less of it is."""
SHORT = {
    AT_DROP_LIMIT: "as many as rollout.max_dropped were dropped before it was full",
    AT_STREAM_END: "the data has ended (data.epochs)",
}


class Writer(Protocol):
    """Of checkpoints, of which one may be under way beside training; both return the oldest one that is kept."""

    def wait(self) -> Path | None: ...

    def finished(self) -> Path | None: ...


@dataclass
class RunKeeper:
    """The `miles.loop.Keeper` of a local run. What it decides depends on the run directory alone, so a resumed run agrees."""

    recipe: Recipe
    row: AlgorithmRow
    run_dir: Path
    learner: Learner
    buffer: ExperienceSource
    save: Callable[[bool], Path | None]  # a checkpoint, beside training or not; the oldest one that is kept
    export: Callable[[str], None]  # the model, into the folder of that name
    evaluate: Callable[[], tuple[Mapping[str, float], Evaluation]] | None  # None: no held-out rows
    recorder: Recorder
    view: LiveView
    interrupts: Interrupts
    writer: Writer
    writes_beside: bool = False  # checkpoints of the run's steps are written while training goes on
    saved_version: int = -1  # newest checkpoint on disk
    tell_end: Callable[[], None] = lambda: None  # the run has ended well, and nothing more will be collected
    _step_started: float = field(default_factory=time.perf_counter)
    _asked: float = field(default_factory=time.time)  # for the step's groups, seconds since the epoch
    _told_short: set[str] = field(default_factory=set)

    def span(self, name: str) -> AbstractContextManager[None]:
        return self.recorder.span(name)

    def whole(self) -> AbstractContextManager[None]:
        return self.interrupts.whole()

    def begin(self) -> None:
        if self.learner.version == 0 or self._evaluation_due():
            self._evaluate()

    def wants_more(self) -> bool:
        self._step_started, self._asked = time.perf_counter(), time.time()
        steps = self.recipe.algorithm.steps
        return (steps is None or self.learner.version < steps) and not self._reached_reward()

    def log_step(self, metrics: Mapping[str, float]) -> None:
        version = self.learner.version
        finished, collected = self._finished(version - 1), self.buffer.collected(version - 1)
        ready = ready_fraction(collected, self._asked)
        seconds = time.perf_counter() - self._step_started
        row = {
            "step": version, "version": version, **self._group_metrics(finished), **metrics, "time/step_s": seconds,
            **(throughput_metrics(finished, seconds) if not self.row.recorded else {}),
            **({} if ready is None else {"time/ready_fraction": ready}),
        }  # fmt: skip
        self.view.timeline(self.recorder.timeline(version, collected))
        self.view.step(self.recorder.step(row))
        self._show_one(self._record_samples(version, finished))
        self.recorder.scores(version, self.learner.judged)
        self._tell_short(version - 1)

    def _finished(self, step: int) -> Sequence[FinishedGroup]:
        """What finished for a step, with the rewards that were trained on where the learner's reward model gave a part of them."""
        finished = self.buffer.finished(step)
        return judged_rows(finished, self.learner.judged) if self.learner.judged else finished

    def _group_metrics(self, finished: Sequence[FinishedGroup]) -> dict[str, float]:
        if self.row.recorded:
            return recorded_metrics(finished, lengths=not self.row.scorer)
        return group_metrics(finished, self.learner.version - 1)

    def after_step(self) -> None:
        if self._evaluation_due():
            self._evaluate()
        self._commit(self.writer.finished())
        every = self.recipe.run.checkpoint_every
        due = every is not None and self.learner.version % every == 0
        if self.interrupts.take_wish() or due:
            self.save_checkpoint(beside=self.writes_beside)

    def end(self) -> None:
        self._evaluate()
        self.save_checkpoint()
        self._export(FINAL)
        self.tell_end()

    def abort(self, metrics: Mapping[str, float]) -> None:
        """Write down the step that training was aborted in, and its checkpoint: it is trained, if to no avail."""
        with self.interrupts.whole():
            self.buffer.advance(self.learner.version)
            self.log_step(metrics)
        self.save_checkpoint()

    def fail(self) -> None:
        """Keep what the run has before an error in collecting or evaluating ends it; the weights are whole then."""
        version = self.learner.version
        self._record_samples(version + 1, [done for done in self.buffer.finished(version) if done.reason is not None])
        if version:
            self.save_checkpoint()

    def save_checkpoint(self, *, beside: bool = False) -> None:
        """Write a checkpoint of the learner's version, unless it is on disk already; `beside`: while training goes on."""
        with self.interrupts.whole():
            self._commit(self.writer.wait())
            if self.learner.version == self.saved_version:
                return
            with self.recorder.span("checkpoint"):
                self._commit(self.save(beside))
            self.saved_version = self.learner.version

    def _commit(self, oldest: Path | None) -> None:
        if oldest is not None:
            self.buffer.commit(number(oldest), oldest)

    def _evaluation_due(self) -> bool:
        every = self.recipe.eval.every
        return every is not None and self.learner.version % every == 0

    def _evaluate(self) -> None:
        version = self.learner.version
        if self.evaluate is None:
            return
        if not self.recorder.evaluated(version):
            with self.recorder.span("eval"):
                metrics, evaluation = self.evaluate()
            with self.interrupts.whole():
                self.view.eval(self.recorder.eval({"version": version, **metrics}, evaluation.sampled))
                self._keep_best()
        else:  # before a resume, whose run may have ended between the row and its model
            self._keep_best()

    def _keep_best(self) -> None:
        best = folders.read_facts(self.run_dir / BEST, MARKER) or {}
        if self.recipe.run.keep_best and self._is_best() and best.get("version") != self.learner.version:
            self._export(BEST)

    def _scores(self) -> list[float]:
        """Of each evaluation, higher is better."""
        rows = eval_rows(read_rows(self.run_dir / METRICS_FILE).rows)
        key = next((key for key in BETTER if any(key in row for row in rows)), None)
        return [] if key is None else [BETTER[key] * row[key] for row in rows if key in row]

    def _is_best(self) -> bool:
        scores = self._scores()
        return bool(scores) and scores[-1] >= max(scores)

    def _reached_reward(self) -> bool:
        goal = self.recipe.run.stop_at_reward
        scores = [] if goal is None else self._scores()
        return goal is not None and len(scores) >= 2 and min(scores[-2:]) >= goal

    def _export(self, name: str) -> None:
        with self.interrupts.whole():
            self.export(name)

    def _record_samples(self, step: int, finished: Sequence[FinishedGroup]) -> list[tuple[Group, str | None]]:
        """The groups themselves, each with why it was dropped, or None."""
        judged = {group.ordinal: group for group in self.learner.judged}
        groups = [
            (judged.get(done.ordinal) or self.buffer.group(done.ordinal), done.reason)
            for done in finished
            if done.lengths
        ]
        self.recorder.samples(step, groups)
        return groups

    def _tell_short(self, step: int) -> None:
        why = self.buffer.short(step)
        if why is not None and why not in self._told_short:
            self._told_short.add(why)
            log.warning(
                "step %d trained on fewer than %d groups: %s",
                step + 1,
                self.recipe.algorithm.groups_per_step,
                SHORT[why],
            )

    def _show_one(self, groups: list[tuple[Group, str | None]]) -> None:
        trained = [group for group, reason in groups if reason is None]
        if trained:
            sample = trained[0].samples[0]
            reward = None if self.row.recorded else sample.reward
            self.view.sample(trained[0].prompt_text, sample.text, reward)
