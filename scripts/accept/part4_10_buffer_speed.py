"""The buffer's promised figures: durable groups beside the disk's own rate, 10^6 ordinals as fast as 10^3, a ready manifest within 20 ms."""

from __future__ import annotations

import json
import sys
import tempfile

from common import ROOT, check, finish, run

BENCHMARKS = ROOT / "benchmarks" / "buffer"
SMALL, LARGE = "64 KiB", "1024 KiB"


def measured(name: str, *arguments: str) -> dict:
    return json.loads(run([sys.executable, str(BENCHMARKS / name), *arguments]).stdout)


def main() -> None:
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        rates = measured("compare.py", folder, "--groups", "240")
        for case, row in rates.items():
            print(f"  {case}: " + ", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        for writers in (1, 16):
            row = rates[f"{SMALL}, {writers} writers"]
            check(f"{SMALL}, {writers} writers: embedded / disk", row["embedded / disk"], row["embedded / disk"] >= 0.6)
            check(
                f"{SMALL}, {writers} writers: HTTP / embedded",
                row["service / embedded"],
                row["service / embedded"] >= 0.4,
            )
        best = max(rates[f"{LARGE}, {writers} writers"]["embedded / disk"] for writers in (1, 16))
        check("1 MiB groups: embedded / disk", best, best >= 0.4)
        long = measured("long_run.py", folder)
        for what in ("lease", "take"):
            ratio = long["long / 10^3"][what]
            check(f"10^6 ordinals against 10^3: time of {what}", ratio, ratio <= 1.2)
        grown = round(long["grown_kib"] / 1024, 1)
        check("memory grown over 40 steps, MiB", grown, grown < 32)
        ready = measured("ready.py", folder)
        check("wait for a manifest that is ready, median in ms", ready["median_ms"], ready["median_ms"] <= 20)
    finish()


if __name__ == "__main__":
    main()
