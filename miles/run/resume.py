"""What a resumed run finds in its directory: whether it can go on there, from which version, and what is not as it was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles.buffer.ledger import LedgerReader
from miles.buffer.place import RunLock
from miles.buffer.schema import LEDGER_NAME
from miles.errors import CheckpointError, RunDirError
from miles.learn import checkpoint
from miles.learn.learner import Learner
from miles.learn.randomness import take_up
from miles.observe.rows import METRICS_FILE, read_rows, step_rows, version_of

CHECKPOINTS = "checkpoints"
DATA = "training rows"
"""Key of the ledger's identity: the hash of the rows that the run trains on."""


def check_resumable(run_dir: Path, data_hash: str) -> None:
    """Raises RunDirError where another process runs here, the ledger is missing, or the training rows have changed."""
    RunLock(run_dir).release()
    ledger = run_dir / LEDGER_NAME
    if not ledger.exists():
        if any((run_dir / CHECKPOINTS).glob("step_*")):
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


def restore(run_dir: Path, learner: Learner, identity: Mapping[str, Any]) -> int:
    """Load the newest whole checkpoint, where there is one; its version, or -1. Raises CheckpointError."""
    path = checkpoint.newest(run_dir / CHECKPOINTS)
    if path is None:
        return -1
    tensors, state, own = checkpoint.read(path)
    if foreign := [name for name in identity if state["run"].get(name) != identity[name]]:
        raise CheckpointError(
            f"checkpoint {path} is of another run: {foreign[0]} is {state['run'].get(foreign[0])!r} there and "
            f"{identity[foreign[0]]!r} here. Put the checkpoints of this run back, or start a new run in another directory."
        )
    learner.load_state(tensors, state["learner"])
    take_up([each["random"] for each in own], rank=0)
    return learner.version


def lost_rows(run_dir: Path, version: int) -> str | None:
    """What to tell where metrics.jsonl lacks steps below `version`: they are not trained again, so they stay away."""
    there = {version_of(row) for row in step_rows(read_rows(run_dir / METRICS_FILE).rows)}
    lost = [step for step in range(1, version + 1) if step not in there]
    if not lost:
        return None
    steps = ", ".join(map(str, lost[:5])) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
    return f"{run_dir / METRICS_FILE} has lost its rows of the steps {steps}; the run goes on without them"
