"""Numbers, durations and hostile text as a person sees them; curves as a terminal shows them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.observe.plot import curve, sparkline
from miles.observe.rows import eval_rows, parse_rows, series, step_rows, value_of, version_of
from miles.observe.text import duration, gibibytes, number, one_line, printable, question, tail


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1m 00s"),
        (3599.6, "1h 00m"),
        (93_600, "1d 02h"),
    ],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "0"), (1.0, "1"), (0.03125, "0.03125"), (12.3456, "12.35"), (1234.5, "1,234"), (-0.5, "-0.5"),
        (1.25e-5, "1.25e-05"), (3_100_000.0, "3.1M"), (2.5e9, "2.5G"), (7e12, "7T"), (1e20, "1e+20"),
    ],
)  # fmt: skip
def test_numbers(value: float, said: str) -> None:
    assert number(value) == said


def test_bytes() -> None:
    assert gibibytes(3 * 2**30) == "3.00 GiB"


@given(st.text())
def test_printable_text_can_steer_neither_a_terminal_nor_a_page(text: str) -> None:
    shown = printable(text)
    assert not any(ord(char) < 32 and char not in "\n\t" for char in shown)
    assert not any(char in "\x7f\x9b\u202e\u2066\u200f\u2028" for char in shown)
    shown.encode()
    assert printable(shown) == shown


def test_printable_text_keeps_what_is_harmless() -> None:
    assert printable("naïve 数字 👩‍🔬\n\tx") == "naïve 数字 👩‍🔬\n\tx"
    assert printable("\x1b[2J\u202e\ud800\U000e0001") == "\\x1b[2J\\u202e\\ud800\\U000e0001"


def test_one_line_and_tail_keep_their_width() -> None:
    assert one_line("a\nb", 10) == "a⏎b"
    assert one_line("abcdef", 4) == "abc…"
    assert tail("abcdef", 4) == "…def"
    assert tail("abc", 4) == "abc"


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 3 =<|im_end|>\n<|im_start|>assistant\n", "2 + 3 ="),
        ("<bos><start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n", "Why?"),
        ("<|start_header_id|>user<|end_header_id|>\n\nHow?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", "How?"),
        ("[INST] What? [/INST]", "What?"),
        ("3 =", "3 ="),
        ("user", "user"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_question_of_a_chat_prompt(prompt: str, asked: str) -> None:
    assert question(prompt) == asked


def test_a_curve_goes_from_corner_to_corner() -> None:
    lines = curve([(0, 0.0), (10, 1.0)], width=13, height=3, right=10)
    assert lines[0][-1] != "\u2800"
    assert lines[-1][3] != "\u2800"
    assert [line[:3] for line in lines] == ["1 ┤", "  │", "0 ┤"]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(-1e6, 1e6)), max_size=30),
    st.integers(1, 60),
    st.integers(3, 9),
    st.floats(0, 60),
)
def test_a_curve_keeps_its_size_for_any_points(
    points: list[tuple[float, float]], width: int, height: int, right: float
) -> None:
    lines = curve(points, width, height, right)
    assert len(lines) == height
    assert len({len(line) for line in lines}) == 1


def test_a_point_past_the_right_edge_moves_the_edge() -> None:
    assert curve([(0, 0.0), (1e300, 1.0)], 13, 3, right=1.0) == curve([(0, 0.0), (10, 1.0)], 13, 3, right=10)


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7], 2) == "▁█"
    assert sparkline([3.0, 3.0], 5) == "▄▄"
    assert sparkline([], 5) == sparkline([1.0], 0) == ""


def test_rows_are_told_apart_and_read_as_numbers_only() -> None:
    lines = parse_rows(
        b'{"step": 1, "version": 1, "x": 2}\n\n{"event": "eval", "version": 3, "x": NaN}\n[]\n{"event": "eval"}\n{"st'
    )
    assert lines.unreadable == [4, 6]
    assert [row["step"] for row in step_rows(lines.rows)] == [1]
    (evaluation,) = eval_rows(lines.rows)
    assert value_of(evaluation, "x") is None
    assert version_of(evaluation) == 3
    assert version_of({"step": 4}) == 4
    assert version_of({}) == 0
    assert series(lines.rows, "x") == [(1.0, 2.0)]
    assert value_of({"x": True}, "x") is value_of({"x": 10**400}, "x") is None


def test_a_line_that_is_nested_too_deeply_is_unreadable() -> None:
    assert parse_rows(b"[" * 100_000 + b"\n").unreadable == [1]
