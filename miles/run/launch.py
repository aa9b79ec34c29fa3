"""`run.launcher = "processes"`: one command starts buffer, collectors and learner on this machine, and ends all of them together."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from miles.buffer.serve import TOKEN_VARIABLE
from miles.config.schema import Recipe
from miles.config.toml import dump_toml
from miles.errors import RoleFailed
from miles.run.meeting import BUFFER, WEIGHTS
from miles.run.rundir import CONFIG_FILE
from miles.run.starting import Ended, LocalStarter, Role, Starter
from miles.run.supervisor import Cast, Supervisor, how
from miles.web.listen import is_loopback

SHOWN = 30
"""Log lines of a role that failed, in the message."""
PUBLISHED = "published"


@dataclass(frozen=True)
class Site:
    """Where the roles meet: the buffer's service, and the folder that weights are published in.

    `token`: what the roles show the service; any other address than loopback needs one.
    """

    host: str
    port: int
    weights: Path
    token: str | None = None

    @property
    def place(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def environ(self) -> dict[str, str]:
        return {} if self.token is None else {TOKEN_VARIABLE: self.token}


def train_in_processes(recipe: Recipe, run_dir: Path, resume: bool, say: Callable[[str], None]) -> int:
    """The exit code. Raises RoleFailed."""
    run_dir = run_dir.absolute()
    starter = LocalStarter(run_dir / "logs")
    try:
        with tempfile.TemporaryDirectory(prefix="miles-recipe-") as folder:
            resolved = Path(folder) / CONFIG_FILE
            resolved.write_text(dump_toml(recipe), encoding="utf-8")
            site = Site("127.0.0.1", _free_port(), run_dir / PUBLISHED)
            cast = cast_of(recipe, str(resolved), run_dir, resume, site)
            return run_cast(cast, starter, recipe, run_dir, say)
    finally:
        starter.close()
        shutil.rmtree(run_dir / PUBLISHED, ignore_errors=True)


def run_cast(cast: Cast, starter: Starter, recipe: Recipe, run_dir: Path, say: Callable[[str], None]) -> int:
    """Supervise the roles of a run to its end; the exit code. Raises RoleFailed."""
    supervisor = Supervisor(cast, starter, recipe.run.restarts, recipe.run.restarts_per_minute, say)
    outcome = supervisor.run(lambda: (run_dir / CONFIG_FILE).exists())
    if outcome.cause is not None:
        raise _failed(outcome.cause, outcome.code, run_dir)
    return outcome.code


def cast_of(recipe: Recipe, resolved: str, run_dir: Path, resume: bool, site: Site) -> Cast:
    """The roles of a run, which meet at this site. `resolved`: the recipe's file."""
    meeting = {BUFFER: f"http://{site.place}", WEIGHTS: str(site.weights), **site.environ}
    command = [sys.executable, "-m", "miles"]
    buffer = [
        "buffer", "--single", "--dir", str(run_dir), "--listen", site.place,
        "--ledger", recipe.buffer.ledger, "--payloads", recipe.buffer.payloads,
    ]  # fmt: skip
    if not is_loopback(site.host):
        buffer.append("--insecure")
    names = [f"collector-{number}" for number in range(recipe.run.collectors)]
    learn = [*command, "learn", resolved, "--run", str(run_dir)]

    def learner(resume: bool) -> Role:
        return Role("learner", [*learn, "--resume"] if resume else learn, meeting, shown=True)

    return Cast(
        Role("buffer", [*command, *buffer], site.environ),
        [Role(name, [*command, "collect", resolved, "--worker", name], meeting) for name in names],
        learner(resume),
        lambda: learner((run_dir / CONFIG_FILE).exists()),
    )


def _free_port() -> int:
    """A port that the service can have now and, after a restart, again."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _failed(end: Ended, code: int, run_dir: Path) -> RoleFailed:
    if end.said is not None and code in (2, 3):
        return RoleFailed(end.said if end.role.name == "learner" else f"{end.role.name}: {end.said}", code)
    lines = "".join(f"\n  {line}" for line in end.lines[-SHOWN:]) or " it wrote none."
    log = os.path.relpath(run_dir / "logs" / f"{end.role.name}.log")
    return RoleFailed(
        f"{how(end)}, and the run was stopped. Go on from the newest checkpoint with --resume (run.restarts, "
        f"run.restarts_per_minute say how often a role is started again). Its last lines ({log}):{lines}",
        code,
    )
