"""Append-only files for payloads that are too large for the ledger's own pages."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO

from miles.buffer.payloads import Place
from miles.errors import ExperienceError


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_append(path: Path) -> BinaryIO:
    return path.open("ab", buffering=0)


class Segments:
    """Files `000000.seg`, `000001.seg`, ... in one folder; a row of the ledger says which bytes of which file are a payload.

    Bytes are appended and synced before the row is written, so bytes that no row points at are all that a crash leaves.
    """

    shared = False

    def __init__(
        self, folder: Path, max_bytes: int = 256 << 20, opener: Callable[[Path], BinaryIO] = open_append
    ) -> None:
        """A file that has reached `max_bytes` is left for a new one."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._opener = opener
        self._file: BinaryIO | None = None
        self._unsynced = False
        self._number = max((int(path.stem) for path in folder.glob("*.seg") if path.stem.isdecimal()), default=0)

    def append(self, payload: bytes, name: str = "") -> Place:
        """The place of the payload, which is durable after the next `sync`. Raises OSError."""
        file = self._writable()
        offset = os.fstat(file.fileno()).st_size
        view = memoryview(payload)
        try:
            while view:
                view = view[file.write(view) :]
        except OSError:
            # The space goes back where it can; otherwise the next payload starts behind what was written.
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), offset)
            raise
        self._unsynced = True
        return Place(self._number, offset)

    def sync(self) -> None:
        """Make what was appended durable. Raises OSError."""
        if self._file is None or not self._unsynced:
            return
        try:
            os.fsync(self._file.fileno())
            self._unsynced = False
        except OSError:
            # After a failed sync the kernel may call the lost pages clean, so this file takes no further payload.
            self.close()
            self._number += 1
            raise

    def read(self, place: Place, length: int) -> bytes:
        """The bytes of a payload. Raises ExperienceError where the file has lost them."""
        if place.segment is None or place.offset is None:
            raise ExperienceError(
                f"the payload {place.object} lies in an object store, and the ledger was opened without it: give "
                "buffer.payloads as the run began with"
            )
        path, offset = self._path(place.segment), place.offset
        try:
            with path.open("rb") as file:
                file.seek(offset)
                payload = file.read(length)
        except OSError as error:
            raise ExperienceError(f"{path} cannot be read: {error}; put the file back, or start a new run") from error
        if len(payload) != length:
            raise ExperienceError(
                f"{path} ends before byte {offset + length}, where a group of the ledger ends: the file was cut; put it "
                "back, or start a new run"
            )
        return payload

    def size_of(self, name: str) -> int | None:
        """Nobody but this process stores anything here."""
        return None

    def place_of(self, name: str) -> str:
        return name

    def delete(self, objects: Collection[str], first_segment: int | None) -> None:
        """Delete files below `first_segment` (None: all) that are not being written. A crash leaves some to the next call."""
        for path in sorted(self._folder.glob("*.seg")):
            number = int(path.stem) if path.stem.isdecimal() else self._number
            if number < (self._number if first_segment is None else min(first_segment, self._number)):
                path.unlink(missing_ok=True)

    def free_bytes(self) -> int:
        return shutil.disk_usage(self._folder.parent).free

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:06d}.seg"

    def _writable(self) -> BinaryIO:
        if self._file is not None and os.fstat(self._file.fileno()).st_size >= self._max_bytes:
            self.sync()
            self.close()
            self._number += 1
        if self._file is None:
            self._folder.mkdir(exist_ok=True)
            self._file = self._opener(self._path(self._number))
            fsync_folder(self._folder)
            fsync_folder(self._folder.parent)
        return self._file
