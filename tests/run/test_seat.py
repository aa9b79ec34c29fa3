"""A seat holds one process at a distance: its lines, its end, its signals, and that it does not outlive its holder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from miles.run.seat import Order, Seat


def order(program: str, shown: bool = False, **environ: str) -> Order:
    return Order(
        ["python of elsewhere", "-c", program, "the recipe"], environ, os.getcwd(), shown, "the recipe", "a = 1"
    )


def until_the_end(seat: Seat) -> tuple[list[tuple[bool, bytes]], int]:
    lines, code = [], None
    while code is None:
        found, code = seat.output()
        lines += found
    return lines, code


def test_lines_recipe_environment_and_exit_code() -> None:
    seat = Seat()
    seat.start(order("import sys, os; print(open(sys.argv[1]).read(), os.environ['X']); sys.exit(7)", X="y"))
    assert until_the_end(seat) == ([(False, b"a = 1 y\n")], 7)


def test_what_is_printed_is_for_the_terminal_where_it_is_shown() -> None:
    seat = Seat()
    seat.start(order("import sys; print('out'); print('err', file=sys.stderr)", shown=True))
    lines, code = until_the_end(seat)
    assert sorted(lines) == [(False, b"err\n"), (True, b"out\n")]
    assert code == 0


def test_a_signal_reaches_the_process_also_when_it_comes_first() -> None:
    seat = Seat()
    seat.signal(signal.SIGTERM)
    seat.start(order("import time; time.sleep(100)"))
    assert until_the_end(seat)[1] == -signal.SIGTERM


def test_tokens_of_the_cluster_stay_where_they_are(monkeypatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    seat = Seat()
    seat.start(order("import os; print('RAY_AUTH_TOKEN' in os.environ)"))
    assert until_the_end(seat)[0] == [(False, b"False\n")]


def test_folders_that_are_not_there(tmp_path) -> None:
    assert Seat().lacks([str(tmp_path), str(tmp_path / "no")]) == [str(tmp_path / "no")]


def test_the_process_ends_with_its_holder() -> None:
    role = (
        "from miles.run.lifeline import hold_lifeline; hold_lifeline(); "
        "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    )
    holder = (
        "import sys, os, time\nfrom miles.run.seat import Order, Seat\nseat = Seat()\n"
        f"seat.start(Order(['', '-c', {role!r}], {{}}, os.getcwd(), False, '', ''))\n"
        "print(seat.output()[0][0][1].decode(), flush=True)\ntime.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        process.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
