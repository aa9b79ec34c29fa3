"""Where log records of a run go: all of them into its log file, warnings also to the person who watches."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def logs_to(path: Path | None, say: Callable[[str], None]) -> Iterator[None]:
    """While active, records of `miles` are appended to `path`, and those from WARNING up are also said.

    `path` None: to standard error, which is the log of a rank that was started by another process.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    file = logging.StreamHandler() if path is None else _File(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("miles")
    level, propagate = logger.level, logger.propagate
    handlers = [file, _Said(say)]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
        with contextlib.suppress(OSError):  # the same disk
            file.close()


@contextmanager
def said(say: Callable[[str], None]) -> Iterator[None]:
    """While active, records of `miles` from INFO up are said: what happens before there is a run directory."""
    logger, handler = logging.getLogger("miles"), _Said(say, logging.INFO)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _File(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """On a full disk the log loses its lines; the run says itself what it could not write."""


class _Said(logging.Handler):
    def __init__(self, say: Callable[[str], None], level: int = logging.WARNING) -> None:
        super().__init__(level)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        warns = record.levelno >= logging.WARNING
        self._say(f"{record.levelname.lower()}: {record.getMessage()}" if warns else record.getMessage())
