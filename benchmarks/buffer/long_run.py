"""A ledger with 10^6 ordinals against one with 10^3: seconds of a step's leases and its manifest, and memory.

    python benchmarks/buffer/long_run.py [FOLDER] [ORDINALS]

The history is written as rows; then both ledgers lease, store, take and advance the same steps by turns.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from groups import build

from miles.buffer.ledger import Ledger
from miles.buffer.settings import LedgerSettings
from miles.buffer.stream import PromptStream

GROUPS, STEPS, SIZE = 100, 20, 2000
ROWS = 1000


def with_history(folder: Path, ordinals: int) -> Ledger:
    """A ledger that has trained so many ordinals."""
    folder.mkdir()
    ledger = Ledger(folder, LedgerSettings(GROUPS, 1), PromptStream(ROWS, 0, True, GROUPS), {})
    steps = ordinals // GROUPS
    db = ledger._store.db
    db.begin("local")
    db.executemany(
        "INSERT INTO prompt (run, ordinal, row, state, attempts, step) VALUES ('local', ?, ?, 'trained', 1, ?)",
        ((ordinal, ordinal % ROWS, ordinal // GROUPS) for ordinal in range(ordinals)),
    )
    db.executemany(
        "INSERT INTO grp VALUES ('local', ?, 0, 0, 8, 0.5, 0.5, ?, NULL, NULL, NULL, 100, ?, '{}', NULL)",
        ((ordinal, ordinal // GROUPS, f"{ordinal:064x}") for ordinal in range(ordinals)),
    )
    db.executemany(
        "INSERT INTO manifest VALUES ('local', 0, ?, ?, ?, 0, ?)",
        ((ordinal // GROUPS, ordinal % GROUPS, ordinal, f"{ordinal:064x}") for ordinal in range(ordinals)),
    )
    db.executemany("INSERT INTO step VALUES ('local', 0, ?, ?, '', '', NULL)", ((step, step) for step in range(steps)))
    db.execute(
        "UPDATE run SET next_ordinal = ?, next_step = ?, weight_version = ?, kept_from = ? WHERE id = 'local'",
        (ordinals, steps, steps, steps),
    )
    db.commit()
    return ledger


def step(ledger: Ledger, times: dict[str, list[float]]) -> None:
    """One step, with the time of its leases, and of its manifest and advance."""
    version = ledger.gauges()["weight_version"]
    begin = time.perf_counter()
    leases = ledger.lease(GROUPS, "bench", 600.0)
    leased = time.perf_counter()
    for lease in leases:
        ledger.put(lease, build(lease.ordinal, ledger.stream.at(lease.ordinal).row, SIZE, lease.min_version))
    done = time.perf_counter()
    ledger.create(version)
    ledger.advance(version + 1)
    times["lease"].append(leased - begin)
    times["put"].append(done - leased)
    times["take"].append(time.perf_counter() - done)


def main(parent: str = ".", ordinals: str = "1000000") -> None:
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        short, long = with_history(Path(folder) / "short", 1000), with_history(Path(folder) / "long", int(ordinals))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        times: dict[str, dict[str, list[float]]] = {
            name: {"lease": [], "put": [], "take": []} for name in ("10^3", "long")
        }
        for _ in range(STEPS):
            step(short, times["10^3"])
            step(long, times["long"])
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        short.close()
        long.close()
    medians = {name: {what: median(values) for what, values in each.items()} for name, each in times.items()}
    ratios = {what: round(medians["long"][what] / medians["10^3"][what], 3) for what in ("lease", "put", "take")}
    print(
        json.dumps({"ordinals": int(ordinals), "seconds": medians, "long / 10^3": ratios, "grown_kib": grown}, indent=2)
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
