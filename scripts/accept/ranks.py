"""Shared by the acceptance scripts that run several ranks: a small recipe, and what is going on in a run."""

from __future__ import annotations

import json
from pathlib import Path

TINY = Path(__file__).with_name("tiny.toml")


def last_complete(run_dir: Path) -> int:
    """The last step in metrics.jsonl, 0 where there is none."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    except OSError:
        return 0
    return max((json.loads(line).get("step", 0) for line in lines if line.endswith("\n")), default=0)


def ranks_of(parent: int) -> dict[int, int]:
    """The process ids of a run's ranks, by rank."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) != parent:
                continue
            variables = dict(part.partition("=")[::2] for part in (entry / "environ").read_text().split("\0"))
        except (OSError, ValueError):
            continue
        if "RANK" in variables:
            found[int(variables["RANK"])] = int(entry.name)
    return found


def equal_but_for_rounding(a: dict, b: dict, keys: tuple[str, ...], tolerance: float = 1e-5) -> float:
    """The largest relative difference of these metrics."""
    return max(abs(a[key] - b[key]) / max(abs(a[key]), abs(b[key]), tolerance) for key in keys)
