"""What each rank writes of a checkpoint, and how rank 0 makes one folder of all parts: whole, or not at all."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from miles.errors import CheckpointError
from miles.learn import folders
from miles.learn.channel import Channel
from miles.learn.shards import Part, index_of, part_of
from miles.learn.stepfolders import MANIFEST, STEP, replace

FORMAT = 2
LATEST = "LATEST"
STATE = "state.json"
INDEX = "index.json"
OWN = "rank-{:05d}.json"

_GROUP = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a checkpoint: tensors by group and name, what is equal on all ranks, and what is this rank's own."""

    version: int
    tensors: Mapping[str, Mapping[str, Part]]
    state: Mapping[str, Any]
    own: Mapping[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)  # further files of rank 0

    @property
    def bytes(self) -> int:
        parts = [part.tensor for group in self.tensors.values() for part in group.values()]
        return sum(tensor.nbytes for tensor in parts if tensor is not None)


def snapshot(
    version: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], own: Mapping[str, Any],
    rank: int, *, copy: bool = False, files: Mapping[str, bytes] | None = None,
) -> Snapshot:  # fmt: skip
    """What rank `rank` is to write; with `copy` from host memory of its own, so that training may go on meanwhile.

    Raises CheckpointError for names and values that would not come back as they are.
    """
    if bad := [name for name in tensors if not _GROUP.fullmatch(name)]:
        raise CheckpointError(f"checkpoint file name {bad[0]!r}: use lower-case letters, digits and _ only")
    state, own = plain(state, "state"), plain(own, "own")
    parts = {
        group: {name: part_of(tensor, rank, copy=copy) for name, tensor in named.items()}
        for group, named in tensors.items()
    }
    return Snapshot(version, parts, state, own, files or {})


def write(root: Path, part: Snapshot, channel: Channel) -> Path:
    """Write `root/step_<version>` with all ranks of the channel and return it. Raises CheckpointError on all of them."""
    target = root / f"step_{part.version:06d}"
    partial, failure = None, ""
    try:
        if channel.rank == 0:
            partial, failure = _begin(target, part)
        begun = channel.broadcast(b"" if partial is None else partial.name.encode()).decode()
        if begun:
            reports = channel.gather(json.dumps(_write_part(root / begun, part, channel)).encode())
            if partial is not None:
                failure = _complete(partial, target, part, [json.loads(report) for report in reports])
        failure = channel.broadcast(failure.encode()).decode()
    finally:
        if partial is not None and partial.exists():
            shutil.rmtree(partial)
    if failure:
        raise CheckpointError(failure)
    return target


def _begin(target: Path, part: Snapshot) -> tuple[Path | None, str]:
    """The folder to write into, or why there is none."""
    root = target.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        folders.sync(root.parent)
        for leftover in folders.leftovers(root, STEP.pattern):
            shutil.rmtree(leftover)
        return folders.fresh(target), ""
    except OSError as error:
        return None, _failure(root, part, error)


def _write_part(partial: Path, part: Snapshot, channel: Channel) -> dict[str, Any]:
    """Write what this rank holds; what it wrote, for the index and the manifest, or how it failed. JSON."""
    place = "" if channel.size == 1 else f"-{channel.rank:05d}-of-{channel.size:05d}"
    entries, prints = {}, {}
    try:
        for group, named in part.tensors.items():
            file = f"{group}{place}.safetensors"
            entries[group] = {name: each.entry(file) for name, each in named.items()}
            held = {name: each.tensor for name, each in named.items() if each.tensor is not None}
            if held or channel.size == 1:
                save_file(held, partial / file, metadata={"format": "pt"})
                prints[file] = _settled(partial / file)
        own = OWN.format(channel.rank)
        (partial / own).write_text(json.dumps(part.own) + "\n", encoding="utf-8")
        prints[own] = _settled(partial / own)
    except (OSError, SafetensorError) as error:
        return {"failure": _failure(partial.parent, part, error)}
    return {"entries": entries, "prints": prints}


def _settled(file: Path) -> dict[str, Any]:
    """Size and hash of a file that is on the disk."""
    folders.sync(file)
    return folders.print_of(file)


def _complete(partial: Path, target: Path, part: Snapshot, reports: Sequence[Mapping[str, Any]]) -> str:
    """Seal the folder and give it its name; why it could not be done, or nothing."""
    if failures := [report["failure"] for report in reports if "failure" in report]:
        return failures[0]
    try:
        index = {"ranks": len(reports), "tensors": index_of([report["entries"] for report in reports])}
        (partial / INDEX).write_text(json.dumps(index) + "\n", encoding="utf-8")
        (partial / STATE).write_text(json.dumps(part.state) + "\n", encoding="utf-8")
        for name, content in part.files.items():
            (partial / name).write_bytes(content)
        known = {name: entry for report in reports for name, entry in report["prints"].items()}
        folders.seal(partial, MANIFEST, known, format=FORMAT, version=part.version)
        replace(partial, target)
        folders.write_text(target.parent / LATEST, target.name + "\n")
    except OSError as error:
        return _failure(target.parent, part, error)
    return ""


def _failure(root: Path, part: Snapshot, error: Exception) -> str:
    untouched = "Checkpoints that were there before are untouched."
    if not folders.is_disk_full(error):
        return (
            f"checkpoint {part.version} could not be written to {root}: {error}. {untouched} Make the folder writable, then "
            "continue with --resume."
        )
    free = shutil.disk_usage(root).free if root.exists() else 0
    return (
        f"disk full while writing checkpoint {part.version} to {root}: it takes {part.bytes / 2**20:,.0f} MiB and "
        f"{free / 2**20:,.0f} MiB are free. {untouched} Free some space, lower run.keep_checkpoints (one more than that "
        "exists while saving), or choose another --run folder, then start again with --resume."
    )


def plain(value: Any, where: str) -> Any:
    """A copy made of dicts and lists; refuses what JSON would give back as something else."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        if bad := [key for key in value if type(key) is not str]:
            raise CheckpointError(f"{where} has the key {bad[0]!r}: keys of a checkpoint's state are strings")
        return {key: plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise CheckpointError(
        f"{where} is a {type(value).__name__}: a checkpoint's state holds numbers, text, lists and mappings of Python; "
        "put tensors among the tensors"
    )
