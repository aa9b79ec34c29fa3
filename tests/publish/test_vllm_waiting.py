"""What our patience does to vLLM's condition variable: brief from the first message on, and installed once."""

from __future__ import annotations

from miles.publish import vllm_waiting


def condition_class() -> type:
    class Condition:
        busy_loop_s = 1.0
        reads = 0

        def record_read(self) -> None:
            self.reads += 1

    return Condition


def test_processes_look_for_a_second_until_the_first_message_and_then_sleep_soon() -> None:
    kind = condition_class()
    vllm_waiting.install(kind)
    condition = kind()
    assert condition.busy_loop_s == 1.0
    condition.record_read()
    assert condition.busy_loop_s == vllm_waiting.BUSY_S
    assert condition.reads == 1


def test_a_second_installation_changes_nothing() -> None:
    kind = condition_class()
    vllm_waiting.install(kind)
    once = kind.record_read
    vllm_waiting.install(kind)
    assert kind.record_read is once


def test_a_writer_that_never_looks_stays_so() -> None:
    kind = condition_class()
    vllm_waiting.install(kind)
    writer = kind()
    writer.busy_loop_s = 0.0
    writer.record_read()
    assert writer.busy_loop_s == 0.0
