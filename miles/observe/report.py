"""Writes RUN/report.html: one file that shows what a run did, without a network and safe against what the model wrote."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from miles.errors import MilesError
from miles.observe.charts import Chart, calmed, chart_html, sparkline_svg
from miles.observe.progress import Progress, first_and_last
from miles.observe.report_assets import SCRIPT, STYLE
from miles.observe.report_charts import (
    completion_charts,
    group_charts,
    held_out_charts,
    learning_charts,
    part_chart,
    resource_charts,
    reward_chart,
    time_chart,
)
from miles.observe.report_samples import samples_html
from miles.observe.report_timeline import timeline_html
from miles.observe.rows import Row, is_recorded, series, value_of
from miles.observe.rundir import FINAL_FOLDER, RunData, read_run
from miles.observe.text import duration, gibibytes, number, printable
from miles.observe.warnings import find_warnings

REPORT_FILE = "report.html"


def write_report(run_dir: Path) -> Path:
    """Write the report of a finished, running or dead run and return its path.

    An older report is replaced only once the new one is whole. Raises RunDirError where there is no run.
    """
    page = report_html(read_run(run_dir))
    path = run_dir / REPORT_FILE
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(page, encoding="utf-8", errors="backslashreplace")
        os.replace(part, path)
    except OSError as error:
        raise MilesError(
            f"cannot write {path}: {error.strerror or error}. Free space or mend the folder's rights"
        ) from error
    return path


def report_html(data: RunData) -> str:
    """The whole page. The same directory gives the same page."""
    sections = [
        ("reward", "Loss" if held_out_charts(data) else "Reward", _reward(data)),
        ("learning", "Learning", _grid(learning_charts(data.steps))),
        ("completions", "Completions", _grid(completion_charts(data.steps))),
        ("groups", "Groups", _grid(group_charts(data))),
        ("time", "Time and memory", _time(data)),
        ("timeline", "Who did what when", timeline_html(data.timeline)),
        ("samples", "Samples", samples_html(data.samples)),
        ("numbers", "All numbers", _numbers(data)),
        ("recipe", "Recipe", _recipe(data)),
    ]
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in sections)
    body = "".join(
        f'<section id="{name}"><h2>{escape(title)}</h2>{content}</section>' for name, title, content in sections
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(_title(data))} · Miles</title>\n<style>{STYLE}</style></head>\n<body>"
        f'<nav><div><b>Miles</b>{links}<button type="button">light / dark</button></div></nav>\n'
        f"<main>{_header(data)}{_tiles(data)}{_model(data)}{_notices(data)}{body}{_footer(data)}</main>\n"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _policy() -> str:
    """Only our own script runs, and nothing is fetched, whatever text the page holds."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _title(data: RunData) -> str:
    facts = data.facts
    what = " on ".join(facts[name] for name in ("algorithm", "data") if name in facts)
    return printable(what or facts["run"])


def _header(data: RunData) -> str:
    step, total = _progress(data).step, data.total_steps
    of = f" of {total}" if total is not None else ""
    if data.ended:
        status = f'<span class="status done">finished, {step}{of} steps</span>'
    elif data.steps:
        status = f'<span class="status">not finished: step {step}{of}</span>'
    else:
        status = '<span class="status">just started: no step yet</span>'
    size, groups = data.setting("rollout", "group_size"), data.setting("algorithm", "groups_per_step")
    known = [
        data.facts.get("model"),
        f"run {data.facts['run']}",
        _work(data, groups, size),
        _named(data, "learner", "learning_rate", "learning rate"),
        _named(data, "rollout", "max_new_tokens", "at most {} new tokens"),
        _named(data, "run", "seed", "seed"),
    ]
    lead = " · ".join(escape(printable(part)) for part in known if part)
    return f'<header>{status}<h1>{escape(_title(data))}</h1><p class="lead">{lead}</p></header>'


def _work(data: RunData, groups: object, size: object) -> str | None:
    if not groups or not size:
        return None
    if any(is_recorded(row) for row in data.steps):
        return f"{groups} rows a step"
    return f"{groups} prompts × {size} samples a step"


def _named(data: RunData, section: str, key: str, name: str) -> str | None:
    value = data.setting(section, key)
    if value is None:
        return None
    return name.format(value) if "{}" in name else f"{name} {value}"


def _tiles(data: RunData) -> str:
    progress = _progress(data)
    last_eval = data.evals[-1] if data.evals else {}
    error, samples = value_of(last_eval, "eval/standard_error"), value_of(last_eval, "eval/samples")
    notes = [f"± {error:.3f}" if error is not None else "", f"{number(samples)} samples" if samples is not None else ""]
    tiles = [
        _change(data, data.evals, "eval/reward/mean", "Held-out, sampled", ", ".join(filter(None, notes)), True),
        _change(data, data.evals, "eval/reward/greedy", "Held-out, greedy", "one answer a prompt", True),
        _change(data, data.steps, "reward/mean", "Training reward", "first to last step", False),
        _change(data, data.evals, "eval/pairs/accuracy", "Held-out pairs right", "one half is guessing", True),
        _change(data, data.evals, "eval/loss", "Held-out loss", "", True),
    ]
    if progress.elapsed is not None:
        each = f"{duration(progress.usual_step_s)} a step" if progress.usual_step_s is not None else ""
        tiles.append(_tile("Training time", escape(duration(progress.elapsed)), each))
    if (speed := _recent(data, "throughput/samples_per_s")) is not None:
        tokens = _recent(data, "throughput/tokens_per_s")
        note = f"{tokens:,.0f} tokens/s" if tokens is not None else ""
        tiles.append(_tile("Speed", f"{speed:.1f} <small>samples/s</small>", note))
    if memory := [value for _, value in series(data.steps, "memory/peak_bytes")]:
        tiles.append(_tile("Peak memory", escape(gibibytes(max(memory))), ""))
    return f'<div class="tiles">{"".join(tiles)}</div>' if any(tiles) else ""


def _change(data: RunData, rows: Sequence[Row], key: str, name: str, note: str, main: bool) -> str:
    ends = first_and_last(rows, key)
    if ends is None:
        return ""
    many = len(series(rows, key, "version")) > 1
    value = f"<small>{_score(ends[0])} →</small> {_score(ends[1])}" if many else _score(ends[0])
    return _tile(name, value, note if many else f"{note}; one measurement so far".lstrip("; "), main)


def _tile(name: str, value_html: str, note: str, main: bool = False) -> str:
    below = f'<div class="note">{escape(note)}</div>' if note else ""
    return (
        f'<div class="tile{" main" if main else ""}"><div class="name">{escape(name)}</div>'
        f'<div class="value">{value_html}</div>{below}</div>'
    )


def _score(value: float) -> str:
    return escape(f"{value:.2f}" if abs(value) < 100 else number(value))


def _recent(data: RunData, key: str) -> float | None:
    """The mean over the last ten steps."""
    values = [value for _, value in series(data.steps[-10:], key)]
    return sum(values) / len(values) if values else None


def _model(data: RunData) -> str:
    folder = escape(printable(str(data.run_dir / FINAL_FOLDER)))
    if data.final_time is None:
        said = f"No final model yet. It will stand in <code>{folder}</code>."
    else:
        said = f"The trained model: <code>{folder}</code>, a folder that transformers, peft and vLLM load as it is."
    return f'<p class="box">{said}</p>'


def _notices(data: RunData) -> str:
    unreadable = "".join(f'<div class="notice">{escape(printable(problem))}</div>' for problem in data.problems)
    findings = find_warnings(data.steps)
    if not findings and data.steps:
        return (
            unreadable
            + '<p class="box wide calm">No warning: entropy, length, gradient and drift stayed in bounds.</p>'
        )
    return unreadable + "".join(
        f'<div class="notice"><b>{escape(printable(finding.message))}</b><span class="where">{escape(finding.where)}</span>'
        f'<p class="hint">{escape(finding.advice)}</p></div>'
        for finding in findings
    )


def _reward(data: RunData) -> str:
    if held_out := held_out_charts(data):
        return _grid(held_out)
    drawn = chart_html(calmed(reward_chart(data)))
    if not drawn:
        return '<p class="empty">No step and no evaluation has been written yet.</p>'
    return f'<div class="wide">{drawn}</div>' + (_grid([part_chart(data)], empty=""))


def _time(data: RunData) -> str:
    return f'<div class="wide">{chart_html(time_chart(data))}</div>' + _grid(resource_charts(data.steps))


def _grid(charts: Sequence[Chart], empty: str = '<p class="empty">Nothing of this was measured yet.</p>') -> str:
    drawn = "".join(chart_html(calmed(chart)) for chart in charts)
    return f'<div class="grid">{drawn}</div>' if drawn else empty


def _numbers(data: RunData) -> str:
    """Every numeric key of the step rows, also those that no chart shows."""
    keys = dict.fromkeys(key for row in data.steps for key in row if key not in ("step", "version", "time"))
    rows = []
    for key in sorted(keys):
        points = series(data.steps, key)
        if points:
            values = [value for _, value in points]
            cells = "".join(
                f'<td class="n">{escape(number(value))}</td>'
                for value in (values[0], values[-1], min(values), max(values))
            )
            rows.append(f"<tr><td>{escape(printable(key))}</td><td>{sparkline_svg(points)}</td>{cells}</tr>")
    if not rows:
        return '<p class="empty">No step has been written yet.</p>'
    head = '<tr><th>metric</th><th></th><th class="n">first</th><th class="n">last</th><th class="n">lowest</th><th class="n">highest</th></tr>'
    return (
        f'<details class="more"><summary>{len(rows)} metrics over {len(data.steps)} steps</summary>'
        f'<div class="scroll"><table>{head}{"".join(rows)}</table></div></details>'
    )


def _recipe(data: RunData) -> str:
    if not data.recipe_text:
        return '<p class="empty">The run directory holds no config.toml.</p>'
    return (
        '<details class="more"><summary>config.toml, as resolved: feeding it back gives an equal run</summary>'
        f'<pre class="box">{escape(printable(data.recipe_text))}</pre></details>'
    )


def _footer(data: RunData) -> str:
    last = value_of(data.steps[-1], "time") if data.steps else None
    when = f", the last at {datetime.fromtimestamp(last, UTC):%Y-%m-%d %H:%M} UTC" if last is not None else ""
    return f"<footer>Made by Miles from {len(data.steps)} steps and {len(data.evals)} evaluations{when}.</footer>"


def _progress(data: RunData) -> Progress:
    return Progress(total_steps=data.total_steps, steps=list(data.steps), evals=list(data.evals))
