"""The folders `step_000010` of checkpoints: their names, and how a new one takes its place among them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

from miles.learn import folders

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STEP = re.compile(r"step_(\d+)(\.old)?")


def candidates(root: Path) -> Iterator[Path]:
    """Folders named like checkpoints, highest number first; of one number, the one being replaced last."""
    found = [path for path in root.iterdir() if STEP.fullmatch(path.name) and path.is_dir()] if root.is_dir() else []
    yield from sorted(found, key=lambda path: (number(path), not path.name.endswith(".old")), reverse=True)


def number(path: Path) -> int:
    match = STEP.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def is_complete(path: Path) -> bool:
    """Whether all files are there in their sizes: what can be known without reading them."""
    try:
        folders.verify(path, MANIFEST, hashes=lambda name: False)
    except folders.Damaged:
        return False
    return True


def replace(partial: Path, target: Path) -> None:
    """Give `partial` its name, with a complete checkpoint under some name of this version at every moment."""
    folders.settle(partial)
    old = target.with_name(target.name + ".old")
    if target.exists() and is_complete(target) and not folders.strangers(target, MANIFEST):
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
    if is_complete(path) and not folders.strangers(path, MANIFEST):
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
