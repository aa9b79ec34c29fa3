"""A proxy that loses 20 % of replies, repeats 20 % of requests and reorders; 16 clients with zombies: each prompt is trained once."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from common import ROOT, check, finish

sys.path.insert(0, str(ROOT))

from miles.buffer.ledger import LedgerReader
from miles.buffer.stream import PromptStream
from tests.buffer.conftest import build_group
from tests.buffer.crowd import Crowd, learn
from tests.buffer.proxy import misbehaving
from tests.buffer.serving import BufferProcess, registered

ROWS, GROUPS, CLIENTS, STALENESS = 800, 32, 16, 1


def main() -> None:
    stream = PromptStream(ROWS, 0, True, GROUPS, epochs=1)
    print(f"$ miles buffer ... behind a proxy; {CLIENTS} clients, {ROWS} prompts, {GROUPS} a step", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with BufferProcess(folder) as service, misbehaving(service.url) as (url, faults):
            settings = {"max_staleness": STALENESS, "max_attempts": 100}
            with registered(url, stream=stream, patience=120.0, **settings) as source:
                crowd = Crowd(source.address, stream, build_group, CLIENTS)
                crowd.start()
                seen = learn(source, crowd.check)
                crowd.join()
        reader = LedgerReader(folder / "demo", "demo")
        stats, steps = reader.stats(), reader.verify()
        rows = reader._store.value("SELECT count(*) FROM grp WHERE run = ?")
        reader.close()
    trained = [group.ordinal for step in seen for group in step]
    share = (
        f"{faults.lost} of {faults.requests} replies lost, {faults.repeated} requests repeated, {faults.late} delayed"
    )
    check("faults that fired", share, min(faults.lost, faults.repeated) > 0.15 * faults.requests)
    check("groups of zombies that were refused", crowd.fenced, crowd.fenced > 0)
    check("prompts trained, each once", len(set(trained)), sorted(trained) == list(range(ROWS)))
    check("rows of groups", rows, rows == ROWS)
    check("steps whose chain of hashes holds", steps, steps == ROWS // GROUPS)
    check("issued = trained", (stats.issued, stats.trained), stats.issued == stats.trained == ROWS)
    worst = max(step.staleness_max for step in stats.steps)
    check(f"largest staleness (S = {STALENESS})", worst, worst <= STALENESS)
    finish()


if __name__ == "__main__":
    main()
