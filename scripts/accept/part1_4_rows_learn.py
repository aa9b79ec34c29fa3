"""Every row of the table learns a tiny task from scratch; shuffled rewards and learning rate 0 do not; the critic fits."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from common import MILES, ROOT, check, finish, metrics, run, steps


def main() -> None:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "curves.json"
        run([*MILES[:1], "scripts/learning_curves.py", "--out", str(out), "--picture", "docs/algorithms/curves.png"])
        results = json.loads(out.read_text())
        critic = Path(folder) / "critic"
        run([*MILES, "train", "recipes/tiny_critic.toml", "--run", str(critic)])
        fitted = max(r["value/explained_variance"] for r in steps(metrics(critic)) if "value/explained_variance" in r)
    for name, result in results["rows"].items():
        check(f"{name}: rise from first to last fifth (>= 0.3)", round(result["rise"], 3), result["rise"] >= 0.3)
        if "clip_fraction" in result:
            check(f"{name}: largest clip fraction (> 0)", result["clip_fraction"], result["clip_fraction"] > 0)
    for name, result in results["controls"].items():
        check(f"control {name}: rise (< 0.1)", round(result["rise"], 3), result["rise"] < 0.1)
    check("explained variance with a fixed actor (> 0.5)", round(fitted, 3), fitted > 0.5)
    seconds = results["seconds_rows"]
    check("all rows together, seconds (< 300)", round(seconds, 1), seconds < 300)
    print(f"everything took {time.perf_counter() - started:.0f} s; picture in {ROOT.name}/docs/algorithms/curves.png")
    finish()


if __name__ == "__main__":
    main()
