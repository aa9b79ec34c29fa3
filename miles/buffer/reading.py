"""What a ledger tells: manifests, summaries, counts and events. Only reads, so it serves a run that is under way or dead too."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from miles.buffer.database import Row
from miles.buffer.store import Store, decode_summary
from miles.buffer.summary import unfinished
from miles.errors import ExperienceError
from miles.types import Collected, FinishedGroup


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
    refused: int  # groups that could not be trained on, since the last rewind
    epoch: int  # times the run was rewound to sample again
    replayable_from: int  # groups of manifests below it were deleted
    ended: str | None  # why nothing more is leased. None: the run goes on
    drops_by_reason: Mapping[str, int]
    steps: tuple[StepStats, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the ledger: created, short, dead, commit, deleted, rewind, resample, restored, ended."""

    time: float  # seconds since the epoch
    kind: str
    detail: Mapping[str, Any]


def step_row(store: Store, step: int) -> Row | None:
    """The row of a manifest; None where it does not exist yet. Of a step that was sampled again the newest counts."""
    if step >= store.state().next_step:
        return None
    return store.one("SELECT * FROM step WHERE run = ? AND step = ? ORDER BY epoch DESC LIMIT 1", step)


def entries(store: Store, step: int) -> Sequence[Row]:
    """The rows (ordinal, version_min, hash) of a manifest in its order; none where it does not exist yet."""
    row = step_row(store, step)
    if row is None:
        return []
    return store.all(
        "SELECT ordinal, version_min, hash FROM manifest WHERE run = ? AND step = ? AND epoch = ? ORDER BY pos",
        step,
        row["epoch"],
    )


def manifest(store: Store, step: int) -> list[int]:
    """The ordinals of a manifest in its order; empty where it does not exist yet."""
    return [row["ordinal"] for row in entries(store, step)]


def dropped(store: Store, step: int) -> list[FinishedGroup]:
    """Summaries of the groups that were dropped while a step was filled, in ordinal order."""
    row = step_row(store, step)
    epoch = store.state().epoch if row is None else row["epoch"]
    rows = store.all(
        "SELECT ordinal, reason, summary FROM dropped WHERE run = ? AND step = ? AND epoch = ? ORDER BY ordinal",
        step,
        epoch,
    )
    return [
        unfinished(row["ordinal"], row["reason"]) if row["summary"] is None else decode_summary(row["summary"])
        for row in rows
    ]


def finished(store: Store, step: int) -> list[FinishedGroup]:
    """Summaries of a step's trained and dropped groups, in ordinal order. Raises ExperienceError for a later step."""
    next_step = store.state().next_step
    if not 0 <= step <= next_step:
        raise ExperienceError(f"finished({step}): only steps 0 to {next_step} have been collected for")
    found = [
        store.one("SELECT meta FROM grp WHERE run = ? AND ordinal = ?", ordinal) for ordinal in manifest(store, step)
    ]
    groups = [decode_summary(row["meta"]) for row in found if row is not None] + dropped(store, step)
    return sorted(groups, key=lambda summary: summary.ordinal)


def collected(store: Store, step: int) -> list[Collected]:
    """Who collected a step's trained and dropped groups and when, in ordinal order; none from before a restored snapshot."""
    row = step_row(store, step)
    epoch = store.state().epoch if row is None else row["epoch"]
    rows = [
        row
        for table, reason in (("manifest", "NULL"), ("dropped", "t.reason"))
        for row in store.all(
            f"SELECT p.ordinal, p.worker, p.leased, p.finished, {reason} FROM {table} t JOIN prompt p ON p.run = t.run "
            "AND p.ordinal = t.ordinal WHERE t.run = ? AND t.step = ? AND t.epoch = ? AND p.leased IS NOT NULL AND "
            "p.finished >= p.leased",
            step,
            epoch,
        )
    ]
    return sorted((Collected(*row) for row in rows), key=lambda each: each.ordinal)


def genesis(store: Store) -> str:
    """What the chain of manifests starts from: the hash of the run's identity."""
    return store.value("SELECT config_hash FROM run WHERE id = ?")


def chain_hash(step: int, groups: Sequence[tuple[int, str]], previous: str) -> str:
    """SHA-256 over the hash of the step before, the step, and each ordinal with the hash of its group, in order."""
    return hashlib.sha256(msgspec.json.encode([previous, step, groups])).hexdigest()


def verify(store: Store) -> int:
    """Recompute the chain of manifests; the number of steps in it. Raises ExperienceError at the first that differs."""
    previous, steps = genesis(store), store.state().next_step
    for step in range(steps):
        row = step_row(store, step)
        there = None if row is None else (row["prev_hash"], row["manifest_hash"])
        expected = chain_hash(step, [(entry["ordinal"], entry["hash"]) for entry in entries(store, step)], previous)
        if there != (previous, expected):
            said = "nothing" if there is None else there[1][:16]
            raise ExperienceError(
                f"the manifest of step {step} in {store.name} was altered: its hash is {expected[:16]}, the ledger says "
                f"{said}; put back a copy of the run directory, or start a new run"
            )
        previous = expected
    return steps


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
        ready=by_state.get("done", 0) + by_state.get("placed", 0),
        refused=state.refused,
        epoch=state.epoch,
        replayable_from=state.kept_from,
        ended=state.ended,
        drops_by_reason=dict(map(tuple, reasons)),
        steps=_steps(store),
    )


def _steps(store: Store) -> tuple[StepStats, ...]:
    drops = {
        (row["step"], row["epoch"]): row["n"]
        for row in store.all("SELECT step, epoch, count(*) AS n FROM dropped WHERE run = ? GROUP BY step, epoch")
    }
    rows = store.all(
        "SELECT s.step, s.epoch, s.short, count(*) AS groups, avg(CAST(s.weight_version - m.version_min AS DOUBLE PRECISION)) "
        "AS mean, max(s.weight_version - m.version_min) AS worst FROM step s "
        "JOIN manifest m ON m.run = s.run AND m.step = s.step AND m.epoch = s.epoch "
        "WHERE s.run = ? AND s.step < ? GROUP BY s.step, s.epoch, s.short ORDER BY s.step, s.epoch",
        store.state().next_step,
    )
    newest = {row["step"]: row for row in rows}  # of a step that was sampled again the last one stays
    return tuple(
        StepStats(step, row["groups"], drops.get((step, row["epoch"]), 0), row["short"], row["mean"], row["worst"])
        for step, row in newest.items()
    )


def events(store: Store) -> list[Event]:
    """Everything that happened to the ledger, in order."""
    rows = store.all("SELECT time, kind, json FROM event WHERE run = ? ORDER BY seq")
    return [Event(row["time"], row["kind"], msgspec.json.decode(row["json"])) for row in rows]


def gauges(store: Store) -> dict[str, int]:
    """Numbers of the run that cost the same however long it is: what is open now, and the cursors."""
    state = store.state()
    counts = dict.fromkeys(("pending", "leased", "done", "placed"), 0)
    for name in counts:
        counts[name] = store.value("SELECT count(*) FROM prompt WHERE run = ? AND state = ?", name)
    return {
        **{f"prompts_{name}": count for name, count in counts.items()},
        "prompts_issued": state.next_ordinal,
        "prompts_capacity": (state.max_stale + 1) * state.groups_per_step,
        "steps_stored": state.next_step,
        "weight_version": state.weight_version,
        "committed_version": state.committed_step,
        "epoch": state.epoch,
        "groups_stored": state.stored,
        "groups_refused": state.refused,
    }
