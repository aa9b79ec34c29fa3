"""Segment files: bytes come back, files roll over, and a full disk leaves what was written before."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from miles.buffer.payloads import Place
from miles.buffer.segments import Segments, open_append
from miles.errors import ExperienceError


def test_payloads_come_back_and_files_roll_over(tmp_path: Path) -> None:
    segments = Segments(tmp_path / "segments", max_bytes=10)
    places = [segments.append(bytes([value]) * 6) for value in range(5)]
    segments.sync()
    assert places == [Place(0, 0), Place(0, 6), Place(1, 0), Place(1, 6), Place(2, 0)]
    assert [segments.read(place, 6) for place in places] == [bytes([value]) * 6 for value in range(5)]
    segments.close()
    assert sorted(path.name for path in (tmp_path / "segments").iterdir()) == ["000000.seg", "000001.seg", "000002.seg"]


def test_a_new_writer_appends_behind_what_is_there(tmp_path: Path) -> None:
    first = Segments(tmp_path / "segments")
    first.append(b"abc")
    first.close()
    (tmp_path / "segments" / "notes.seg").write_text("of the user")
    second = Segments(tmp_path / "segments")
    assert second.append(b"defg") == Place(0, 3)
    second.close()
    assert (tmp_path / "segments" / "000000.seg").read_bytes() == b"abcdefg"


def test_lost_bytes_are_an_error(tmp_path: Path) -> None:
    segments = Segments(tmp_path / "segments")
    with pytest.raises(ExperienceError, match=r"000003\.seg cannot be read.*put the file back"):
        segments.read(Place(3, 0), 1)
    segments.append(b"abc")
    with pytest.raises(ExperienceError, match=r"000000\.seg ends before byte 4.*the file was cut"):
        segments.read(Place(0, 1), 3)
    segments.close()


class FullDisk:
    """A file that takes a few bytes more and then no space is left."""

    def __init__(self, file: BinaryIO, space: int) -> None:
        self._file = file
        self._space = space

    def write(self, data: memoryview) -> int:
        if not self._space:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._file.write(data[: self._space])
        self._space -= written
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_failed_append_gives_its_space_back(tmp_path: Path) -> None:
    segments = Segments(tmp_path / "segments", opener=lambda path: FullDisk(open_append(path), 8))  # type: ignore[arg-type]
    assert segments.append(b"abcde") == Place(0, 0)
    with pytest.raises(OSError, match="No space left"):
        segments.append(b"fghij")
    assert (tmp_path / "segments" / "000000.seg").read_bytes() == b"abcde"
    assert segments.read(Place(0, 0), 5) == b"abcde"
    segments.close()


def test_after_a_failed_sync_the_next_payload_goes_to_a_new_file(tmp_path: Path) -> None:
    class Unsyncable(FullDisk):
        def fileno(self) -> int:
            return pipe if self._space == 0 else self._file.fileno()

    pipe, other = os.pipe()  # fsync of a pipe fails with EINVAL
    try:
        segments = Segments(tmp_path / "segments", opener=lambda path: Unsyncable(open_append(path), 3))  # type: ignore[arg-type]
        segments.append(b"abc")
        with pytest.raises(OSError, match="Invalid argument"):
            segments.sync()
        assert segments.append(b"d") == Place(1, 0)
        segments.close()
    finally:
        os.close(pipe)
        os.close(other)


def test_whole_files_are_deleted_and_never_the_one_that_is_written(tmp_path: Path) -> None:
    segments = Segments(tmp_path / "segments", max_bytes=10)
    for value in range(6):
        segments.append(bytes([value]) * 6)
    (tmp_path / "segments" / "notes.seg").write_text("of the user")
    segments.delete([], 1)
    assert sorted(path.name for path in (tmp_path / "segments").iterdir()) == ["000001.seg", "000002.seg", "notes.seg"]
    segments.delete([], None)
    assert sorted(path.name for path in (tmp_path / "segments").iterdir()) == ["000002.seg", "notes.seg"]
    segments.close()


def test_an_object_is_not_looked_for_in_files(tmp_path: Path) -> None:
    with pytest.raises(ExperienceError, match="lies in an object store, and the ledger was opened without it"):
        Segments(tmp_path).read(Place(object="run/0-ab"), 3)
