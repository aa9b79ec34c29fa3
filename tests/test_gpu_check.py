"""The prepared check for a GPU runs, here on a CPU: every mode that a CPU has gives the CPU's numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu_check.py"


@pytest.mark.slow
def test_every_mode_agrees_with_the_cpu(tmp_path):
    out = tmp_path / "check.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--small", "--steps", "1", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SCRIPT.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 of 5 modes agree with the CPU" in done.stdout
    modes = json.loads(out.read_text())["modes"]
    assert 0 < modes["bf16"]["differs_by"]["grad_norm"] < 5e-2, "bf16 is really another type"
    assert modes["fp32"]["tokens_per_s"] > 0
