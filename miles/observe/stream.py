"""An output stream that outlives its reader: a run must not end because a terminal or a pipe was closed."""

from __future__ import annotations

import os
from typing import TextIO


class SafeStream:
    """Passes text on to `stream` until that fails for good, then swallows it; `closed_by_reader` says so.

    When the reader of a pipe has gone, the stream's descriptor is pointed at the null device, because the interpreter
    flushes standard output once more when it ends and would report an error then.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.closed_by_reader = False

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return not self.closed_by_reader and self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        if not self.closed_by_reader:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
            except (OSError, ValueError):
                self._give_up()
        return len(text)

    def flush(self) -> None:
        if not self.closed_by_reader:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._give_up()

    def _give_up(self) -> None:
        self.closed_by_reader = True
        try:
            descriptor = self._stream.fileno()
            null = os.open(os.devnull, os.O_WRONLY)
        except (OSError, ValueError):
            return  # a stream without a descriptor, or closed already: nothing will be flushed
        os.dup2(null, descriptor)
        os.close(null)
