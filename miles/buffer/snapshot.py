"""A ledger without its groups, as one file: each checkpoint holds one, so that a lost buffer can be made again.

The file is a sequence of MessagePack values, each behind its length: a header, rows of tables, and at the end the SHA-256 of
everything before. What is in it says which prompts were trained; the groups that were not are collected again.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from miles.buffer.store import Store
from miles.errors import ExperienceError

SNAPSHOT_NAME = "ledger.snapshot"
FORMAT = 1
PAGE = 2000
MOST_PAGE_BYTES = 256 << 20
COLUMNS = {
    "run": "id config_hash identity setup facts max_stale groups_per_step next_ordinal next_step committed_step weight_version "
    "epoch kept_from learner stored refused ended created",
    "prompt": "run ordinal row state attempts step",
    "manifest": "run epoch step pos ordinal version_min hash",
    "step": "run epoch step weight_version manifest_hash prev_hash short",
    "dropped": "run epoch ordinal step reason detail summary",
    "caller": "run session number time",
    "event": "run time kind json",
}
PAGED_BY = {"prompt": "ordinal", "manifest": "step", "step": "step", "dropped": "ordinal", "event": "seq"}


def chunks(store: Store) -> Iterator[bytes]:
    """The file, piece by piece. Runs inside `store.reading()`."""
    seen = hashlib.sha256()
    for value in _values(store):
        payload = msgspec.msgpack.encode(value)
        piece = len(payload).to_bytes(4, "big") + payload
        seen.update(piece)
        yield piece
    end = msgspec.msgpack.encode(seen.digest())
    yield len(end).to_bytes(4, "big") + end


def _values(store: Store) -> Iterator[Any]:
    yield ["miles ledger", FORMAT, store.run]
    for table, columns in COLUMNS.items():
        names, key = ", ".join(columns.split()), "id" if table == "run" else "run"
        select = f"SELECT {names} FROM {table} WHERE {key} = ?"
        for rows in _pages(store, table, select):
            if rows:
                yield [table, [list(row) for row in rows]]


def _pages(store: Store, table: str, select: str) -> Iterator[Sequence[Any]]:
    """The rows of a table in pages of neighbouring keys, so that a long table never stands in memory."""
    key = PAGED_BY.get(table)
    if key is None:
        yield store.all(select)
        return
    last = store.value(f"SELECT max({key}) FROM {table} WHERE run = ?")
    for first in range(0, -1 if last is None else last + 1, PAGE):
        yield store.all(f"{select} AND {key} >= ? AND {key} < ? ORDER BY {key}", first, first + PAGE)


def load(store: Store, file: BinaryIO) -> None:
    """Fill the empty tables of a run with a snapshot's rows. Runs inside a transaction. Raises ExperienceError."""
    for _ in _read(file):
        pass  # the whole of it is checked before a row is written
    file.seek(0)
    values = _read(file)
    if next(values, None) != ["miles ledger", FORMAT, store.run]:
        raise ExperienceError(
            f"the snapshot is not one of run {store.run!r} in format {FORMAT}: give the checkpoint's own"
        )
    for value in values:
        table, rows = msgspec.convert(value, tuple[str, list[list[Any]]])
        if table not in COLUMNS or any(len(row) != len(COLUMNS[table].split()) for row in rows):
            raise ExperienceError(
                f"the snapshot holds rows of an unknown table {table[:40]!r}: it was written by another Miles"
            )
        names = COLUMNS[table].split()
        if any(row[0] != store.run for row in rows):
            raise ExperienceError("the snapshot holds rows of another run: give the checkpoint's own")
        marks = ", ".join("?" * len(names))
        store.db.executemany(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})", rows)


def _read(file: BinaryIO) -> Iterator[Any]:
    """The values of a snapshot, the last of which is checked. Raises ExperienceError where it was cut or altered."""
    seen = hashlib.sha256()
    altered = ExperienceError("the snapshot of the ledger was cut or altered: use an older checkpoint")
    while True:
        head = file.read(4)
        length = int.from_bytes(head, "big")
        payload = file.read(length) if len(head) == 4 and length <= MOST_PAGE_BYTES else b""
        if len(payload) != length or not payload:
            raise altered
        try:
            value = msgspec.msgpack.decode(payload)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise altered from error
        if isinstance(value, bytes):
            if value != seen.digest() or file.read(1):
                raise altered
            return
        seen.update(head + payload)
        yield value


def as_file(source: Path | bytes) -> BinaryIO:
    return io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
