"""What the ledger keeps of a group beside its bytes: made by whoever has decoded the group, outside of any lock."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from miles.buffer.store import encode_summary
from miles.buffer.summary import summarise, version_range
from miles.buffer.wire import Frame
from miles.types import Group


@dataclass(frozen=True, slots=True)
class Record:
    """One group. Its bytes are in `payload`, or already lie as `object` in an object store."""

    ordinal: int
    row: int
    version_min: int
    version_max: int
    n: int  # samples
    reward_mean: float | None
    reward_std: float | None
    length: int  # bytes
    digest: str  # SHA-256 of them, in hex
    summary: str  # JSON of a FinishedGroup without a reason
    payload: bytes | None = None
    object: str | None = None


def record_of(group: Group, frame: Frame, object: str | None = None) -> Record:
    """`object`: where the frame was stored already; the record then goes without its bytes."""
    rewards = [reward for reward in group.rewards if reward is not None]
    oldest, newest = version_range(group)
    return Record(
        ordinal=group.ordinal,
        row=group.row,
        version_min=oldest,
        version_max=newest,
        n=len(group.samples),
        reward_mean=statistics.fmean(rewards) if rewards else None,
        reward_std=statistics.stdev(rewards) if len(rewards) > 1 else None,
        length=len(frame.payload),
        digest=frame.digest,
        summary=encode_summary(summarise(group, None)),
        payload=None if object else frame.payload,
        object=object,
    )
