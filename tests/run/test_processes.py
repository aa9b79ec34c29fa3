"""The supervisor of ranks, with ranks that are small programs: one dies, all end, nobody is left, and it says why."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from miles.run.place import Machines
from miles.run.processes import Outcome, RankProcesses

HEAD = "import os, signal, subprocess, sys, time\nrank = int(os.environ['RANK'])\n"


def run(folder: Path, program: str, size: int = 2) -> Outcome:
    run_dir = folder / "run"
    run_dir.mkdir()
    return RankProcesses(size, Machines(1, 0, size), run_dir / "logs").run([sys.executable, "-c", HEAD + program])


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has buried yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_ranks_that_end_well_leave_their_lines_in_logs(tmp_path):
    program = "print(os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'], file=sys.stderr)"
    assert run(tmp_path, program) == Outcome(0, None)
    for rank in (0, 1):
        assert (tmp_path / "run" / "logs" / f"learner-{rank}.log").read_text() == f"2 {rank}\n"


def test_a_rank_that_is_killed_is_named_with_its_last_lines_and_the_others_end(tmp_path):
    program = """
print("line of", rank, file=sys.stderr, flush=True)
(open(f"pid-{rank}", "w")).write(str(os.getpid()))
while rank == 1 and not os.path.exists("pid-0"): time.sleep(0.01)
if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    began = time.monotonic()
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        outcome = run(tmp_path, program)
    finally:
        os.chdir(here)
    assert outcome.code == -signal.SIGKILL
    assert (outcome.cause.rank, outcome.cause.lines, outcome.cause.said) == (1, ("line of 1",), None)
    assert time.monotonic() - began < 30
    assert gone(int((tmp_path / "pid-0").read_text()))


def test_what_a_rank_says_in_the_end_is_the_message_and_what_others_say_of_its_death_is_not(tmp_path):
    program = """
if rank == 1:
    print("miles: 2 problems:\\n  - one\\n  - two", file=sys.stderr)
    sys.exit(2)
print("miles: RuntimeError: connection closed. This is a fault in Miles or in code that it called", file=sys.stderr)
sys.exit(1)
"""
    outcome = run(tmp_path, program)
    assert outcome.code == 2
    assert outcome.cause.said == "2 problems:\n  - one\n  - two"


def test_what_a_dead_rank_had_started_ends_too_although_it_holds_the_output_open(tmp_path):
    program = f"""
if rank == 1:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    assert run(tmp_path, program).cause.rank == 1
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_handed_on_and_the_ranks_end_as_they_like(signum, tmp_path):
    program = f"""
def stop(number, frame):
    print("saves", file=sys.stderr)
    sys.exit(128 + number)
signal.signal({int(signum)}, stop)
open({str(tmp_path)!r} + f"/ready-{{rank}}", "w").close()
time.sleep(600)
"""

    def ask() -> None:
        while not all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)):
            time.sleep(0.01)
        os.kill(os.getpid(), signum)

    asking = threading.Thread(target=ask)
    asking.start()
    assert run(tmp_path, program) == Outcome(128 + signum, None)
    asking.join()
    assert (tmp_path / "run" / "logs" / "learner-1.log").read_text() == "saves\n"


def test_lines_wait_for_the_run_directory_that_rank_0_makes(tmp_path):
    run_dir = tmp_path / "later"
    program = f"print('early', rank, file=sys.stderr, flush=True)\nif rank == 0: os.mkdir({str(run_dir)!r})\nelse: time.sleep(0.5)"
    ranks = RankProcesses(2, Machines(1, 0, 2), run_dir / "logs")
    assert ranks.run([sys.executable, "-c", HEAD + program]).code == 0
    assert (run_dir / "logs" / "learner-1.log").read_text() == "early 1\n"


def test_no_rank_outlives_the_process_that_started_it(tmp_path):
    """The ranks hold one end of a pipe; `miles.run.join` ends them when the other one closes."""
    program = f"open({str(tmp_path / 'held')!r} + str(rank), 'w').write(os.environ['MILES_LIFELINE'] + ' ' + os.readlink('/proc/self/fd/' + os.environ['MILES_LIFELINE']))"
    assert run(tmp_path, program).code == 0
    for rank in (0, 1):
        assert "pipe:" in (tmp_path / f"held{rank}").read_text()
