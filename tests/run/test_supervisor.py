"""The supervisor, with roles that are small programs: what died starts again, within bounds, and all end together."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from miles.run.starting import LocalStarter, Role
from miles.run.supervisor import Cast, Limit, Outcome, Supervisor

HEAD = """
import os, pathlib, signal, sys, time
def stop(signum, frame):
    print("asked to stop", flush=True)
    sys.exit(128 + signum)
signal.signal(signal.SIGTERM, stop)
def times(name):
    path = pathlib.Path(name)
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    return len(path.read_text())
"""
WAITS = "time.sleep(600)"


class Stage:
    """Runs casts of programs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, []
        (folder / "run").mkdir()

    def role(self, name: str, program: str) -> Role:
        program = f"{HEAD}os.chdir({str(self.folder)!r})\nopen('pid-{name}', 'w').write(str(os.getpid()))\n{program}"
        return Role(name, [sys.executable, "-c", program])

    def run(
        self, learner: str, buffer: str = WAITS, collector: str = WAITS, restarts: int = 0, again: str = ""
    ) -> Outcome:
        cast = Cast(
            self.role("buffer", buffer), [self.role("collector-0", collector)], self.role("learner", learner),
            lambda: self.role("learner", again),
        )  # fmt: skip
        starter = LocalStarter(self.folder / "run" / "logs")
        try:
            return Supervisor(cast, starter, restarts, 2, self.said.append).run(lambda: True)
        finally:
            starter.close()

    def log(self, name: str) -> str:
        return (self.folder / "run" / "logs" / f"{name}.log").read_text()

    def pid(self, name: str) -> int:
        return int((self.folder / f"pid-{name}").read_text())


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has buried yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_when_the_learner_is_done_the_others_are_asked_to_end(stage):
    outcome = stage.run("while not os.path.exists('pid-buffer'): time.sleep(0.01)\ntime.sleep(0.3)", collector="")
    assert outcome == Outcome(0)
    assert stage.log("buffer") == "asked to stop\n"
    assert gone(stage.pid("buffer"))


def test_collector_and_buffer_start_again_as_often_as_the_limit_allows(stage):
    dies = "if times('{0}') < 3: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)"
    until = "while not all(os.path.exists(n) and len(open(n).read()) == 3 for n in 'bc'): time.sleep(0.01)"
    outcome = stage.run(until, buffer=dies.format("b"), collector=dies.format("c"))
    assert outcome == Outcome(0)
    assert sorted(line.partition(" was")[0] for line in stage.said) == ["buffer"] * 2 + ["collector-0"] * 2


def test_one_restart_too_many_ends_the_run_with_the_last_lines(stage):
    outcome = stage.run(WAITS, collector="print('line', times('c'), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)")
    assert (outcome.code, outcome.cause.role.name, outcome.cause.code) == (1, "collector-0", -signal.SIGKILL)
    assert outcome.cause.lines == ("line 3",)
    assert all(gone(stage.pid(name)) for name in ("learner", "buffer"))


def test_bad_input_of_a_collector_ends_the_run_at_once(stage):
    outcome = stage.run(WAITS, collector="print('miles: the key is wrong')\nsys.exit(2)")
    assert (outcome.code, outcome.cause.said) == (2, "the key is wrong")
    assert stage.said == []


def test_the_learner_starts_again_and_so_does_a_collector_that_found_the_run_over(stage):
    first = "while not os.path.exists('c'): time.sleep(0.01)\ntime.sleep(0.2)\nos.kill(os.getpid(), signal.SIGKILL)"
    second = "while len(open('c').read()) < 2: time.sleep(0.01)"
    outcome = stage.run(first, collector="times('c')", restarts=1, again=second)
    assert outcome == Outcome(0)
    assert stage.said == [
        "learner was ended by SIGKILL (out of memory, or a kill): it is started again (1 of run.restarts = 1)"
    ]


def test_a_collector_that_ends_after_the_learner_has_started_again_starts_too(stage):
    first = "while not os.path.exists('c'): time.sleep(0.01)\nos.kill(os.getpid(), signal.SIGKILL)"
    second = "open('again', 'w')\nwhile len(open('c').read()) < 2: time.sleep(0.01)"
    slow = "times('c')\nwhile not os.path.exists('again'): time.sleep(0.01)\ntime.sleep(0.1)"
    assert stage.run(first, collector=slow, restarts=1, again=second) == Outcome(0)
    assert (stage.folder / "c").read_text() == "xx"


def test_a_signal_goes_to_learner_and_collectors_and_the_buffer_ends_last(stage):
    ready = "while not os.path.exists('pid-buffer'): time.sleep(0.01)\nopen('ready', 'w')\ntime.sleep(600)"

    def ask() -> None:
        while not (stage.folder / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=ask)
    thread.start()
    outcome = stage.run(
        ready, buffer="signal.signal(signal.SIGTERM, lambda *_: (times('b'), sys.exit(143)))\ntime.sleep(600)"
    )
    thread.join()
    assert outcome == Outcome(143)
    assert stage.log("collector-0") == "asked to stop\n"
    assert (stage.folder / "b").read_text() == "x"


def test_a_limit_forgets_what_was_long_ago():
    limit = Limit(2, seconds=60.0)
    assert [limit.allows(now) for now in (0.0, 1.0, 2.0, 61.5, 61.6, 120.0)] == [True, True, False, True, True, False]
