"""Fetches an object from a user's own Python file, named `path/to/file.py:NAME` in a recipe."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from miles.errors import ConfigError, in_words


def load_object(reference: str, key: str) -> Any:
    """The object NAME of `path/to/file.py:NAME`. The file is executed. `key` is the recipe's, for the messages.

    Raises ConfigError where the file is missing, cannot be imported, or has no such name.
    """
    path_text, _, name = reference.rpartition(":")
    if not path_text.endswith(".py") or not name.isidentifier():
        raise ConfigError(f'{key}: "{reference}" names no object of the file: write "path/to/file.py:NAME".')
    path = Path(path_text).expanduser()
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {path} (looked in {Path.cwd()}): correct the path.")
    module = _import_file(path, key)
    if not hasattr(module, name):
        close = get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], n=1)
        hint = f"; the nearest is {close[0]}" if close else ""
        raise ConfigError(f"{key}: {path} has no {name}{hint}: name a variable that stands in the file.")
    return getattr(module, name)


def _import_file(path: Path, key: str) -> ModuleType:
    resolved = path.resolve()
    module_name = f"miles_user_{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, resolved)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look a class's module up by name.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ConfigError(
            f"{key}: {path} could not be imported: {in_words(error)}. Run it with python to see where."
        ) from error
    return module
