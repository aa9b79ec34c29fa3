"""The live view: what it says, in which width, and that nothing about its stream ends a run."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from miles.observe.live import LiveView
from miles.observe.plain import head_line, step_line
from miles.observe.progress import Progress, eval_text
from miles.observe.stream import SafeStream

FACTS = {"algorithm": "grpo", "model": "tiny", "run": "quickstart"}


class Closed(io.StringIO):
    """A stream whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def shown(view_width: int, rows: list[dict[str, Any]], total: int, mode: str = "off") -> str:
    stream = io.StringIO()
    view = LiveView(mode, stream, width=view_width)  # type: ignore[arg-type]
    view.start(FACTS, total)
    for row in rows:
        view.log(row)
    view.stop()
    return stream.getvalue()


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_plain_lines_are_aligned_and_one_a_step(synthetic: ModuleType) -> None:
    rows = synthetic.metrics_rows(synthetic.Shape(total=16, written=16))
    lines = shown(100, rows, 16).splitlines()
    head = next(line for line in lines if "reward" in line and "left" in line)
    steps = [line for line in lines if re.match(r" +\d+/16 ", line)]
    assert len(steps) == 16
    assert {len(line) for line in steps} == {len(head)} == {80}
    assert steps[0].split()[:2] == ["1/16", f"{rows[1]['reward/mean']:.3f}"]
    assert lines[:3] == ["algorithm  grpo", "model      tiny", "run        quickstart"]
    assert any(
        line.startswith("held-out at version 0: 0.0") and "sampled" in line and "160 samples" in line for line in lines
    )
    assert "\x1b" not in "".join(lines)


def test_a_warning_is_said_once_when_it_begins(synthetic: ModuleType) -> None:
    rows = synthetic.metrics_rows(synthetic.Shape(total=16, written=16))
    lines = shown(100, rows, 16).splitlines()
    assert sum("cut by the token limit" in line for line in lines) == 1
    assert sum(line.startswith("warning at step") for line in lines) == 3


def test_forty_columns_keep_the_columns_that_matter_most(synthetic: ModuleType) -> None:
    assert head_line(40).split() == ["step", "reward", "length", "entropy", "left"]
    progress = Progress(FACTS, 16)
    row = synthetic.metrics_rows(synthetic.Shape())[1]
    progress.steps.append(row)
    assert len(step_line(progress, row, 40)) == len(head_line(40)) <= 40


def test_what_was_not_measured_is_a_dash() -> None:
    progress = Progress({}, None, steps=[{"step": 3, "version": 3}])
    assert step_line(progress, progress.steps[0], 80).split() == ["3", *["-"] * 9]
    assert eval_text({"version": 0}) == "no score"


def test_the_time_left_is_steps_left_times_the_usual_step() -> None:
    steps: list[dict[str, Any]] = [{"step": i, "time": 100.0 * i, "time/step_s": 2.0} for i in range(1, 5)]
    steps.append({"step": 5, "time": 600.0, "time/step_s": 90.0})  # one step with a hiccup does not count
    progress = Progress({}, 10, steps=list(steps))
    assert progress.seconds_left == 10.0
    assert progress.elapsed == 600 - 100 + 2
    assert Progress({}, None, steps=list(steps)).seconds_left is None
    bare = Progress({}, 10, steps=[{"step": i, "time": 3.0 * i} for i in range(1, 4)])
    assert bare.seconds_left == 7 * 3.0
    assert Progress({}, 10).seconds_left is None
    assert Progress({}, 10).elapsed is None


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_the_panel_fits_its_width(synthetic: ModuleType, width: int) -> None:
    rows = synthetic.metrics_rows(synthetic.Shape(total=30, written=20))
    text = without_codes(shown(width, rows, 30, mode="on"))
    panel = [line for line in text.splitlines() if line[:1] in "│╭╰" and line]
    assert panel
    assert {len(line) for line in panel} == {width}


def test_the_panel_shows_curve_speed_time_left_sample_and_warnings(synthetic: ModuleType) -> None:
    stream = io.StringIO()
    view = LiveView("on", stream, width=100)
    rows = synthetic.metrics_rows(synthetic.Shape(total=30, written=29))
    view.start(FACTS, 30)
    view.preview(["<|im_start|>user\n2 + 3 =<|im_end|>\n"])
    view.catch_up(rows)
    view.sample("<|im_start|>user\n2 + 3 =<|im_end|>\n<|im_start|>assistant\n", "five \x1b[2J5", None)
    view.message("checkpoint written")
    view.stop()
    view.stop()
    text = without_codes(stream.getvalue())
    last = text[text.rindex("╭") :]
    assert "step 29/30" in last
    assert "left" in last
    assert "samples/s" in last
    assert "[unscored] five \\x1b[2J5" in last
    assert "│ 2 + 3 = " in last
    assert "! entropy is" in last
    assert "held-out at 0:" in last
    assert re.search("[\u2801-\u28ff]", last)
    assert "checkpoint written" in text
    assert "prompt 1 | 2 + 3 =<|im_end|>" in text
    assert "\x1b[2J" not in stream.getvalue()


def test_the_panel_says_how_long_a_step_already_takes() -> None:
    now = [0.0]
    stream = io.StringIO()
    view = LiveView("on", stream, clock=lambda: now[0], width=100)
    view.start(FACTS, 4)
    view.step({"step": 1, "version": 1, "reward/mean": 0.5, "time": 1.0, "time/step_s": 1.0})
    now[0] = 42.0
    view.sample("p", "c", 1.0)
    text = without_codes(stream.getvalue())
    view.stop()
    assert "42 s into step 2" in text


def test_a_resumed_run_shows_its_whole_curve(synthetic: ModuleType) -> None:
    rows = synthetic.metrics_rows(synthetic.Shape(total=16, written=10))
    stream = io.StringIO()
    view = LiveView("off", stream, width=100)
    view.start(FACTS, 16, started_version=10, history=rows)
    assert "continues from step 10" in stream.getvalue()
    assert len(view.progress.steps) == 10
    assert "1/16" not in stream.getvalue()


def test_plain_samples_are_few_and_escaped() -> None:
    stream = io.StringIO()
    with LiveView("off", stream, width=100) as view:
        view.start({}, 80)
        for step in range(1, 81):
            view.step({"step": step, "version": step})
            view.sample("2 + 3 =", f"answer\n\x1b]0;title\x07 {step}", 1.0)
    lines = [line for line in stream.getvalue().splitlines() if "sample:" in line]
    assert len(lines) == 8
    assert lines[0] == "  sample: 2 + 3 = → answer⏎\\x1b]0;title\\x07 1  reward 1"


@pytest.mark.parametrize("mode", ["on", "off"])
def test_a_closed_stream_does_not_stop_the_view(synthetic: ModuleType, mode: Any) -> None:
    view = LiveView(mode, Closed(), width=80)
    view.start(FACTS, 16)
    for row in synthetic.metrics_rows(synthetic.Shape()):
        view.log(row)
    view.message("still here")
    view.stop()
    assert len(view.progress.steps) == 16
    closed = io.StringIO()
    closed.close()
    LiveView("off", closed, width=80).message("nobody reads this")


PIPED = """
import sys
from miles.observe.live import LiveView
view = LiveView("MODE")
view.start({"run": "piped"}, 3000)
for step in range(1, 3001):
    view.step({"step": step, "version": step, "reward/mean": 0.5})
view.stop()
print("also after the view")
sys.stderr.write("trained to the end")
"""


@pytest.mark.parametrize("mode", ["off", "on"])
def test_a_reader_that_goes_away_does_not_end_the_run(mode: str) -> None:
    code = PIPED.replace("MODE", mode)
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None
    run.stdout.read(10)
    run.stdout.close()
    assert run.stderr is not None
    errors = run.stderr.read().decode()
    run.stderr.close()
    assert run.wait(timeout=60) == 0
    assert errors == "trained to the end"


def test_auto_draws_in_a_terminal_and_prints_lines_elsewhere() -> None:
    import pty

    assert not LiveView("auto", io.StringIO()).drawn
    ours, theirs = pty.openpty()
    try:
        with os.fdopen(theirs, "w", encoding="utf-8") as terminal:
            code = "from miles.observe.live import LiveView; import sys; sys.exit(int(LiveView('auto').drawn))"
            utf8 = {**os.environ, "PYTHONIOENCODING": "utf-8"}
            drawn = [
                subprocess.run([sys.executable, "-c", code], stdout=terminal, env={**utf8, "TERM": term}).returncode
                for term in ("xterm-256color", "dumb")
            ]
            ascii_only = {**utf8, "TERM": "xterm-256color", "PYTHONIOENCODING": "ascii"}
            drawn.append(subprocess.run([sys.executable, "-c", code], stdout=terminal, env=ascii_only).returncode)
    finally:
        os.close(ours)
    assert drawn == [1, 0, 0]


def test_a_stream_that_cannot_show_a_sign_gets_its_escape(tmp_path: Path) -> None:
    with (tmp_path / "log.txt").open("w", encoding="ascii") as file:
        stream = SafeStream(file)
        assert stream.write("2 → 3") == 5
        stream.flush()
        assert not stream.isatty()
        assert stream.encoding == "ascii"
        assert stream.fileno() == file.fileno()
    assert (tmp_path / "log.txt").read_text() == "2 \\u2192 3"


def test_fast_steps_share_a_redraw(synthetic: ModuleType) -> None:
    class Counting(io.StringIO):
        panels = 0

        def write(self, text: str) -> int:
            self.panels += text.count("╭")
            return super().write(text)

    stream = Counting()
    now = [0.0]
    view = LiveView("on", stream, clock=lambda: now[0], width=100)
    view.start(FACTS, 500)
    start = time.perf_counter()
    for row in synthetic.metrics_rows(synthetic.Shape(total=500, written=500)):
        now[0] += 0.01  # five seconds in all
        view.log({**row, "completion/truncated_fraction": 0.0, "entropy": 1.0, "groups/solved_all": 0})
    between = time.perf_counter() - start
    view.stop()
    assert 9 <= stream.panels <= 14 + between  # one each half second, the display's own, the first and the last
