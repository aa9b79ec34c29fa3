"""Ten kill -9 on a run in processes: the short form of the acceptance script, which kills a hundred times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "accept" / "part4_1_chaos_with_fakes.py"


@pytest.mark.slow
def test_a_run_whose_processes_are_killed_ends_in_the_state_of_one_without_faults():
    done = subprocess.run([sys.executable, str(SCRIPT), "10"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 7
