"""Ray on two local nodes: the quickstart learns, a collector's actor is killed on the way, and the run ends well."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import MILES, ROOT, check, evals, finish, metrics

ASKS = ["--run.resources.learner", '["learn=1"]', "--run.resources.collector", '["collect=1"]']


def main() -> None:
    environ = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    nodes = subprocess.Popen(
        [sys.executable, ROOT / "tests/run/two_nodes.py"], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert nodes.stdin is not None
    assert nodes.stdout is not None
    try:
        address = next(line.split()[1] for line in nodes.stdout if line.startswith("address "))
        with tempfile.TemporaryDirectory() as folder:
            learns(address, environ, Path(folder) / "run")
    finally:
        nodes.stdin.close()
        nodes.wait()
    finish()


def learns(address: str, environ: dict[str, str], target: Path) -> None:
    command = [*MILES, "train", "recipes/quickstart.toml", "--run.launcher", "ray", "--run.ray_address", address]
    command += ["--run.collectors", "2", *ASKS, "--run", str(target)]
    run = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    killed = kill_an_actor(run, target)
    said, _ = run.communicate()
    check("a collector's actor was killed, and started again", killed, "it is started again" in said)
    check("exit code", run.returncode, run.returncode == 0)
    reward = evals(metrics(target))[-1]["eval/reward/mean"]
    check("sampled held-out reward at the end > 0.8", reward, reward > 0.8)


def kill_an_actor(run: subprocess.Popen[str], target: Path) -> int | None:
    """After the third step: the parent of the process of collector-0, which is the worker of its actor."""
    rows = target / "metrics.jsonl"
    while run.poll() is None and not (rows.exists() and '"step": 3,' in rows.read_text()):
        time.sleep(0.5)
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().decode().split("\0")
            ours = str(target) in (place / "environ").read_text()
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if ours and "collect" in words and "collector-0" in words:
            os.kill(parent, signal.SIGKILL)
            return parent
    return None


if __name__ == "__main__":
    main()
