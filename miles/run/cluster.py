"""`run.launcher = "ray"`: one command starts buffer, collectors and learner on the nodes of a Ray cluster, and ends them together.

Imports no torch, and Ray only when a run begins.
"""

from __future__ import annotations

import importlib.util
import math
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from miles.config.schema import Recipe
from miles.config.toml import dump_toml
from miles.errors import BadInput
from miles.run.launch import PUBLISHED, Site, cast_of, run_cast
from miles.run.place import world_size
from miles.web.listen import is_loopback

PATIENCE_S = 60.0
"""For the cluster to have room for a role when the run begins."""
REACH_S = 10.0
MODE, TOKEN, TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
ONLY_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0, on Linux too: Ray stays on the loopback device; otherwise it would take 127.0.0.1 for the machine's other address."""
RECIPE_WORD = "the recipe"
"""Stands on the command lines for a file that each node writes for itself."""


def missing_launcher(recipe: Recipe) -> list[str]:
    """A sentence where the launcher needs a package that is not installed."""
    if recipe.run.launcher != "ray" or importlib.util.find_spec("ray") is not None:
        return []
    return ['run.launcher = "ray" needs the package ray, which is not installed: pip install "miles-rl[ray]".']


def train_on_ray(
    recipe: Recipe, run_dir: Path, resume: bool, say: Callable[[str], None], patience: float = PATIENCE_S
) -> int:
    """The exit code. `patience`: seconds for the cluster to have room for a role. Raises BadInput and RoleFailed."""
    run_dir, address = run_dir.absolute(), recipe.run.ray_address
    prepare(os.environ, address, say)
    from miles.run import ray as cluster  # after its settings

    cpus = max(os.cpu_count() or 1, math.ceil(_sum_of_cpus(recipe)))
    shared = recipe.publish.directory
    weights = Path(shared).absolute() / f"run-{secrets.token_hex(4)}" if shared else run_dir / PUBLISHED
    with (
        cluster.joined(address, cpus) as here,
        _seen(run_dir.parent) as run_mark,
        _seen(weights.parent) as weights_mark,
    ):
        plan = cluster.Plan(
            asks=asks_of(recipe, cluster.has_gpus()),
            near={"learner": (here, True)} | ({} if recipe.run.resources.buffer else {"buffer": (here, False)}),
            ranks=world_size(recipe), patience=patience, folder=os.getcwd(),
            marks={"learner": (run_mark, weights_mark), "buffer": (run_mark,), "collector": (weights_mark,)},
            recipe_word=RECIPE_WORD, recipe=dump_toml(_met_at_ours(recipe)), logs=run_dir / "logs",
        )  # fmt: skip
        stands = cluster.find_node(plan, "buffer")
        plan = replace(plan, near={**plan.near, "buffer": (stands.node, False)})
        site = Site(stands.ip, stands.port, weights, secrets.token_hex(32))
        cast = cast_of(recipe, RECIPE_WORD, run_dir, resume, site)
        try:
            return run_cast(cast, cluster.RayStarter(plan, say), recipe, run_dir, say)
        finally:
            shutil.rmtree(weights, ignore_errors=True)


def prepare(environ: MutableMapping[str, str], address: str | None, say: Callable[[str], None]) -> None:
    """Settings that Ray reads when it is imported: token authentication on, no statistics sent to its makers. Raises BadInput.

    They stay for the life of this process, as what Ray has read of them does.
    """
    environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if address is None or is_loopback(_host(address)):
        environ[ONLY_LOOPBACK] = "0"
    if address is None:
        environ[MODE] = "token"
        if TOKEN not in environ and TOKEN_FILE not in environ:
            environ[TOKEN] = secrets.token_hex(32)
        return
    _reach(address)
    if environ.get(MODE) == "disabled":
        say(
            f"warning: {MODE}=disabled: whoever can reach the Ray cluster at {address} can run programs on it as you; start it with "
            f"{MODE}=token where others share its network"
        )
        return
    environ.setdefault(MODE, "token")
    if TOKEN not in environ and TOKEN_FILE not in environ and not (Path.home() / ".ray" / "auth_token").exists():
        raise BadInput(
            f"run.ray_address = {address}: this machine holds no token of that cluster. Set {TOKEN_FILE} (or {TOKEN}) to the one "
            f"that its nodes were started with (ray get-auth-token), or {MODE}=disabled for a cluster that was started without"
        )


def asks_of(recipe: Recipe, gpus: bool) -> dict[str, dict[str, float]]:
    """What one process of each role asks of its node. `gpus`: whether a node of the cluster has some."""
    computes = {"CPU": 1.0}
    if recipe.run.device == "cuda" or (recipe.run.device == "auto" and gpus):
        computes["GPU"] = 1.0
    given = recipe.run.resources
    return {
        "learner": computes | _amounts(given.learner),
        "collector": computes | _amounts(given.collector),
        "buffer": _amounts(given.buffer),
    }


def _met_at_ours(recipe: Recipe) -> Recipe:
    """Without what is for the service of somebody else: the token of ours is in the roles' environment."""
    return recipe.model_copy(update={"buffer": recipe.buffer.model_copy(update={"token_file": None, "ca_file": None})})


def _amounts(texts: Sequence[str]) -> dict[str, float]:
    """Of `NAME=AMOUNT`, which the rules of the recipe have looked at."""
    return {name: float(amount) for name, _, amount in (text.partition("=") for text in texts)}


def _sum_of_cpus(recipe: Recipe) -> float:
    """That the roles ask for in all: a cluster of this run's own offers as many, as processes share cores anyway."""
    asks: Mapping[str, Mapping[str, float]] = asks_of(recipe, False)
    counts = {"learner": world_size(recipe), "collector": recipe.run.collectors, "buffer": 1}
    return sum(asks[role].get("CPU", 0) * count for role, count in counts.items())


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _reach(address: str) -> None:
    """Raises BadInput where nobody listens: Ray itself would wait long, and say little."""
    port = int(address.rpartition(":")[2])
    try:
        socket.create_connection((_host(address), port), timeout=REACH_S).close()
    except (OSError, OverflowError) as error:
        raise BadInput(
            f"run.ray_address = {address} cannot be reached: {error}. Give HOST:PORT of a running cluster's head (ray start --head "
            "prints it), or leave it out for a Ray of this machine's own"
        ) from error


@contextmanager
def _seen(folder: Path) -> Iterator[Path]:
    """A file by which nodes see whether they have this folder too; the first of its parents that exists stands for it."""
    while not folder.exists():
        folder = folder.parent
    try:
        descriptor, name = tempfile.mkstemp(prefix=".miles-seen-", dir=folder)
    except OSError as error:
        raise BadInput(f"{folder} cannot be written to: {error}; name another folder for the run") from error
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
