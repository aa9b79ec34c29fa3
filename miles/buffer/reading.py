"""What a ledger tells: manifests, summaries, counts and events. Only reads, so it serves a run that is under way or dead too."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from miles.buffer.store import Store, decode_summary
from miles.buffer.summary import unfinished
from miles.errors import ExperienceError
from miles.types import FinishedGroup


@dataclass(frozen=True, slots=True)
class StepStats:
    """One manifest. Staleness is the step's version minus the oldest version in a group, over its groups."""

    step: int
    groups: int
    dropped: int
    short: str | None  # None: full; otherwise why it holds fewer groups: max_dropped or stream_ended
    staleness_mean: float
    staleness_max: int


@dataclass(frozen=True, slots=True)
class Stats:
    """Where a run's groups are. issued = trained + dropped + pending + leased + ready, always."""

    weight_version: int
    next_step: int  # manifests that exist
    committed: int  # version of the oldest checkpoint kept
    capacity: int  # issued but untrained groups, at most: (S + 1) * groups_per_step
    issued: int
    trained: int
    dropped: int
    pending: int
    leased: int
    ready: int  # finished and not trained yet
    drops_by_reason: Mapping[str, int]
    steps: tuple[StepStats, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the ledger: created, opened, short, dead, commit, rewind."""

    time: float  # seconds since the epoch
    kind: str
    detail: Mapping[str, Any]


def manifest(store: Store, step: int) -> list[int]:
    """The ordinals of a manifest in its order; empty where it does not exist yet."""
    rows = store.all("SELECT ordinal FROM manifest WHERE run = ? AND step = ? ORDER BY pos", step)
    return [row["ordinal"] for row in rows]


def dropped(store: Store, step: int) -> list[FinishedGroup]:
    """Summaries of the groups that were dropped while a step was filled, in ordinal order."""
    rows = store.all("SELECT ordinal, reason, summary FROM dropped WHERE run = ? AND step = ? ORDER BY ordinal", step)
    return [
        unfinished(row["ordinal"], row["reason"]) if row["summary"] is None else decode_summary(row["summary"])
        for row in rows
    ]


def finished(store: Store, step: int) -> list[FinishedGroup]:
    """Summaries of a step's trained and dropped groups, in ordinal order. Raises ExperienceError for a later step."""
    next_step = store.state().next_step
    if not 0 <= step <= next_step:
        raise ExperienceError(f"finished({step}): only steps 0 to {next_step} have been collected for")
    rows = store.all(
        "SELECT g.meta FROM manifest m JOIN grp g ON g.run = m.run AND g.ordinal = m.ordinal WHERE m.run = ? AND m.step = ?",
        step,
    )
    groups = [decode_summary(row["meta"]) for row in rows] + dropped(store, step)
    return sorted(groups, key=lambda summary: summary.ordinal)


def genesis(store: Store) -> str:
    """What the chain of manifests starts from: the hash of the run's identity."""
    return store.value("SELECT config_hash FROM run WHERE id = ?")


def chain_hash(store: Store, step: int, ordinals: list[int], previous: str) -> str:
    """SHA-256 over the hash of the step before, the step, and each ordinal with the hash of its group, in order."""
    hashes = [store.value("SELECT hash FROM grp WHERE run = ? AND ordinal = ?", ordinal) for ordinal in ordinals]
    parts = [previous, step, list(zip(ordinals, hashes, strict=True))]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def verify(store: Store) -> int:
    """Recompute the chain of manifests; the number of steps in it. Raises ExperienceError at the first that differs."""
    previous = genesis(store)
    steps = store.all("SELECT step, prev_hash, manifest_hash FROM step WHERE run = ? ORDER BY step")
    for place, row in enumerate(steps):
        expected = chain_hash(store, place, manifest(store, place), previous)
        if tuple(row) != (place, previous, expected):
            raise ExperienceError(
                f"the manifest of step {place} in {store.path} was altered: its hash is {expected[:16]}, the ledger says "
                f"{row['manifest_hash'][:16]}; put back a copy of the run directory, or start a new run"
            )
        previous = expected
    return len(steps)


def stats(store: Store) -> Stats:
    """Counts over the whole run."""
    state = store.state()
    by_state = dict(map(tuple, store.all("SELECT state, count(*) FROM prompt WHERE run = ? GROUP BY state")))
    reasons = store.all("SELECT reason, count(*) FROM dropped WHERE run = ? GROUP BY reason ORDER BY reason")
    return Stats(
        weight_version=state.weight_version,
        next_step=state.next_step,
        committed=state.committed_step,
        capacity=(state.max_stale + 1) * state.groups_per_step,
        issued=state.next_ordinal,
        trained=by_state.get("trained", 0),
        dropped=by_state.get("dropped", 0),
        pending=by_state.get("pending", 0),
        leased=by_state.get("leased", 0),
        ready=by_state.get("done", 0),
        drops_by_reason=dict(map(tuple, reasons)),
        steps=_steps(store),
    )


def _steps(store: Store) -> tuple[StepStats, ...]:
    drops = dict(map(tuple, store.all("SELECT step, count(*) FROM dropped WHERE run = ? GROUP BY step")))
    rows = store.all(
        "SELECT s.step, s.short, count(*) AS groups, avg(s.weight_version - g.version_min) AS mean, "
        "max(s.weight_version - g.version_min) AS worst FROM step s "
        "JOIN manifest m ON m.run = s.run AND m.step = s.step JOIN grp g ON g.run = m.run AND g.ordinal = m.ordinal "
        "WHERE s.run = ? GROUP BY s.step ORDER BY s.step"
    )
    return tuple(
        StepStats(row["step"], row["groups"], drops.get(row["step"], 0), row["short"], row["mean"], row["worst"])
        for row in rows
    )


def events(store: Store) -> list[Event]:
    """Everything that happened to the ledger, in order."""
    rows = store.all("SELECT time, kind, json FROM event WHERE run = ? ORDER BY rowid")
    return [Event(row["time"], row["kind"], msgspec.json.decode(row["json"])) for row in rows]
