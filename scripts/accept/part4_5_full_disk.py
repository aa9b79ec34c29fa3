"""16 MiB disk, then space again: no acknowledged group lost, the run completes by itself. Buffer deleted: restored, 0 skipped, 0 twice."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import MILES, ROOT, check, finish, run

sys.path.insert(0, str(ROOT))

from miles.buffer.client import RemoteSource
from miles.buffer.ledger import LedgerReader
from miles.buffer.transport import Address
from tests.buffer import small_disk
from tests.buffer.serving import BufferProcess

PROMPTS, STEPS, GROUPS_PER_STEP, LOST_AT = 96, 12, 4, 3
TINY = Path(__file__).with_name("tiny.toml")
TRAIN = [*MILES, "train", str(TINY), "--algorithm.steps", str(STEPS), "--run.checkpoint_every", "1"]


def full_disk(folder: Path) -> None:
    print(f"$ miles buffer ... on a disk of {small_disk.DISK_MIB} MiB; {PROMPTS} prompts", flush=True)
    found = small_disk.run(folder, PROMPTS)
    check("the fault fired: answers of 507", found["refused"], found["refused"] >= 5)
    check("prompts trained, each once", len(found["trained"]), found["trained"] == list(range(PROMPTS)))
    check("groups trained as they were made", found["as_made"], found["as_made"])
    check("prompts dropped", found["dropped"], found["dropped"] == 0)
    check("steps whose chain and groups hold", found["steps"], found["steps"] == PROMPTS // small_disk.GROUPS)


def deleted(folder: Path) -> None:
    """The folder of the service goes while a run trains on it; the run goes on from its checkpoint."""
    calm, again = folder / "calm", folder / "again"
    run([*TRAIN, "--run", str(calm)])
    with BufferProcess(folder / "buffer") as service:
        place = ["--buffer.url", service.url, "--buffer.run", "demo", "--run", str(again)]
        training = subprocess.Popen([*TRAIN, *place], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        with RemoteSource(Address(service.url, "demo")) as source:
            while training.poll() is None and not (
                source.exists() and source.stats().trained >= LOST_AT * GROUPS_PER_STEP
            ):
                time.sleep(0.02)
        shutil.rmtree(folder / "buffer" / "demo")
        said = training.communicate()[1].decode()
        check(
            "the fault fired: exit code of the run that lost its buffer", training.returncode, training.returncode == 1
        )
        check("its paragraph", said.strip()[-160:], "miles:" in said and "Traceback" not in said)
        run([*TRAIN, *place, "--resume"])
    reader = LedgerReader(folder / "buffer" / "demo", "demo")
    steps, stats = reader.verify(), reader.stats()
    placed = [ordinal for step in range(steps) for ordinal in reader.manifest(step)]
    reader.close()
    check("prompts skipped", stats.issued - len(placed), placed == list(range(STEPS * GROUPS_PER_STEP)))
    check("prompts trained twice", len(placed) - len(set(placed)), len(placed) == len(set(placed)))
    weights = [(path / "final" / "model.safetensors").read_bytes() for path in (calm, again)]
    check("weights equal to the bit to the calm run's", weights[0] == weights[1], weights[0] == weights[1])


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        full_disk(Path(name))
        deleted(Path(name))
    finish()


if __name__ == "__main__":
    main()
