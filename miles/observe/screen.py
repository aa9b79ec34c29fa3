"""The live view's picture of a run: a pure function from progress and terminal size to something rich can draw."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from miles.observe.plot import curve, sparkline
from miles.observe.progress import RECENT_STEPS, Progress, eval_text
from miles.observe.rows import Row, is_recorded, series, value_of
from miles.observe.text import duration, gibibytes, number, one_line, question, tail
from miles.observe.timeline import timeline_of
from miles.observe.warnings import Finding, warnings_at_end

METERS = (
    ("reward", "reward/mean", number),
    ("loss", "loss/total", number),
    ("pairs right", "pairs/accuracy", "{:.0%}".format),
    ("length", "completion/length_mean", number),
    ("entropy", "entropy", number),
    ("cut by limit", "completion/truncated_fraction", "{:.0%}".format),
    ("kl/ref", "kl/ref", number),
    ("grad norm", "grad_norm", number),
    ("clipped", "ratio/clip_fraction", "{:.1%}".format),
    ("samples/s", "throughput/samples_per_s", number),
    ("step time", "time/step_s", duration),
    ("ready", "time/ready_fraction", "{:.0%}".format),
    ("memory", "memory/peak_bytes", gibibytes),
)
SPARK_COLUMNS = 10


def draw(progress: Progress, width: int, height: int, waiting_s: float | None = None) -> RenderableType:
    """The whole panel, `height` lines at most. `waiting_s`: seconds since the last row; None: nothing is awaited."""
    inner = max(width - 4, 10)
    warnings = [_warning(finding, inner) for finding in warnings_at_end(progress.steps)]
    evals = _evals(progress, inner)
    sample = _sample(progress, inner, tall=height >= 22)
    meters = _meters(progress, inner, rows=3 if height < 22 else 5)
    buffer = _buffer(progress, inner) if height >= 22 else []
    used = 2 + 1 + len(evals) + len(sample) + len(warnings) + meters.row_count + len(buffer) + 1
    plot = _plot(progress, inner, min(max(height - used - 1, 3), 12))
    return Panel(
        Group(_bar(progress, inner, waiting_s), *plot, meters, *buffer, *evals, *sample, *warnings),
        title=Text(one_line(_title(progress), max(inner - 4, 4)), style="bold"),
        title_align="left",
        border_style="cyan",
        width=width,
    )


def _title(progress: Progress) -> str:
    """The facts without their details, which stand above the panel."""
    return " · ".join(["miles", *(re.split("[,;]", str(value))[0] for value in progress.facts.values())])


def _bar(progress: Progress, width: int, waiting_s: float | None) -> Table:
    total, step = progress.total_steps, progress.step
    place = Text(f"step {step}/{total}" if total is not None else f"step {step}", style="bold")
    times = [duration(progress.elapsed)] if progress.elapsed is not None else []
    if total is not None and step >= total:
        times.append("done")
    elif progress.seconds_left is not None:
        times.append(f"{duration(progress.seconds_left)} left")
    if waiting_s is not None and width >= 60:
        times.append(f"{duration(waiting_s)} into step {step + 1}")
    line = Table.grid(expand=False, padding=(0, 1))
    cells: list[RenderableType] = [place]
    room = width - len(place) - len(", ".join(times)) - 3
    if total and room >= 8:
        cells.append(ProgressBar(total=total, completed=min(step, total), width=min(room, 60)))
    cells.append(Text(", ".join(times), style="dim", no_wrap=True, overflow="ellipsis"))
    line.add_row(*cells)
    return line


def _plot(progress: Progress, width: int, height: int) -> list[Text]:
    recorded = bool(progress.steps) and is_recorded(progress.steps[-1])
    name, key = ("loss", "loss/total") if recorded else ("reward", "reward/mean")
    points = series(progress.steps, key)
    if len(points) < 2:
        text = f"waiting for the second step to draw the {name} curve"
        return [Text(text, style="dim", no_wrap=True, overflow="ellipsis")]
    right = max(float(progress.total_steps or 0), points[-1][0])
    values = [value for _, value in points]
    low, high = (0.0, 1.0) if min(values) >= 0 and max(values) <= 1 else (min(values), max(values))
    return [Text(line, style="green", no_wrap=True) for line in curve(points, width, height, right, low, high)]


def _meters(progress: Progress, width: int, rows: int) -> Table:
    shown = [
        (name, form(points[-1][1]), sparkline([value for _, value in points], SPARK_COLUMNS))
        for name, key, form in METERS
        if (points := series(progress.steps[-SPARK_COLUMNS:], key))
    ]
    across = max(min(width // 36, 3), 1)
    table = Table.grid(padding=(0, 1))
    shown = shown[: rows * across]
    for start in range(0, len(shown), across):
        cells: list[Text] = []
        for name, value, spark in shown[start : start + across]:
            cells += [
                Text(name, style="dim"),
                Text(value, style="bold"),
                Text(f"{spark:<{SPARK_COLUMNS}}", style="cyan"),
            ]
        table.add_row(*cells)
    return table


def _buffer(progress: Progress, width: int) -> list[Text]:
    """Over the last steps: how old the trained groups were, what was dropped and why, and who waited how long."""
    recent = progress.steps[-RECENT_STEPS:]
    lines = []
    if any((value_of(row, "staleness/max") or 0) > 0 for row in recent):
        lines.append(("staleness", _counts(recent, "staleness/groups/")))
    lines.append(("dropped", _counts(recent, "groups/dropped/")))
    timeline = timeline_of(progress.timeline, RECENT_STEPS)
    waits = [] if timeline is None else timeline.waits()
    if len(waits) > 2 or any(wait.share > 0.01 for wait in waits[1:]):
        lines.append(("waited", ", ".join(f"{wait.role} {wait.share:.0%}" for wait in waits)))
    return [Text(one_line(f"{name}: {said}", width), style="dim") for name, said in lines if said]


def _counts(rows: Sequence[Row], prefix: str) -> str:
    keys = sorted({key for row in rows for key in row if key.startswith(prefix)})
    counts = {key.removeprefix(prefix): sum(value for _, value in series(rows, key)) for key in keys}
    return ", ".join(f"{name} {count:.0f}" for name, count in counts.items())


def _evals(progress: Progress, width: int) -> list[Text]:
    shown = progress.evals[:1] + progress.evals[1:][-1:]
    lines = [f"held-out at {value_of(row, 'version') or 0:.0f}: {eval_text(row)}" for row in shown]
    return [Text(one_line(line, width), style="magenta") for line in lines]


def _sample(progress: Progress, width: int, tall: bool) -> list[Text]:
    if progress.sample is None:
        return []
    shown = progress.sample
    score = "unscored" if shown.reward is None else number(shown.reward)
    prompt = tail(question(shown.prompt), width)
    answer = Text(f"[{score}] ", style="bold")
    answer.append(one_line(shown.completion, max(width - len(answer), 4)), style="default")
    return [Text(prompt, style="dim"), answer] if tall else [answer]


def _warning(finding: Finding, width: int) -> Text:
    return Text(one_line(f"! {finding.message}", width), style="yellow")


def prompt_lines(prompts: Sequence[str]) -> list[str]:
    """The rendered prompts with their line breaks, each under a number."""
    return [f"prompt {i} | {line}" for i, prompt in enumerate(prompts, start=1) for line in prompt.split("\n")]
