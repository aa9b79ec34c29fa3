"""What `miles bench engine` measured on this machine, and from how many tokens a step on vLLM is faster by it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from miles.config.schema import Recipe
from miles.errors import BadInput

ON_A_GPU = 32768
"""Tokens of a step from which `auto` hands over on a GPU where nothing was measured: a guess, no measurement."""


@dataclass(frozen=True)
class Point:
    """One measurement: `samples` at the same time, `tokens` each; seconds of the fastest round on each side.

    The time of vLLM holds one publish, which the engine in process does not need.
    """

    samples: int
    tokens: int
    inprocess_s: float
    vllm_s: float

    @property
    def work(self) -> int:
        return self.samples * self.tokens


def crossover(points: Sequence[Point]) -> int | None:
    """The least work from which on vLLM is at least as fast at every point that was measured; None: never."""
    found = None
    for point in sorted(points, key=lambda point: (-point.work, -point.vllm_s / point.inprocess_s)):
        if point.vllm_s > point.inprocess_s:
            break
        found = point.work
    return found


def cache_file(environ: Mapping[str, str] = os.environ) -> Path:
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "miles" / "engine.json"


def kind_of(recipe: Recipe, device: str) -> str:
    """What a measurement is valid for."""
    way = "adapters" if recipe.lora.rank else "full weights"
    return f"{recipe.model.name}, {recipe.learner.param_dtype}, {way}, {device}, {recipe.run.threads or 1} threads"


def write(file: Path, kind: str, points: Sequence[Point]) -> None:
    """Keep the measurement beside those of other kinds. Raises BadInput where the file cannot be written."""
    kept = _read(file)
    kept[kind] = {"crossover": crossover(points), "points": [asdict(point) for point in points]}
    part = file.with_name(f".{file.name}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        part.replace(file)
    except OSError as error:
        raise BadInput(f"{file} cannot be written ({error}): name another file with --to") from error


def measured(file: Path, kind: str, device: str) -> tuple[int | None, str]:
    """(tokens of a step from which vLLM is faster, or None for never; where that number comes from)."""
    entry = _read(file).get(kind)
    if entry is not None:
        return crossover([Point(**point) for point in entry["points"]]), f"`miles bench engine` measured it ({file})"
    if device == "cpu":
        return None, "nothing was measured for this model on this machine: run `miles bench engine RECIPE`"
    return ON_A_GPU, "nothing was measured for this model on this machine (`miles bench engine RECIPE` does)"


def _read(file: Path) -> dict[str, dict]:
    if not file.exists():
        return {}
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        for entry in kept.values():
            [Point(**point) for point in entry["points"]]
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise BadInput(f"{file} is not what `miles bench engine` writes ({error}): delete it") from error
    return kept
