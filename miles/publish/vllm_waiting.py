"""How vLLM's processes wait for each other on a CPU: asleep, because the cores that they would keep busy are the ones that compute.

vLLM's scheduler and workers look at shared memory again and again for one second after each message, each on a core of
its own. Measured on two cores with a 135M model: the learner's forward after a request took 0.9 s instead of 0.1 s.
"""

from __future__ import annotations

from typing import Any

BUSY_S = 0.001
"""Seconds of looking before a process sleeps until it is woken, which takes less than a step of any model."""


def install(condition_class: Any) -> None:
    """Give vLLM's `SpinCondition` this patience, from the first message on: the first is waited for as vLLM does."""
    recorded = condition_class.record_read
    if recorded.__module__ == __name__:
        return

    def record_read(condition: Any) -> None:
        recorded(condition)
        condition.busy_loop_s = min(condition.busy_loop_s, BUSY_S)

    condition_class.record_read = record_read
