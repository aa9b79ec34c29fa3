"""SIGTERM, SIGUSR1, two SIGTERMs, kill -9 at 30 file operations of a save, a byte flipped in 30 checkpoints: resume is bitwise."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from common import MILES, check, finish, run
from crew import Run, final_weights, manifests
from ranks import TINY

from miles.__main__ import main as miles
from miles.errors import CheckpointError
from miles.learn import checkpoint

STEPS = 60
CREW = ("--run.launcher", "processes", "--run.collectors", 2)
FILE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")


def checkpoints(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step_*") if path.name[5:].isdecimal())


def stopped(folder: Path, whole: bytes) -> None:
    """One SIGTERM, and two, a tenth of a second apart."""
    for times in (1, 2):
        training = Run(
            folder / f"stopped-{times}", TINY, *CREW, "--algorithm.steps", STEPS, "--run.checkpoint_every", 100
        )
        training.wait_for_step(5)
        began = time.monotonic()
        for _ in range(times):
            training.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        code, _ = training.end()
        seconds = time.monotonic() - began
        check(f"{times} SIGTERM: exit code", code, code == 143)
        check(f"{times} SIGTERM: seconds until the end (10 allowed)", round(seconds, 1), seconds < 10)
        kept = checkpoints(training.folder)
        check(f"{times} SIGTERM: checkpoint, below the last step", kept, bool(kept) and 5 <= kept[-1] < STEPS)
        again = Run(training.folder, TINY, *CREW, "--algorithm.steps", STEPS, "--run.checkpoint_every", 100, "--resume")
        code, _ = again.end()
        equal = code == 0 and final_weights(training.folder) == whole
        check(f"{times} SIGTERM: resumed, the weights equal the unbroken run's", equal, equal)


def asked(folder: Path) -> None:
    training = Run(folder / "asked", TINY, *CREW, "--algorithm.steps", STEPS, "--run.checkpoint_every", 1000)
    training.wait_for_step(5)
    training.process.send_signal(signal.SIGUSR1)
    training.wait_for_step(STEPS)
    code, _ = training.end()
    kept = checkpoints(training.folder)
    check("SIGUSR1: exit code, and checkpoints", (code, kept), code == 0 and len(kept) == 2 and 5 <= kept[0] < STEPS)


def child(arguments: list[str], kill_at: int | None) -> int:
    """Train in a fork of this process, killed before the file operation of that number in a save; how it ended."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if kill_at is not None:
        left = [kill_at]

        def hook(event: str, values: tuple[object, ...]) -> None:
            if event in FILE_EVENTS and "/checkpoints/" in str(values[0]):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = miles(arguments)
    os._exit(code)


def killed(folder: Path) -> None:
    """Kill -9 at 30 random file operations of the saves of a run in one process."""
    import miles.run.here  # noqa: F401  # what every child needs

    def arguments(name: str, resume: bool = False) -> list[str]:
        options = [
            "--algorithm.steps",
            "6",
            "--run.checkpoint_every",
            "1",
            "--run",
            str(folder / name),
            "--log.live",
            "off",
        ]
        return ["train", str(TINY), *options, *["--resume"] * resume]

    assert child(arguments("unbroken"), None) == 0
    moments, fired, wrong = random.Random(0), 0, 0
    for number in range(30):
        name = f"killed-{number}"
        fired += child(arguments(name), moments.randrange(1, 120)) == -signal.SIGKILL
        root = folder / name / "checkpoints"
        newest = checkpoint.newest(root) if root.exists() else None
        if newest is not None:
            checkpoint.load(newest)
        resumed = child(arguments(name, resume=True), None)
        wrong += resumed != 0 or final_weights(folder / name) != final_weights(folder / "unbroken")
        shutil.rmtree(folder / name, ignore_errors=True)
    check("kills at a file operation of a save, of 30", fired, fired == 30)
    check("of these, runs that did not go on to the same bits", wrong, wrong == 0)


def flipped(folder: Path) -> None:
    """One bit of one byte in each of 30 copies of a checkpoint."""
    path = checkpoint.newest(folder / "unbroken" / "checkpoints")
    assert path is not None
    places, found = random.Random(1), 0
    for _ in range(30):
        copy = folder / "flipped" / path.name
        shutil.copytree(path, copy)
        file = places.choice(sorted(each for each in copy.iterdir() if each.stat().st_size))
        raw = bytearray(file.read_bytes())
        raw[places.randrange(len(raw))] ^= 1 << places.randrange(8)
        file.write_bytes(raw)
        try:
            checkpoint.load(copy)
        except CheckpointError:
            found += 1
        shutil.rmtree(folder / "flipped")
    check("flipped bits found, of 30", found, found == 30)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        killed(folder)
        flipped(folder)
        run([*MILES, "train", str(TINY), "--algorithm.steps", str(STEPS), "--run", str(folder / "whole")])
        stopped(folder, final_weights(folder / "whole"))
        asked(folder)
        ordinals = [ordinal for _, ordinal, _ in manifests(folder / "stopped-1")]
        once = ordinals == list(range(len(ordinals)))
        check("after SIGTERM and resume, each prompt in exactly one step", once, once)
    finish()


if __name__ == "__main__":
    main()
