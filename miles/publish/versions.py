"""Names of published versions in a folder. Imports no torch."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from pathlib import Path

NAME = re.compile(r"policy-v(0|[1-9][0-9]{0,17})(\.safetensors)?")


def versions(folder: Path) -> list[int]:
    """Those that are there, whole."""
    found = (NAME.fullmatch(path.name) for path in folder.iterdir())
    return [int(match[1]) for match in found if match]


def forget(folder: Path, kept: Collection[int]) -> None:
    """Delete every version that is not in `kept`, and what has come of one."""
    for path in folder.iterdir():
        name = path.name.removeprefix(".").removesuffix(".part")
        match = NAME.fullmatch(name)
        if match and int(match[1]) not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
