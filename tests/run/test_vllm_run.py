"""`miles train` with servers of its own: it starts them, survives the death of one, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles.learn.export import export
from miles.learn.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow
RECIPE = """
[model]
name = "{model}"
[data]
source = "task:echo_digit"
[rollout]
group_size = 4
max_new_tokens = 24
[engine]
kind = "vllm"
servers = 2
max_batch = 16
kv_cache_gib = 0.1
python = "{python}"
[algorithm]
name = "grpo"
steps = 4
groups_per_step = 4
[lora]
rank = 4
[learner]
learning_rate = 3e-3
[eval]
rows = 0
[run]
threads = 1
"""


def processes_with(text: str) -> list[int]:
    """Of this machine, by their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in path.read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_for(condition, seconds: float, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_on_two_servers_outlives_one_of_them(vllm_python: str, tmp_path: Path, tools) -> None:
    export(tiny_model("llama", head_dim=32), tiny_tokenizer(), tmp_path / "model")
    recipe, run = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(RECIPE.format(model=tmp_path / "model", python=vllm_python), encoding="utf-8")
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def reward(prompts, completions, **columns):\n    return [float(sum(map(ord, text)) % 3) for text in completions]\n"
    )
    line = [
        sys.executable,
        "-m",
        "miles",
        "train",
        str(recipe),
        f'--reward.functions=["{rewards}:reward"]',
        "--run",
        str(run),
    ]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            wait_for(
                lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0, 400, process
            )
            servers = [
                pid
                for pid in processes_with(str(tmp_path / "model"))
                if b"guardian" not in (line := Path(f"/proc/{pid}/cmdline").read_bytes()) and b"vllm-0.sock" in line
            ]
            os.kill(servers[0], signal.SIGKILL)
            out, _ = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0, out
    found = tools.rows(run)
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert all(abs(row.get("kl/behavior", 0.0)) < 1e-6 for row in found)
    assert any("kl/behavior" in row for row in found)
    assert "vllm-0 was lost" in (run / "logs" / "main.log").read_text(encoding="utf-8")
    assert not processes_with(str(tmp_path / "model"))
