"""Checkpoints: complete or absent, verified on the way back, made of safetensors and JSON alone.

    checkpoints/step_000010/   model.safetensors ... index.json state.json rank-00000.json manifest.json
    checkpoints/LATEST         name of the newest one; a hint for people and scripts, nothing here depends on it

On several ranks each writes its own part of every tensor (`model-00001-of-00004.safetensors`); the index says which part
stands where, so that any number of ranks can go on. A folder gets its name only when all of its bytes are on the disk, and
an older one is deleted only after that.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from miles.errors import CheckpointError
from miles.learn import folders
from miles.learn.channel import Channel
from miles.learn.parts import FORMAT, INDEX, LATEST, OWN, STATE, snapshot, write
from miles.learn.shards import Stored, stored
from miles.learn.stepfolders import MANIFEST, STEP, candidates, is_complete, number

logger = logging.getLogger(__name__)


def save(
    root: Path, version: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any],
    own: Mapping[str, Any] | None = None, channel: Channel | None = None,
) -> Path:  # fmt: skip
    """Write `root/step_<version>` and return it; a complete one at the same version is replaced.

    With a `channel` all of its ranks call this together. `tensors` maps the name of a file (letters, digits, _) to its
    tensors, any dtype, shape and device; a tensor stands once, tied or not, and a DTensor's shards come from the ranks that
    hold them. `state` (rank 0's counts) and `own` (each rank's) are JSON: they come back equal, integers of any size and
    floats to the bit (NaN and infinities too); tuples come back as lists. Raises CheckpointError, on all ranks, when the
    disk is full or cannot be written; what stood in `root` before is untouched then.
    """
    channel = channel or Channel()
    return write(root, snapshot(version, tensors, state, own or {}, channel.rank), channel)


def load(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The tensors (whole, on the CPU) and the state of one checkpoint, after comparing every file with its hash.

    Raises CheckpointError that names the file that is missing or altered.
    """
    try:
        _verify(path)
    except folders.Damaged as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be used: {error}. Resume from an older one (delete or move this folder away), "
            "or restore it from a backup."
        ) from error
    tensors, state, _ = read(path)
    return {group: {name: tensor.full() for name, tensor in tensors[group].items()} for group in tensors}, state


def read(path: Path) -> tuple[dict[str, dict[str, Stored]], dict[str, Any], list[dict[str, Any]]]:
    """The tensors, none of them read yet, the state, and each rank's own of a checkpoint that `newest` has verified."""
    index = json.loads((path / INDEX).read_bytes())
    own = [json.loads((path / OWN.format(rank)).read_bytes()) for rank in range(index["ranks"])]
    return stored(index["tensors"], path), json.loads((path / STATE).read_bytes()), own


def newest(root: Path) -> Path | None:
    """The complete checkpoint with the highest number whose files all verify; None when there is no checkpoint.

    Folders without a manifest are no checkpoints and damaged ones are passed over, each with a warning. Raises
    CheckpointError when there are checkpoints and all of them are damaged: starting afresh must be the user's decision.
    """
    damaged: list[str] = []
    for path in candidates(root):
        if not (path / MANIFEST).is_file():
            logger.warning("%s has no %s, so it was never complete: ignored", path, MANIFEST)
            continue
        try:
            _verify(path)
        except folders.Damaged as error:
            damaged.append(str(error))
            logger.warning("checkpoint %s is passed over: %s", path, error)
            continue
        if damaged:
            logger.warning("falling back to the checkpoint %s", path)
        return path
    if damaged:
        raise CheckpointError(
            f"no checkpoint in {root} can be used: {'; '.join(damaged)}. Restore one from a backup, or move the folder "
            "away to start from the beginning."
        )
    return None


def prune(root: Path, keep: int, protect: Collection[int] = ()) -> list[int]:
    """Delete all but the `keep` newest complete checkpoints and return the versions deleted, oldest first.

    Versions in `protect`, and the one that LATEST names, stay whatever their number. Call it after `save` returned.
    Deletes only folders that hold nothing but what `save` wrote; others stay, with a warning.
    """
    if keep < 1:
        raise CheckpointError(f"keep must be >= 1, got {keep}: the newest checkpoint is never deleted")
    hint = root / LATEST
    latest = hint.read_text().strip() if hint.is_file() else None
    complete = [path for path in candidates(root) if is_complete(path)]
    versions = sorted({number(path) for path in complete}, reverse=True)
    kept = {*versions[:keep], *protect}
    deleted = set()
    for path in reversed(complete):
        if number(path) in kept or path.name == latest:
            continue
        if foreign := folders.strangers(path, MANIFEST):
            logger.warning("%s is kept: it holds %s, which is not part of the checkpoint", path, foreign[0])
            continue
        folders.discard(path)
        deleted.add(number(path))
    return sorted(deleted)


def oldest(root: Path) -> Path:
    """The checkpoint with the lowest number, damaged or not."""
    return [*candidates(root)][-1]


def version_of(path: Path) -> int:
    """The version that a checkpoint holds, from the name of its folder."""
    if not STEP.fullmatch(path.name):
        raise CheckpointError(f"{path} is not named like a checkpoint (step_000010)")
    return number(path)


def _verify(path: Path) -> dict[str, Any]:
    content = folders.verify(path, MANIFEST)
    if content["format"] != FORMAT:
        raise folders.Damaged(
            f"{path / MANIFEST} has format {content['format']}, this Miles reads {FORMAT}: use the Miles that wrote it"
        )
    if STEP.fullmatch(path.name) and content["version"] != number(path):
        raise folders.Damaged(f"{path / MANIFEST} is of version {content['version']}: the folder was renamed")
    if missing := [name for name in (STATE, INDEX) if name not in content["files"]]:
        raise folders.Damaged(f"{path / missing[0]} is missing")
    return content
