"""A process that trains on a ledger and is killed at any moment: it prints a line after each call that has returned."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from miles.buffer.backend import Where
from miles.buffer.ledger import Ledger
from miles.buffer.settings import LedgerSettings
from miles.buffer.stream import PromptStream
from miles.buffer.wire import encode_group
from miles.errors import BufferClosed
from miles.types import Group, Sample, Segment

SETTINGS = LedgerSettings(groups_per_step=4, max_staleness=1, inline_bytes=3000)
WHERE = Where(segment_bytes=20_000)
STREAM = PromptStream(num_rows=40, seed=0, shuffle=True, groups_per_step=4, epochs=1)


def build(stream: PromptStream, ordinal: int, version: int, length: int) -> Group:
    segment = Segment(
        (1, *range(length)), (False, *(True,) * length), (0.0, *(-0.5,) * length), (-1, *(version,) * length)
    )
    return Group(ordinal, stream.at(ordinal).row, (Sample((segment,), "stop", "x" * length, 1.0),))


def say(*words: object) -> None:
    print(*words, flush=True)


def train(ledger: Ledger) -> None:
    while True:
        for lease in ledger.lease(3, "child", 60.0):
            if lease.ordinal % 5 == 3:
                ledger.release(lease)
                continue
            group = build(ledger.stream, lease.ordinal, lease.min_version, 50 + 100 * (lease.ordinal % 4))
            ledger.put(lease, group)
            say("put", lease.ordinal, encode_group(group).digest)
        for lease in ledger.lease(1, "child", 60.0):
            group = build(ledger.stream, lease.ordinal, lease.min_version, 60)
            ledger.put(lease, group)
            say("put", lease.ordinal, encode_group(group).digest)
        version = ledger.stats().weight_version
        if ordinals := ledger.create(version):
            say("manifest", version, *ordinals)
            ledger.advance(version + 1)
            say("advance", version + 1)


def fill_the_disk(ledger: Ledger, length: int) -> None:
    """Put groups until the operating system refuses to let a file grow."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (800_000, resource.RLIM_INFINITY))
    for lease in ledger.lease(1000, "child", 60.0):
        group = build(ledger.stream, lease.ordinal, 0, length)
        ledger.put(lease, group)
        say("put", lease.ordinal, encode_group(group).digest)


def main(folder: str, what: str) -> None:
    ledger: Ledger
    if what == "train":
        ledger = Ledger(Path(folder), SETTINGS, STREAM, {}, resume=True, where=WHERE)
        ledger.release_all()
        try:
            train(ledger)
        except BufferClosed:
            say("closed")
    else:
        settings = LedgerSettings(groups_per_step=1000, inline_bytes=3000)
        ledger = Ledger(Path(folder), settings, PromptStream(1000, 0, True, 1000), {})
        fill_the_disk(ledger, int(what))


if __name__ == "__main__":
    main(*sys.argv[1:])
