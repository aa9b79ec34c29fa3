"""Requests reach 95 % of the server's own speed, and auto begins within 1.3x of the engine in process (ratios within one run)."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from common import check, finish, run

PROMISES = (
    (
        "client.py",
        "client and port, part of the tokens/s of the same server driven directly",
        lambda f: f["ratio"],
        0.95,
        None,
    ),
    ("first_step.py", "auto, time to the first step over in process", lambda f: f["ratios"]["auto"], None, 1.3),
)
"""Benchmark, what it measures, how it is read from its JSON, least, most."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for script, what, read, least, most in PROMISES:
            found = Path(folder) / f"{script}.json"
            done = run([sys.executable, f"benchmarks/rollout/{script}", "--json", str(found)])
            print(done.stdout)
            number = read(json.loads(found.read_text()))
            held = (least is None or number >= least) and (most is None or number <= most)
            check(f"{what} ({f'>= {least}' if most is None else f'<= {most}'})", round(number, 3), held)
    finish()


if __name__ == "__main__":
    main()
