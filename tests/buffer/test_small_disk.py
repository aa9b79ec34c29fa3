"""A disk that is really full, and then is not: nothing acknowledged is lost, and the run completes by itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from . import small_disk

pytestmark = pytest.mark.slow
PROMPTS = 96


def test_a_full_disk_gets_space_again(tmp_path: Path) -> None:
    probe = [*small_disk.command(tmp_path, 0)[: -len(["python", "-m", "module", "folder", "prompts"])], "true"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace can be made here")
    found = small_disk.run(tmp_path, PROMPTS)
    assert found["refused"] >= 5  # the fault fired
    assert found["given_back"]
    assert found["trained"] == list(range(PROMPTS))
    assert found["as_made"]
    assert found["stored_trained"] == PROMPTS
    assert found["dropped"] == 0
    assert found["steps"] == PROMPTS // small_disk.GROUPS
    assert found["staleness"] <= small_disk.STALENESS
