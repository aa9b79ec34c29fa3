"""Signals: at once outside of a whole, at its end inside."""

from __future__ import annotations

import os
import signal
import threading

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


def test_a_block_that_can_be_cancelled_is_ended_by_its_own_means():
    interrupts, done = Interrupts(), []

    def work() -> None:
        with interrupts.cancelling(lambda: done.append("asked")):
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("ended in order")

    with interrupts.active(), pytest.raises(Interrupted) as caught:
        work()
    assert done == ["asked", "ended in order"]
    assert caught.value.exit_code == 143


def test_what_a_cancelled_block_raises_gives_way_to_the_signal_and_nothing_stays_behind():
    interrupts = Interrupts()

    def work(asked: bool) -> None:
        with interrupts.cancelling(lambda: None):
            if asked:
                os.kill(os.getpid(), signal.SIGINT)
            raise ValueError("cancelled")

    with interrupts.active():
        with pytest.raises(Interrupted):
            work(True)
        with pytest.raises(ValueError, match="cancelled"):
            work(False)
        with interrupts.whole():
            pass


def test_inside_a_whole_nothing_is_cancelled():
    interrupts, done = Interrupts(), []

    def work() -> None:
        with interrupts.whole():
            with interrupts.cancelling(lambda: done.append("cancelled")):
                os.kill(os.getpid(), signal.SIGINT)
            done.append("whole")

    with interrupts.active(), pytest.raises(Interrupted):
        work()
    assert done == ["whole"]


def test_outside_of_the_main_thread_signals_are_left_alone():
    before, found = signal.getsignal(signal.SIGINT), []

    def run() -> None:
        with Interrupts().active():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before]


def test_held_signals_wait_for_a_check_and_still_end_what_can_be_cancelled():
    interrupts, done = Interrupts(held=True), []
    with interrupts.active():
        os.kill(os.getpid(), signal.SIGTERM)
        with interrupts.whole():
            done.append("whole")
        with pytest.raises(Interrupted):
            interrupts.check()
        interrupts.check()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted) as caught, interrupts.cancelling(lambda: done.append("cancelled")):
            done.append("begun")
    assert done == ["whole", "cancelled", "begun"]
    assert caught.value.exit_code == 130


def test_a_wish_for_a_checkpoint_is_taken_once_and_stops_nothing():
    interrupts = Interrupts()
    with interrupts.active():
        assert not interrupts.take_wish()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert interrupts.take_wish()
        assert not interrupts.take_wish()
