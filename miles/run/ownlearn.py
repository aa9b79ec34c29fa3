"""The learner's role with a learner of one's own: Miles's loop, buffer, keeper and checkpoints around it. Imports no torch."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from miles.buffer.settings import LedgerSettings
from miles.buffer.snapshot import SNAPSHOT_NAME
from miles.buffer.stream import PromptStream
from miles.config.adapters import MARKER
from miles.errors import CheckpointError
from miles.learn import folders
from miles.learn.stepfolders import MANIFEST, candidates, is_complete, number, replace
from miles.loop import train
from miles.observe.live import LiveView
from miles.observe.recorder import Recorder
from miles.run.interrupts import Interrupted, Interrupts
from miles.run.joining import OpenBuffer, RunFacts, join_buffer, ledger_settings
from miles.run.keeper import RunKeeper
from miles.run.logs import logs_to
from miles.run.meeting import Meeting
from miles.run.own import OwnLearner, Parts, own_parts, own_rows
from miles.run.recipes import Resolved
from miles.run.rundir import DATA, RECIPE, begin_run_dir, check_run_dir, fixed_hash, write_config

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
STATE = "state.bin"


def learn_own(resolved: Resolved, run_dir: Path, resume: bool, view: LiveView, meeting: Meeting) -> int:
    """The exit code. Raises MilesError."""
    parts, interrupts = own_parts(resolved.recipe), Interrupts()
    rows, _ = own_rows(resolved, parts)
    check_run_dir(run_dir, resolved.recipe, resume)
    learner = parts.learner()
    checkpoints = OwnCheckpoints(run_dir / CHECKPOINTS, resolved.recipe.run.keep_checkpoints, learner)
    saved = checkpoints.load() if resume else -1
    if not resume:
        begin_run_dir(run_dir, resolved.recipe)
    stream = _stream(resolved, len(rows))
    facts = RunFacts(_settings(resolved, parts), stream, {RECIPE: fixed_hash(resolved.recipe), DATA: rows.content_hash})
    with ExitStack() as stack:
        stack.enter_context(logs_to(None, view.message))
        stack.enter_context(interrupts.active())
        snapshot = checkpoints.snapshot if resume else None
        buffer = stack.enter_context(join_buffer(meeting, facts, lambda: None, snapshot, resume=resume))
        recorder = stack.enter_context(closing(Recorder(run_dir, (), resolved.recipe.log.samples_per_step)))
        if resume:
            buffer.source.rewind(learner.version, buffer.rewind)
            recorder.rewind(learner.version)
            write_config(run_dir, resolved.recipe)
        keeper = _keeper(resolved, run_dir, learner, buffer, checkpoints, recorder, view, interrupts, saved)
        publisher = parts.publisher()
        publisher.publish(learner.policy_update())
        try:
            train(learner, buffer.source, publisher, keeper)
        except Interrupted as interrupted:
            keeper.save_checkpoint()
            return interrupted.exit_code
    return 0


@dataclass
class OwnCheckpoints:
    """Checkpoints of a learner of one's own: its bytes and the ledger's snapshot, sealed; complete or absent."""

    root: Path
    keep: int
    learner: OwnLearner

    def save(self, snapshot: bytes) -> Path:
        """Write one of the learner's version and delete the older ones; the oldest that is kept. Raises CheckpointError."""
        target = self.root / f"step_{self.learner.version:06d}"
        try:
            with folders.staged(target) as partial:
                (partial / STATE).write_bytes(self.learner.state())
                (partial / SNAPSHOT_NAME).write_bytes(snapshot)
                folders.seal(partial, MANIFEST, version=self.learner.version)
                replace(partial, target)
        except OSError as error:
            raise CheckpointError(f"the checkpoint {target} could not be written: {error}") from error
        whole = [path for path in candidates(self.root) if is_complete(path)]
        for path in whole[self.keep :]:
            folders.discard(path)
        return whole[: self.keep][-1]

    def load(self) -> int:
        """Bring the learner to the newest whole one; its version, -1 where there is none. Raises CheckpointError."""
        newest = self._newest()
        if newest is None:
            return -1
        self.learner.load_state((newest / STATE).read_bytes())
        return number(newest)

    @property
    def snapshot(self) -> Path | None:
        """Of the ledger, in the newest whole one."""
        newest = self._newest()
        return None if newest is None else newest / SNAPSHOT_NAME

    def wait(self) -> Path | None:
        """None is ever under way."""
        return None

    def finished(self) -> Path | None:
        """None is ever under way."""
        return None

    def _newest(self) -> Path | None:
        damaged = []
        for path in candidates(self.root):
            try:
                folders.verify(path, MANIFEST)
            except folders.Damaged as error:
                damaged.append(str(error))
                log.warning("checkpoint %s is passed over: %s", path, error)
                continue
            return path
        if damaged:
            raise CheckpointError(f"no checkpoint in {self.root} can be used: {'; '.join(damaged)}")
        return None


def _keeper(
    resolved: Resolved, run_dir: Path, learner: OwnLearner, buffer: OpenBuffer, checkpoints: OwnCheckpoints,
    recorder: Recorder, view: LiveView, interrupts: Interrupts, saved: int,
) -> RunKeeper:  # fmt: skip
    def export(name: str) -> None:
        target = run_dir / name
        with folders.staged(target) as partial:
            (partial / STATE).write_bytes(learner.state())
            folders.seal(partial, MARKER, facts={"version": learner.version})
            (folders.replace if target.exists() else folders.publish)(partial, target)

    return RunKeeper(
        resolved.recipe, resolved.row, run_dir, learner, buffer.source,
        lambda beside: checkpoints.save(buffer.source.snapshot()), export, None, recorder, view, interrupts, checkpoints,
        saved_version=saved, tell_end=buffer.end,
    )  # fmt: skip


def _stream(resolved: Resolved, rows: int) -> PromptStream:
    recipe = resolved.recipe
    return PromptStream(
        rows, recipe.run.seed, recipe.data.shuffle, recipe.algorithm.groups_per_step, recipe.data.epochs
    )


def _settings(resolved: Resolved, parts: Parts) -> LedgerSettings:
    group_size = resolved.row.samples_in_group(resolved.recipe.rollout.group_size)
    return ledger_settings(resolved.recipe, group_size, parts.vocabulary)
