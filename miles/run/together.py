"""`miles train` on several ranks: starts them, says why one died, and starts all of them again where the recipe asks for it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from miles.config.schema import Recipe
from miles.config.toml import dump_toml
from miles.errors import RankFailed
from miles.run.place import Machines, world_size
from miles.run.processes import Ended, RankProcesses, signal_name
from miles.run.rundir import CONFIG_FILE

SHOWN = 12
"""Log lines of a dead rank in the message."""


def train_on_ranks(
    recipe: Recipe, run_dir: Path, resume: bool, say: Callable[[str], None], environ: Mapping[str, str] = os.environ,
    role: str = "train",
) -> int:  # fmt: skip
    """Run the command `role` in one process for each rank of this machine; the exit code. Raises RankFailed.

    After a death all ranks start again from the newest checkpoint, up to `run.restarts` times; what the recipe or the
    weights are to blame for (exit codes 2 and 3) would only happen again.
    """
    ranks = RankProcesses(world_size(recipe), Machines.of(recipe, environ), run_dir.absolute() / "logs")
    with tempfile.TemporaryDirectory(prefix="miles-recipe-") as folder:
        resolved = Path(folder) / CONFIG_FILE
        resolved.write_text(dump_toml(recipe), encoding="utf-8")
        command = [sys.executable, "-m", "miles", role, str(resolved), "--run", str(run_dir)]
        for number in range(1, recipe.run.restarts + 2):
            outcome = ranks.run([*command, "--resume"] if resume else command)
            if outcome.cause is None:
                return outcome.code
            if outcome.code in (2, 3) or number > recipe.run.restarts:
                raise _failed(outcome.cause, recipe)
            resume = (run_dir / CONFIG_FILE).exists()
            say(
                f"{_what(outcome.cause, recipe)}: all ranks start again ({number} of run.restarts = {recipe.run.restarts})"
            )
    raise AssertionError("the last try returns or raises")


def _failed(end: Ended, recipe: Recipe) -> RankFailed:
    if end.said is not None:
        return RankFailed(end.said, end.code)
    lines = "".join(f"\n  {line}" for line in end.lines[-SHOWN:]) or " it wrote none."
    return RankFailed(
        f"{_what(end, recipe)}, and the other ranks were stopped. Go on from the newest checkpoint with --resume, or set "
        f"run.restarts to have that done. Its last lines ({end.log}):{lines}",
        1,
    )


def _what(end: Ended, recipe: Recipe) -> str:
    if end.code > 0:
        return f"rank {end.rank} of {world_size(recipe)} ended with exit code {end.code}"
    name = signal_name(end.code)
    why = " (out of memory, or someone's kill)" if name == "SIGKILL" else ""
    return f"rank {end.rank} of {world_size(recipe)} was ended by {name}{why}"
