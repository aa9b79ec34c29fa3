"""What a resumed run finds in its directory: whether it can go on there, from which version, and what is not as it was."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles.buffer.backend import SQLITE, Where
from miles.buffer.ledger import LedgerReader, has_run
from miles.buffer.ledger import restore as restore_from
from miles.buffer.place import RunLock
from miles.buffer.schema import LEDGER_NAME
from miles.buffer.snapshot import SNAPSHOT_NAME
from miles.errors import CheckpointError, RunDirError
from miles.learn import checkpoint
from miles.learn.learner import Learner
from miles.learn.randomness import take_up
from miles.observe.rows import METRICS_FILE, read_rows, step_rows, version_of
from miles.run.rundir import DATA

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"


def check_resumable(run_dir: Path, data_hash: str, *, locked: bool = False) -> Path | None:
    """The newest whole checkpoint, where there is one: what the run can go on from. `locked`: a service holds the ledger.

    Raises RunDirError where another process runs here, the ledger is missing, or the training rows have changed, and
    CheckpointError where there are checkpoints and all of them are damaged.
    """
    if not locked:
        RunLock(run_dir).release()
    _same_rows(run_dir, data_hash)
    checkpoints = run_dir / CHECKPOINTS
    if checkpoints.exists() and not checkpoints.is_dir():
        raise RunDirError(f"--resume: {checkpoints} is a file, where the checkpoints of the run belong: move it away")
    return checkpoint.newest(checkpoints)


def _same_rows(run_dir: Path, data_hash: str) -> None:
    ledger = run_dir / LEDGER_NAME
    if not ledger.exists():
        if any((run_dir / CHECKPOINTS).glob("step_*")) and newest_snapshot(run_dir) is None:
            raise RunDirError(
                f"--resume: {run_dir} has checkpoints but no {LEDGER_NAME}, which says what they were trained on: put it "
                "back, or start a new run in another directory"
            )
        return
    try:
        reader = LedgerReader(run_dir)
    except (
        RunDirError
    ):  # a process that was killed while it made the ledger; whatever else it is, opening it to write says so
        return
    try:
        before = reader.identity().get(DATA)
    finally:
        reader.close()
    if before != data_hash:
        raise RunDirError(
            f"--resume: the training rows are not those that the run in {run_dir} began with: data.source has changed, or "
            "eval.rows or eval.source, which take held-out rows out of it; put the rows and these keys back, or start a new "
            "run in another directory"
        )


def newest_snapshot(run_dir: Path) -> Path | None:
    """The ledger's snapshot in the newest whole checkpoint, where both exist."""
    path = checkpoint.newest(run_dir / CHECKPOINTS)
    return path / SNAPSHOT_NAME if path is not None and (path / SNAPSHOT_NAME).exists() else None


def restore_ledger(run_dir: Path, run: str, where: Where) -> bool:
    """Make a lost ledger again from the newest checkpoint; False where it is there, or nothing to make it from."""
    there = (run_dir / LEDGER_NAME).exists() if where.ledger == SQLITE else has_run(run_dir, run, where)
    found = None if there else newest_snapshot(run_dir)
    if found is None:
        return False
    restore_from(run_dir, found, run, where)
    log.warning(
        "%s was lost: it was made again from %s, and groups that are not trained are sampled again",
        run_dir / LEDGER_NAME,
        found,
    )
    return True


def restore(path: Path, learner: Learner, identity: Mapping[str, Any], rank: int) -> int:
    """Load a whole checkpoint of this run, on one rank; its version. Raises CheckpointError."""
    tensors, state, own = checkpoint.read(path)
    if foreign := [name for name in identity if state["run"].get(name) != identity[name]]:
        raise CheckpointError(
            f"checkpoint {path} is of another run: {foreign[0]} is {state['run'].get(foreign[0])!r} there and "
            f"{identity[foreign[0]]!r} here. Put the checkpoints of this run back, or start a new run in another directory."
        )
    learner.load_state(tensors, state["learner"])
    take_up([each["random"] for each in own], rank)
    return learner.version


def lost_rows(run_dir: Path, version: int) -> str | None:
    """What to tell where metrics.jsonl lacks steps below `version`: they are not trained again, so they stay away."""
    there = {version_of(row) for row in step_rows(read_rows(run_dir / METRICS_FILE).rows)}
    lost = [step for step in range(1, version + 1) if step not in there]
    if not lost:
        return None
    steps = ", ".join(map(str, lost[:5])) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
    return f"{run_dir / METRICS_FILE} has lost its rows of the steps {steps}; the run goes on without them"
