"""Seconds from `miles train` to the end of the first step, with each engine: in process, auto, and vLLM.

`auto` is told to hand over at once, so that its server is started as early as it ever is. Rounds alternate.

    python benchmarks/rollout/first_step.py [RECIPE] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KINDS = {
    "inprocess": ["--engine.kind", "inprocess"],
    "auto": ["--engine.kind", "auto", "--engine.crossover", "1"],
    "vllm": ["--engine.kind", "vllm"],
}


def seconds(recipe: str, kind: str, folder: Path) -> float:
    """Until the first row of metrics is written; the run is ended then."""
    line = [
        sys.executable,
        "-m",
        "miles",
        "train",
        recipe,
        *KINDS[kind],
        "--eval.rows",
        "0",
        "--run",
        str(folder / "run"),
    ]
    rows = folder / "run" / "metrics.jsonl"
    started = time.perf_counter()
    with subprocess.Popen(
        [*line, "--run.checkpoint_every", "none"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as run:
        try:
            while not (rows.exists() and rows.stat().st_size):
                if run.poll() is not None:
                    assert run.stdout is not None
                    raise SystemExit(run.stdout.read().decode())
                time.sleep(0.02)
            return time.perf_counter() - started
        finally:
            run.send_signal(signal.SIGTERM)
            run.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="?", default="recipes/quickstart_vllm.toml")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(options.rounds):
        for kind in KINDS:
            with tempfile.TemporaryDirectory(prefix="miles-bench-") as folder:
                found[kind].append(seconds(options.recipe, kind, Path(folder)))
            print(f"round {number + 1}: {kind} {found[kind][-1]:.1f} s", flush=True)
    ratios = {
        kind: statistics.median(a / b for a, b in zip(found[kind], found["inprocess"], strict=True)) for kind in KINDS
    }
    print("medians over in process: " + ", ".join(f"{kind} {ratio:.2f}x" for kind, ratio in ratios.items()))
    if options.json:
        options.json.write_text(json.dumps({"seconds": found, "ratios": ratios}))


if __name__ == "__main__":
    main()
