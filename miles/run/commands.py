"""One function for each command of `miles`; each imports its own body, so that a light command loads nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def train(recipes: Sequence[Path], overrides: Mapping[str, Any], run_dir: Path | None, resume: bool) -> int:
    from miles.run.train import train_command

    return train_command(recipes, overrides, run_dir, resume)


def learn(recipes: Sequence[Path], overrides: Mapping[str, Any], run_dir: Path | None, resume: bool) -> int:
    from miles.run.lifeline import hold_lifeline
    from miles.run.train import train_command

    hold_lifeline()
    return train_command(recipes, overrides, run_dir, resume, collects=False)


def collect(recipes: Sequence[Path], overrides: Mapping[str, Any], worker: str | None) -> int:
    from miles.run.collect import collect_command
    from miles.run.lifeline import hold_lifeline

    hold_lifeline()
    return collect_command(recipes, overrides, worker)


def check(recipes: Sequence[Path], overrides: Mapping[str, Any]) -> int:
    from miles.run.check import check_command

    return check_command(recipes, overrides)


def plan(
    recipes: Sequence[Path],
    overrides: Mapping[str, Any],
    gpus: int,
    gpu_memory: float,
    machine: Mapping[str, float],
    as_json: bool,
) -> int:
    from miles.plan.speed import Machine
    from miles.run.plan import plan_command

    return plan_command(recipes, overrides, gpus, gpu_memory, Machine(**machine), as_text=not as_json)


def buffer(options: dict[str, Any]) -> int:
    from miles.buffer.backend import Where
    from miles.buffer.serve import Options, serve
    from miles.run.lifeline import hold_lifeline

    hold_lifeline()
    where = Where(ledger=options.pop("ledger"), payloads=options.pop("payloads"))
    return serve(Options(where=where, **options))


def serve(recipes: Sequence[Path], overrides: Mapping[str, Any], options: dict[str, Any]) -> int:
    from miles.run.serve import Options, serve_command

    return serve_command(recipes, overrides, Options(**options))


def bench(recipes: Sequence[Path], overrides: Mapping[str, Any], options: dict[str, Any]) -> int:
    from miles.run.bench import Options, bench_command

    return bench_command(recipes, overrides, Options(**options))


def watch(run_dir: Path) -> int:
    from miles.observe.watch import watch as watch_run

    watch_run(run_dir)
    return 0


def report(run_dir: Path) -> int:
    from miles.observe.report import write_report

    print(write_report(run_dir))
    return 0


def export(run_dir: Path, to: Path, merge: bool) -> int:
    from miles.run.export import export_command

    return export_command(run_dir, to, merge)


def evaluate(recipes: Sequence[Path], overrides: Mapping[str, Any], model: str) -> int:
    from miles.run.eval import eval_command

    return eval_command(recipes, overrides, model)


def replay(run_dir: Path, to: Path | None) -> int:
    from miles.run.replay import replay_command

    return replay_command(run_dir, to)


def export_samples(run_dir: Path, kind: str, to: Path | None) -> int:
    from miles.run.samples import export_samples as write_samples

    return write_samples(run_dir, kind, to)


def doctor(recipes: Sequence[Path], overrides: Mapping[str, Any]) -> int:
    from miles.run.doctor import doctor_command

    return doctor_command(recipes, overrides)
