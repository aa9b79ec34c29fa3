"""Checkpoints: complete or absent, verified on the way back, made of safetensors and JSON alone.

    checkpoints/step_000010/   model.safetensors ... state.json manifest.json
    checkpoints/LATEST         name of the newest one; a hint for people and scripts, nothing here depends on it

A folder gets its name only when all of its bytes are on the disk, and an older one is deleted only after that.
"""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from miles.errors import CheckpointError
from miles.learn import folders

logger = logging.getLogger(__name__)

FORMAT = 1
LATEST = "LATEST"
MANIFEST = "manifest.json"
STATE = "state.json"

_STEP = re.compile(r"step_(\d+)(\.old)?")
_PART = re.compile(r"[a-z][a-z0-9_]*")


def save(root: Path, version: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> Path:
    """Write `root/step_<version>` and return it; a complete one at the same version is replaced.

    `tensors` maps the name of a file (letters, digits, _) to its tensors, any dtype, shape and device; a tensor stands
    once, tied or not. `state` is JSON: it comes back equal, integers of any size and floats to the bit (NaN and
    infinities too); tuples come back as lists. Raises CheckpointError when the disk is full or cannot be written; what
    stood in `root` before is untouched then.
    """
    plain = _plain(state, "state")
    if bad := [name for name in tensors if not _PART.fullmatch(name)]:
        raise CheckpointError(f"checkpoint file name {bad[0]!r}: use lower-case letters, digits and _ only")
    target = root / f"step_{version:06d}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        folders.sync(root.parent)
        for leftover in folders.leftovers(root, _STEP.pattern):
            shutil.rmtree(leftover)
        with folders.staged(target) as partial:
            _write(partial, version, tensors, plain)
            _replace(partial, target)
        folders.write_text(root / LATEST, target.name + "\n")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(_failure(root, version, tensors, error)) from error
    return target


def load(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The tensors (on the CPU) and the state of one checkpoint, after comparing every file with its hash.

    Raises CheckpointError that names the file that is missing or altered.
    """
    try:
        content = _verify(path)
    except folders.Damaged as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be used: {error}. Resume from an older one (delete or move this folder away), "
            "or restore it from a backup."
        ) from error
    names = [name for name in content["files"] if name.endswith(".safetensors")]
    tensors = {name.removesuffix(".safetensors"): load_file(path / name) for name in names}
    return tensors, json.loads((path / STATE).read_bytes())


def newest(root: Path) -> Path | None:
    """The complete checkpoint with the highest number whose files all verify; None when there is no checkpoint.

    Folders without a manifest are no checkpoints and damaged ones are passed over, each with a warning. Raises
    CheckpointError when there are checkpoints and all of them are damaged: starting afresh must be the user's decision.
    """
    damaged: list[str] = []
    for path in _candidates(root):
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
    complete = [path for path in _candidates(root) if _is_complete(path)]
    versions = sorted({_number(path) for path in complete}, reverse=True)
    kept = {*versions[:keep], *protect}
    deleted = set()
    for path in reversed(complete):
        if _number(path) in kept or path.name == latest:
            continue
        if foreign := folders.strangers(path, MANIFEST):
            logger.warning("%s is kept: it holds %s, which is not part of the checkpoint", path, foreign[0])
            continue
        folders.discard(path)
        deleted.add(_number(path))
    return sorted(deleted)


def version_of(path: Path) -> int:
    """The version that a checkpoint holds, from the name of its folder."""
    if not _STEP.fullmatch(path.name):
        raise CheckpointError(f"{path} is not named like a checkpoint (step_000010)")
    return _number(path)


def random_state() -> dict[str, Any]:
    """The state of the global generators of python, numpy and torch (CPU), as JSON."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put the generators back to what `random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))


def _write(partial: Path, version: int, tensors: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]) -> None:
    for name, group in tensors.items():
        named = {key: tensor.detach().contiguous() for key, tensor in group.items()}
        save_file(named, partial / f"{name}.safetensors", metadata={"format": "pt"})
    (partial / STATE).write_text(json.dumps(state) + "\n", encoding="utf-8")
    folders.seal(partial, MANIFEST, format=FORMAT, version=version)


def _replace(partial: Path, target: Path) -> None:
    """Give `partial` its name, with a complete checkpoint under some name of this version at every moment."""
    folders.settle(partial)
    old = target.with_name(target.name + ".old")
    if target.exists() and _is_complete(target) and not folders.strangers(target, MANIFEST):
        if old.exists():
            _remove(old)
        target.rename(old)
    elif target.exists():
        _set_aside(target)
    partial.rename(target)
    folders.sync(target.parent)
    if old.exists():
        _remove(old)


def _remove(path: Path) -> None:
    if _is_complete(path) and not folders.strangers(path, MANIFEST):
        folders.discard(path)
    else:
        _set_aside(path)


def _set_aside(path: Path) -> None:
    """Move away what stands where a checkpoint belongs but is not wholly one of ours: it may be all that someone has."""
    number = 1
    while (aside := path.with_name(f"aside-{path.name}-{number}")).exists():
        number += 1
    path.rename(aside)
    logger.warning("%s was damaged or held other files: moved to %s", path, aside)


def _candidates(root: Path) -> Iterator[Path]:
    """Folders named like checkpoints, highest number first; of one number, the one being replaced last."""
    found = [path for path in root.iterdir() if _STEP.fullmatch(path.name) and path.is_dir()] if root.is_dir() else []
    yield from sorted(found, key=lambda path: (_number(path), not path.name.endswith(".old")), reverse=True)


def _number(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _is_complete(path: Path) -> bool:
    """Whether all files are there in their sizes: what can be known without reading them."""
    try:
        folders.verify(path, MANIFEST, hashes=lambda name: False)
    except folders.Damaged:
        return False
    return True


def _verify(path: Path) -> dict[str, Any]:
    content = folders.verify(path, MANIFEST)
    if content["format"] != FORMAT:
        raise folders.Damaged(
            f"{path / MANIFEST} has format {content['format']}, this Miles reads {FORMAT}: use the Miles that wrote it"
        )
    if _STEP.fullmatch(path.name) and content["version"] != _number(path):
        raise folders.Damaged(f"{path / MANIFEST} is of version {content['version']}: the folder was renamed")
    if STATE not in content["files"]:
        raise folders.Damaged(f"{path / STATE} is missing")
    return content


def _plain(value: Any, where: str) -> Any:
    """A copy made of dicts and lists; refuses what JSON would give back as something else."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        if bad := [key for key in value if type(key) is not str]:
            raise CheckpointError(f"{where} has the key {bad[0]!r}: keys of a checkpoint's state are strings")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise CheckpointError(
        f"{where} is a {type(value).__name__}: a checkpoint's state holds numbers, text, lists and mappings of Python; "
        "put tensors among the tensors"
    )


def _failure(root: Path, version: int, tensors: Mapping[str, Mapping[str, Tensor]], error: Exception) -> str:
    untouched = "Checkpoints that were there before are untouched."
    if not folders.is_disk_full(error):
        return f"checkpoint {version} could not be written to {root}: {error}. {untouched} Make the folder writable, then continue with --resume."
    needed = sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
    free = shutil.disk_usage(root).free if root.exists() else 0
    return (
        f"disk full while writing checkpoint {version} to {root}: it takes {needed / 2**20:,.0f} MiB and "
        f"{free / 2**20:,.0f} MiB are free. {untouched} Free some space, lower run.keep_checkpoints (one more than that "
        "exists while saving), or choose another --run folder, then start again with --resume."
    )
