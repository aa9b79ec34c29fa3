"""Trackers that metrics rows may also go to: TensorBoard, Weights & Biases and trackio, none of which needs an account.

Each library is imported only when its tracker is asked for; all of them come with the extra `trackers`.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from miles.config.schema import Log
from miles.errors import ConfigError
from miles.observe.rows import value_of, version_of
from miles.protocols import MetricsSink

WAY_OUT = "install the extra with `pip install 'miles-rl[trackers]'`, or turn the key off"


class TensorBoardSink:
    """Event files under `folder`, written by the tensorboard package. After a resume at `version` older events above it are hidden.

    `module` has EventFileWriter, Event, SessionLog and Summary; None: tensorboard's own.
    """

    def __init__(self, folder: Path, version: int = 0, module: Any = None) -> None:
        self._tensorboard = module or _load_tensorboard()
        self._writer = self._tensorboard.EventFileWriter(str(folder))
        if version:
            session = self._tensorboard.SessionLog
            self._add(version + 1, time.time(), session_log=session(status=session.START))

    def log(self, row: Mapping[str, Any]) -> None:
        summary = self._tensorboard.Summary
        values = [summary.Value(tag=key, simple_value=value) for key, value in measured(row).items()]
        self._add(version_of(row), value_of(row, "time") or time.time(), summary=summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, wall_time: float, **content: Any) -> None:
        self._writer.add_event(self._tensorboard.Event(step=step, wall_time=wall_time, **content))


class WandbSink:
    """Weights & Biases. `offline` writes into the run directory and contacts nobody; `online` needs an account.

    A resumed run is a new W&B run of the same group.
    """

    def __init__(
        self,
        run_dir: Path,
        project: str,
        mode: str = "offline",
        config: Mapping[str, Any] | None = None,
        module: Any = None,
    ) -> None:
        wandb = module or load_tracker("wandb", "log.wandb")
        self._run = wandb.init(
            project=project,
            name=run_dir.name,
            group=run_dir.name,
            mode=mode,
            dir=str(run_dir),
            config=dict(config or {}),
        )

    def log(self, row: Mapping[str, Any]) -> None:
        # An evaluation may share its step with the training row before it, so versions are a value and not W&B's step.
        self._run.log({**measured(row), "version": version_of(row)})

    def close(self) -> None:
        self._run.finish()


class TrackioSink:
    """trackio, on this machine: its database and its dashboard (`trackio show`) are local."""

    def __init__(
        self, run_dir: Path, project: str, config: Mapping[str, Any] | None = None, module: Any = None
    ) -> None:
        trackio = module or load_tracker("trackio", "log.trackio")
        self._run = trackio.init(
            project=project, name=run_dir.name, config=dict(config or {}), resume="allow", embed=False
        )

    def log(self, row: Mapping[str, Any]) -> None:
        self._run.log({**measured(row), "version": version_of(row)}, step=version_of(row))

    def close(self) -> None:
        self._run.finish()


def open_sinks(log: Log, run_dir: Path, version: int = 0, config: Mapping[str, Any] | None = None) -> list[MetricsSink]:
    """The trackers that the recipe's [log] section asks for. Raises ConfigError where a library is missing."""
    sinks: list[MetricsSink] = []
    if log.tensorboard:
        sinks.append(TensorBoardSink(run_dir / "tensorboard", version))
    if log.wandb != "off":
        sinks.append(WandbSink(run_dir, log.project, log.wandb, config))
    if log.trackio:
        sinks.append(TrackioSink(run_dir, log.project, config))
    return sinks


def missing_trackers(log: Log) -> Iterator[str]:
    """One sentence for each tracker of the [log] section whose library is not installed."""
    wanted = {"tensorboard": log.tensorboard, "wandb": log.wandb != "off", "trackio": log.trackio}
    for package, asked in wanted.items():
        if asked and importlib.util.find_spec(package) is None:
            yield f"log.{package} needs the package {package}, which is not installed: {WAY_OUT}."


def measured(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row, without the places `step`, `version` and `time`."""
    places = ("step", "version", "time")
    return {key: value for key in row if key not in places and (value := value_of(row, key)) is not None}


def _load_tensorboard() -> Any:
    """The four names that the sink uses; going through torch.utils.tensorboard would import torch for nothing else."""
    events = load_tracker("tensorboard.compat.proto.event_pb2", "log.tensorboard")
    return SimpleNamespace(
        EventFileWriter=load_tracker("tensorboard.summary.writer.event_file_writer", "log.tensorboard").EventFileWriter,
        Event=events.Event,
        SessionLog=events.SessionLog,
        Summary=load_tracker("tensorboard.compat.proto.summary_pb2", "log.tensorboard").Summary,
    )


def load_tracker(module: str, key: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{key} needs the package {module.partition('.')[0]}, which cannot be loaded ({error}): {WAY_OUT}"
        ) from error
