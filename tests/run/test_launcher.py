"""`run.launcher = "processes"`: one command, several processes, the same run; what is killed comes back, and nobody is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SHORT = {"run.launcher": "processes", "run.collectors": 2, "run.checkpoint_every": 2}


def start(runs, name: str = "run", resume: bool = False, **changes) -> subprocess.Popen:
    arguments = runs.arguments(
        name, {**SHORT, **{key.replace("__", "."): value for key, value in changes.items()}}, resume
    )
    return subprocess.Popen(
        [sys.executable, "-m", "miles", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def pids(run_dir: Path) -> dict[str, int]:
    """Of the roles of a run, by what stands on their command lines."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().decode().split("\0")
            environ = (place / "environ").read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            continue
        if "miles" not in words or (str(run_dir) not in words and str(run_dir) not in environ):
            continue
        for role in ("buffer", "learn", "collect"):
            if role in words:
                found[words[words.index("--worker") + 1] if "--worker" in words else role] = int(place.name)
    return found


def wait_for_step(run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 500
    rows = run_dir / "metrics.jsonl"
    while not rows.exists() or f'"step": {step},' not in rows.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_until_gone(found: dict[str, int]) -> None:
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{pid}").exists() for pid in found.values()):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


@pytest.mark.slow
def test_it_equals_one_process_also_after_each_role_was_killed_once(runs, tools):
    assert tools.command(*runs.arguments("near", {"algorithm.steps": 24})).code == 0
    run = start(runs, algorithm__steps=24, run__restarts=1)
    fired = []
    for step, role in ((2, "collector-0"), (4, "buffer"), (6, "learn")):
        wait_for_step(runs["run"], step)
        os.kill(pids(runs["run"])[role], signal.SIGKILL)
        fired.append(role)
    _, said = run.communicate(timeout=200)
    assert run.returncode == 0, said
    assert len(fired) == 3
    tools.same_run(runs["near"], runs["run"])
    for role in ("learner", "buffer", "collector-0", "collector-1"):
        assert (runs["run"] / "logs" / f"{role}.log").exists(), role
    assert tools.command("replay", str(runs["run"])).code == 0


@pytest.mark.slow
def test_sigterm_leaves_a_checkpoint_and_kill_minus_nine_leaves_nobody(runs, tools):
    run = start(runs, algorithm__steps=5000)
    wait_for_step(runs["run"], 3)
    found = pids(runs["run"])
    assert set(found) == {"buffer", "learn", "collector-0", "collector-1"}
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 143, said
    wait_until_gone(found)
    kept = [path.name for path in (runs["run"] / "checkpoints").glob("step_*")]
    assert kept
    again = start(runs, resume=True, algorithm__steps=5000)
    wait_for_step(runs["run"], int(max(kept)[5:]) + 2)
    found = pids(runs["run"])
    again.kill()
    again.communicate()
    wait_until_gone(found)


@pytest.mark.slow
def test_a_reward_that_always_fails_is_one_paragraph(runs, tools):
    runs.rewards.write_text("def reward(prompts, completions, **columns):\n    raise ValueError('no reward today')\n")
    run = start(runs, run__restarts_per_minute=1, run__collectors=1)
    _, said = run.communicate(timeout=100)
    assert run.returncode == 1
    assert "collector-" in said
    assert "no reward today" in said
    assert "logs/collector-" in said
