"""Whole folders or none: what is written stands under a temporary name until every byte of it is on the disk.

A sealed folder holds a manifest with the size and SHA-256 of each of its files, and of the manifest itself, so that one
flipped bit is found.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_PARTIAL = re.compile(r"\.partial-(?P<name>.+)-[0-9a-f]{8}")


class Damaged(Exception):
    """A sealed folder is not what was sealed; the message names the file and what is wrong with it."""


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A fresh folder beside `target` to write into; it is removed when the block fails.

    The block itself moves it to its place with `publish`, so that it decides what happens to an older one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = fresh(target)
    try:
        yield partial
    finally:
        if partial.exists():
            shutil.rmtree(partial)


def fresh(target: Path) -> Path:
    """A new folder beside `target`, under a name that nobody takes for a whole one."""
    partial = target.with_name(f".partial-{target.name}-{secrets.token_hex(4)}")
    partial.mkdir()
    return partial


def settle(partial: Path) -> None:
    """Wait until every file of a folder is on the disk."""
    for path in sorted(partial.rglob("*")):
        sync(path)
    sync(partial)


def publish(partial: Path, target: Path) -> None:
    """Make `partial` durable, then give it its name. `target` must not exist, or be an empty folder."""
    settle(partial)
    partial.rename(target)
    sync(target.parent)


def replace(partial: Path, target: Path) -> None:
    """Make `partial` durable, then put it in the place of the folder `target`, which is deleted last.

    Between two renames nothing stands there; a kill in that instant leaves the old folder beside it, as a leftover.
    """
    settle(partial)
    old = target.with_name(f".partial-{target.name}-{secrets.token_hex(4)}")
    target.rename(old)
    try:
        partial.rename(target)
    except BaseException:
        old.rename(target)
        raise
    sync(target.parent)
    shutil.rmtree(old)


def leftovers(parent: Path, name: str) -> list[Path]:
    """Partial folders whose names match the expression `name`, left by writers that were killed.

    Only for a parent that has one writer at a time.
    """
    matches = ((path, _PARTIAL.fullmatch(path.name)) for path in parent.iterdir())
    return sorted(path for path, match in matches if match and re.fullmatch(name, match["name"]))


def discard(folder: Path) -> None:
    """Delete a folder so that a kill in the middle leaves no half of it under its name."""
    doomed = folder.with_name(f".partial-{folder.name}-{secrets.token_hex(4)}")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def seal(folder: Path, manifest: str, known: Mapping[str, Mapping[str, Any]] | None = None, **facts: Any) -> None:
    """Write the manifest of all files in `folder`, with `facts` (JSON) beside it, and give all files one mode.

    `known`: what `print_of` said of some of them, by name, so that they are not read again.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: (known or {}).get(name) or print_of(folder / name) for name in names}
    path = folder / manifest
    path.write_bytes(_manifest_bytes({**facts, "files": files}))
    # safetensors makes its files readable by their owner alone; the process's umask shall decide, as for other files.
    for name in names:
        (folder / name).chmod(path.stat().st_mode & 0o777)


def print_of(file: Path) -> dict[str, Any]:
    """Size and hash of a file, as a manifest holds them."""
    return {"bytes": file.stat().st_size, "sha256": file_hash(file)}


def read_seal(folder: Path, manifest: str) -> dict[str, Any]:
    """The manifest's content: the facts and `files`. Raises Damaged when it is missing or altered."""
    try:
        raw = (folder / manifest).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Damaged(f"{folder / manifest} is missing") from error
    altered = Damaged(f"{folder / manifest} is altered: it does not match its own SHA-256")
    try:
        content = json.loads(raw)
        content.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise altered from error
    if _manifest_bytes(content) != raw:
        raise altered
    return content


def read_facts(folder: Path, manifest: str) -> dict[str, Any] | None:
    """The `facts` that a folder was sealed with; None where it is not sealed, or damaged."""
    try:
        return read_seal(folder, manifest)["facts"]
    except Damaged:
        return None


def verify(folder: Path, manifest: str, hashes: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:
    """Compare all files with the manifest and return it; Damaged names the first fault.

    Sizes are always compared, contents of those files that `hashes` says yes to.
    """
    content = read_seal(folder, manifest)
    for name, expected in content["files"].items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise Damaged(f"{manifest} names {name!r}, which lies outside of {folder}")
        if not path.is_file():
            raise Damaged(f"{path} is missing")
        if (size := path.stat().st_size) != expected["bytes"]:
            raise Damaged(f"{path} has {size} bytes where {manifest} says {expected['bytes']}")
        if hashes(name) and file_hash(path) != expected["sha256"]:
            raise Damaged(f"{path} is altered: its SHA-256 is not the one in {manifest}")
    return content


def strangers(folder: Path, manifest: str) -> list[str]:
    """Names of files in `folder` that its manifest does not list, so that nothing of someone else's is deleted."""
    known = {manifest, *read_seal(folder, manifest)["files"]}
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    return sorted(found - known)


def write_text(path: Path, text: str) -> None:
    """Replace one small file, whole or not at all. One writer at a time: the name of the new one is always the same."""
    partial = path.with_name(f".partial-{path.name}")
    try:
        partial.write_text(text, encoding="utf-8")
        sync(partial)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed for want of space. safetensors reports the number of the OS error in its text alone."""
    full = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError):
        return error.errno in full
    return any(f"os error {number}" in str(error) for number in full)


def _manifest_bytes(content: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**content, "sha256": digest}, indent=1, sort_keys=True) + "\n").encode()
