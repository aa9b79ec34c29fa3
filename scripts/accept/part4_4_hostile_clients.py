"""10,000 random frames, pickles, 4 GB headers, cut bodies, 200 path-like names, forged leases: refused, nothing lost, memory bounded."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from common import ROOT, check, finish

sys.path.insert(0, str(ROOT))

from miles.types import Group, Lease
from tests.buffer.conftest import build_group
from tests.buffer.hostile import Attacker
from tests.buffer.serving import BufferProcess, registered

FRAMES, NAMES, VOCABULARY = 10_000, 200, 1000


def make(lease: Lease) -> Group:
    return build_group(lease.ordinal, lease.ordinal, lease.min_version)


def main() -> None:
    print("$ miles buffer ... and one client that means it harm", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        touched = folder / "touched"
        with BufferProcess(folder / "buffer") as service:
            source = registered(service.url, vocabulary=VOCABULARY, max_refused=1.0, max_staleness=1)
            registered(service.url, "other", vocabulary=VOCABULARY).close()
            attacker = Attacker(service.url, "demo", make, VOCABULARY)
            lease, second = attacker.lease(2)
            good = attacker.bodies(lease, 200, touched)
            before = service.memory()
            attacker.bodies(lease, FRAMES, touched)
            attacker.calls(1000)
            attacker.names(NAMES)
            attacker.leases(lease, good, "other")
            attacker.wire(lease, good)
            grown = (service.memory() - before) / 2**20
            stats = source.stats()
            served = [attacker.put("good", lease, good.payload), attacker.put("replay", lease, good.payload)]
            attacker.put("good", second, attacker.bodies(second, 0, touched).payload)
            ordinals = [group.ordinal for group in source.take(0)]
            attacker.close()
            source.close()
            alive = service.process.poll() is None
        names = (
            sorted(path.name for path in folder.iterdir()),
            sorted(path.name for path in (folder / "buffer").iterdir()),
        )
    answers = attacker.answers
    accepted = sum(
        count for (kind, status), count in answers.items() if status < 400 and status and kind not in ("good", "replay")
    )
    failed = sum(count for (_, status), count in answers.items() if status >= 500)
    check("requests sent", sum(answers.values()), sum(answers.values()) > 2 * FRAMES)
    check("bad requests that were accepted", accepted, accepted == 0)
    check("answers of 500 and above", failed, failed == 0)
    check("files that a pickle made", int(touched.exists()), not touched.exists())
    check("files outside of the runs' folders", names, names == (["buffer"], ["demo", "other"]))
    check("groups stored or leases lost meanwhile", (stats.ready, stats.leased), (stats.ready, stats.leased) == (0, 2))
    check("memory of the service grown by MiB", round(grown, 1), grown < 64)
    check("then a good group, and again", served, served == [201, 200])
    check("still serving", ordinals, alive and ordinals == [0, 1])
    finish()


if __name__ == "__main__":
    main()
