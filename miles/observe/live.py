"""What a person sees of a run while it trains: a redrawn panel in a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, TextIO, cast

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from miles.observe.plain import fact_lines, head_line, sample_line, step_line
from miles.observe.progress import RECENT_STEPS, Progress, ShownSample, eval_text
from miles.observe.rows import Row, is_eval, value_of
from miles.observe.screen import draw, prompt_lines
from miles.observe.stream import SafeStream
from miles.observe.text import printable
from miles.observe.warnings import warnings_at_end

HEAD_EVERY = 25
"""Plain lines after which the head is repeated."""
SAMPLES_IN_PLAIN = 8
"""Samples that plain lines show over the whole run, about."""
REDRAW_S = 0.5
"""Events closer together than this share a redraw, so that drawing (about 10 ms) costs fast steps nothing."""


class LiveView:
    """The view of one run. It is a MetricsSink too: `log` takes step and eval rows alike, `close` stops.

    `mode`: auto draws where the stream is a terminal that can redraw, on always draws, off prints lines. Nothing that
    happens to the stream ends the run.
    """

    def __init__(
        self,
        mode: Literal["auto", "on", "off"] = "auto",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        width: int | None = None,
    ) -> None:
        self._stream = SafeStream(stream or sys.stdout)
        self._console = Console(
            file=cast(TextIO, self._stream), width=width, force_terminal=True if mode == "on" else None, highlight=False
        )
        self.drawn = mode == "on" or (mode == "auto" and self._can_redraw())
        self.progress = Progress()
        self._clock = clock
        self._last_event = clock()
        self._last_draw = float("-inf")
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._warned: set[str] = set()
        self._lines = 0
        self._sample_step: int | None = None

    def start(
        self, facts: Mapping[str, Any], total_steps: int | None, started_version: int = 0, history: Sequence[Row] = ()
    ) -> None:
        """Begin. `facts` are shown in order; `history` are the rows before `started_version`, so a resumed curve is whole."""
        self.stop()
        self.progress = Progress(dict(facts), total_steps, started_version)
        for row in history:
            self._remember(row)
        self._last_event = self._clock()
        for line in fact_lines(self.progress):
            self._print(line)
        if started_version:
            self._print(f"continues from step {started_version}")
        if self.drawn:
            self._live = Live(
                console=self._console, get_renderable=self._render, refresh_per_second=1, vertical_overflow="crop"
            )
            self._live.start(refresh=True)

    def preview(self, prompts: Sequence[str]) -> None:
        """Show rendered prompts as the model will see them."""
        for line in prompt_lines(prompts):
            self._print(line, style="dim")

    def step(self, row: Row) -> None:
        self._remember(row)
        self._announce_warnings()
        if self.drawn:
            return self._refresh()
        if self._lines % HEAD_EVERY == 0:
            self._print(head_line(self._console.width, row))
        self._lines += 1
        self._print(step_line(self.progress, row, self._console.width))

    def eval(self, row: Row) -> None:
        self._remember(row)
        if self.drawn:
            return self._refresh()
        self._print(f"held-out at version {value_of(row, 'version') or 0:.0f}: {eval_text(row)}")

    def catch_up(self, rows: Sequence[Row]) -> None:
        """Rows that were written before anyone looked: one redraw for all of them, or a line each."""
        if not self.drawn:
            for row in rows:
                self.log(row)
            return
        for row in rows:
            self._remember(row)
        self._refresh()

    def sample(self, prompt: str, completion: str, reward: float | None) -> None:
        """One completion of the newest step. Plain lines show only some of them."""
        with self._lock:
            self.progress.sample = ShownSample(prompt, completion, reward)
        if self.drawn:
            return self._refresh()
        step = self.progress.step
        apart = max((self.progress.total_steps or 200) // SAMPLES_IN_PLAIN, 1)
        if self._sample_step is None or step - self._sample_step >= apart:
            self._sample_step = step
            self._print(sample_line(prompt, completion, reward, self._console.width))

    def timeline(self, row: Row) -> None:
        """Who did what when in the newest step; shown with the next redraw."""
        with self._lock:
            self.progress.timeline = [*self.progress.timeline[1 - RECENT_STEPS :], row]

    def message(self, text: str) -> None:
        """A line that stays: in a terminal it is printed above the panel."""
        self._print(text)

    def log(self, row: Mapping[str, Any]) -> None:
        if is_eval(row):
            self.eval(row)
        else:
            self.step(row)

    def close(self) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the last picture on the screen and give the cursor back. May be called twice."""
        live, self._live = self._live, None
        if live is not None:
            self._last_event = float("inf")
            live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _can_redraw(self) -> bool:
        console = self._console
        return console.is_terminal and not console.is_dumb_terminal and "utf" in self._stream.encoding.lower()

    def _remember(self, row: Row) -> None:
        with self._lock:
            (self.progress.evals if is_eval(row) else self.progress.steps).append(row)
            self._last_event = self._clock()

    def _announce_warnings(self) -> None:
        for finding in warnings_at_end(self.progress.steps):
            if finding.rule not in self._warned:
                self._warned.add(finding.rule)
                self._print(f"warning at {finding.where}: {finding.message}. {finding.advice}", style="yellow")

    def _render(self) -> RenderableType:
        with self._lock:
            waiting = self._clock() - self._last_event
            size = self._console.size
            return draw(self.progress, size.width, size.height - 1, waiting if waiting >= 1 else None)

    def _refresh(self) -> None:
        """Redraw now, or leave it to the display's own redraw each second where the last one has just been."""
        now = self._clock()
        if self._live is not None and now - self._last_draw >= REDRAW_S:
            self._last_draw = now
            self._live.refresh()

    def _print(self, line: str, style: str = "") -> None:
        """Lines are cut by the terminal and never wrapped by us in plain mode: one line stays one line in a log."""
        text = Text(printable(line), style=style)
        if self.drawn:
            self._console.print(text)
        else:
            self._console.print(text, soft_wrap=True)
