"""How a version gets from the learner to a server: as files that both see, or as files that a service takes off the learner's shelf."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from miles.publish.files import Published, WeightFiles
from miles.publish.shelf import Shelf
from miles.types import PolicyUpdate

UNVERIFIED = "unverified-{version}"


class LoadingRoutes(Protocol):
    """Routes of one server (`engine/vllm_routes.py`)."""

    def version(self) -> str: ...
    def prepare_weights(self) -> None: ...
    def load_weights(self, file: Path, tensors: int, size: int, version: str) -> None: ...
    def load_adapter(self, version: int, folder: Path) -> None: ...
    def adapters(self) -> list[int]: ...
    def fetch(self, offer: Mapping[str, Any], size: int) -> Path: ...


class Carrier(Protocol):
    """`write` makes a version ready, once; `load` brings it to one server, also again; `forget` drops all others."""

    def write(self, update: PolicyUpdate) -> Published: ...
    def load(self, routes: Any, published: Published) -> None: ...
    def forget(self, kept: Collection[int]) -> None: ...


class FileCarrier:
    """Servers read the folder that the learner writes."""

    def __init__(self, files: WeightFiles) -> None:
        self._files = files

    def write(self, update: PolicyUpdate) -> Published:
        return self._files.write(update)

    def load(self, routes: LoadingRoutes, published: Published) -> None:
        """Raises ServerFault."""
        if published.adapter is not None:
            if published.version not in routes.adapters():
                routes.load_adapter(published.version, published.path)
            return
        if routes.version() == "default":
            routes.prepare_weights()
        name = UNVERIFIED.format(version=published.version)
        routes.load_weights(published.path, published.tensors, published.size, name)

    def forget(self, kept: Collection[int]) -> None:
        self._files.forget(kept)


class ShelfCarrier(FileCarrier):
    """Services on other machines take the files off a shelf, whole and with the learner's hashes, and their servers read those."""

    def __init__(self, files: WeightFiles, shelf: Shelf) -> None:
        super().__init__(files)
        self._shelf = shelf
        self._kept: Collection[int] = ()
        self._offer: Mapping[str, Any] = {}

    def write(self, update: PolicyUpdate) -> Published:
        published = super().write(update)
        self._offer = self._shelf.offer(published.path, tuple(sorted(self._kept))).json()
        return published

    def load(self, routes: LoadingRoutes, published: Published) -> None:
        place = routes.fetch(self._offer, published.size)
        super().load(routes, replace(published, path=place))

    def forget(self, kept: Collection[int]) -> None:
        super().forget(kept)
        self._kept = kept  # services drop the others when they take the next version
