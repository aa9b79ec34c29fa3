"""Signals: at once outside of a whole, at its end inside."""

from __future__ import annotations

import os
import signal

import pytest

from miles.run.interrupts import Interrupted, Interrupts


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_at_once_with_the_shells_exit_code(signum, code):
    with Interrupts().active(), pytest.raises(Interrupted) as caught:
        os.kill(os.getpid(), signum)
    assert caught.value.exit_code == code


def test_inside_a_whole_the_signal_waits_until_the_outermost_end():
    interrupts, done = Interrupts(), []

    def work() -> None:
        with interrupts.whole():
            with interrupts.whole():
                os.kill(os.getpid(), signal.SIGTERM)
                done.append("inner")
            done.append("outer")

    with interrupts.active(), pytest.raises(Interrupted):
        work()
    assert done == ["inner", "outer"]


def test_an_error_inside_a_whole_is_not_replaced_by_the_signal():
    interrupts = Interrupts()

    def fail() -> None:
        with interrupts.whole():
            os.kill(os.getpid(), signal.SIGTERM)
            raise ValueError("broken")

    with interrupts.active(), pytest.raises(ValueError, match="broken"):
        fail()


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts().active():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
