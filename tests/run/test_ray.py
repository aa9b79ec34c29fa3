"""`run.launcher = "ray"` on a cluster of two nodes of this machine, with token authentication: the same run, and nobody is left."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
OVER_TWO = {
    "run.launcher": "ray", "run.collectors": 2, "run.resources.learner": ["learn=1"],
    "run.resources.collector": ["collect=1"],
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """Address and token of two nodes, as a driver's environment says them."""
    environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    nodes = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("two_nodes.py"))], env={**os.environ, **environ},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert nodes.stdin is not None
    assert nodes.stdout is not None
    try:
        address = next(line.split()[1] for line in nodes.stdout if line.startswith("address "))
        yield {**environ, "MILES__RUN__RAY_ADDRESS": address}
    finally:
        nodes.stdin.close()
        nodes.wait(60)
        nodes.stdout.close()


def start(runs, cluster, name: str = "run", **changes) -> subprocess.Popen:
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    return subprocess.Popen(
        [sys.executable, "-m", "miles", *runs.arguments(name, {**OVER_TWO, **changes})],
        env={**os.environ, **cluster}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def roles_of(run_dir: Path) -> dict[str, int]:
    """The process of each role, by the folder that its environment or its command names."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().decode().split("\0")
            environ = (place / "environ").read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            continue
        if "miles" in words and f"{run_dir}" in f"{words} {environ}":
            kind = next((word for word in words if word in ("buffer", "learn", "collect")), None)
            if kind is not None:
                found[words[words.index("--worker") + 1] if kind == "collect" else kind] = int(place.name)
    return found


def of_environ(pid: int, name: str) -> str:
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return next(variable.partition("=")[2] for variable in variables if variable.startswith(f"{name}="))


def actor_of(pid: int) -> int:
    """The parent of a process: the worker that Ray runs the actor in."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_for_step(run: subprocess.Popen, run_dir: Path, step: int) -> None:
    deadline, rows = time.monotonic() + 90, run_dir / "metrics.jsonl"
    while not rows.exists() or f'"step": {step},' not in rows.read_text():
        assert time.monotonic() < deadline
        assert run.poll() is None, run.communicate()
        time.sleep(0.02)


def wait_until_gone(pids) -> None:
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


def test_two_nodes_equal_one_process_and_a_killed_collector_actor_comes_back(runs, tools, cluster):
    assert tools.command(*runs.arguments("near", {"algorithm.steps": 16})).code == 0
    run = start(runs, cluster, algorithm__steps=16)
    wait_for_step(run, runs["run"], 2)
    found = roles_of(runs["run"])
    assert set(found) == {"buffer", "learn", "collector-0", "collector-1"}
    node = {role: of_environ(pid, "RAY_RAYLET_PID") for role, pid in found.items()}
    assert node["learn"] == node["buffer"] != node["collector-0"] == node["collector-1"]
    assert "RAY_AUTH_TOKEN" not in Path(f"/proc/{found['collector-0']}/environ").read_text()
    os.kill(actor_of(found["collector-0"]), signal.SIGKILL)
    said, _ = run.communicate(timeout=200)
    assert run.returncode == 0, said
    assert "collector-0 was ended by SIGKILL (out of memory, or a kill): it is started again" in said
    tools.same_run(runs["near"], runs["run"])
    wait_until_gone(found.values())


def test_ranks_of_the_learner_stand_on_two_nodes(runs, cluster):
    run = start(
        runs, cluster, algorithm__steps=2, run__collectors=1, parallel__shard=2, run__resources__learner=["CPU=2"],
        run__resources__collector=["CPU=0"],
    )  # fmt: skip
    said, _ = run.communicate(timeout=200)
    assert run.returncode == 0, said


def test_nobody_is_left_when_the_driver_is_killed(runs, cluster):
    run = start(runs, cluster, algorithm__steps=5000)
    wait_for_step(run, runs["run"], 1)
    found = roles_of(runs["run"])
    run.kill()
    run.communicate()
    wait_until_gone(found.values())


def test_sigterm_ends_with_a_checkpoint(runs, cluster):
    run = start(runs, cluster, algorithm__steps=5000, run__collectors=1)
    wait_for_step(run, runs["run"], 1)
    found = roles_of(runs["run"])
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 143, said
    assert list((runs["run"] / "checkpoints").glob("step_*"))
    wait_until_gone(found.values())


def test_without_the_token_nobody_joins(runs, cluster):
    run = start(runs, {**cluster, "RAY_AUTH_TOKEN": "another"})
    said, _ = run.communicate(timeout=100)
    assert run.returncode == 2
    assert "run.ray_address" in said
    assert "Traceback" not in said


def test_what_no_node_has_is_said(runs, cluster):
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom miles.run import cluster, recipes\n"
        "recipe = recipes.resolve([Path(sys.argv[1])], {'run.launcher': 'ray', 'run.resources.collector': ['huge=3']}, os.environ)\n"
        "cluster.train_on_ray(recipe, Path(sys.argv[2]), False, print, patience=20)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(runs.recipe), str(runs["run"])], env={**os.environ, **cluster},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert "collector-0 asks for CPU=1 huge=3 (run.resources.collector)" in done.stderr
    assert "learn=2" in done.stderr
