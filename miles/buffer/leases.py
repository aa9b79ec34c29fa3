"""Who may collect which prompt: credit, leases, expiry, and the one way in for a finished group.

A prompt goes pending -> leased -> done -> trained, or ends as dropped. A prompt is issued only while the issued groups that
stand in no manifest are fewer than (version + S + 1 - next step) * groups_per_step. With full manifests that says: issued
but untrained groups stay below (S + 1) * groups_per_step. A manifest that was closed short counts as a full one, because
every manifest uses up one version, however few groups it holds.
"""

from __future__ import annotations

import math
import re
import sqlite3
import statistics
import uuid
from collections.abc import Callable, Sequence

from miles.buffer.store import LedgerSettings, Store, encode_summary
from miles.buffer.stream import PromptStream
from miles.buffer.summary import summarise, version_range
from miles.buffer.wire import Frame, GroupRefused
from miles.errors import ExperienceError, LeaseLost
from miles.types import Group, Lease

NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
REPEATED = "repeated_prompt"
DEAD = "dead"


def checked_name(name: str, what: str) -> str:
    """`name`, where it is safe in files, tables and logs. Raises ExperienceError."""
    if not NAME.fullmatch(name):
        raise ExperienceError(f"{what} {name[:140]!r} must match {NAME.pattern}")
    return name


class Leases:
    """The collectors' half of a ledger. Every method runs inside a transaction of the store."""

    def __init__(
        self, store: Store, settings: LedgerSettings, stream: PromptStream, clock: Callable[[], float]
    ) -> None:
        self.store = store
        self.settings = settings
        self.stream = stream
        self.clock = clock

    def places(self) -> int:
        """Ordinals outside of manifests that may be under way or done, by the bound on staleness."""
        state = self.store.state()
        steps = state.weight_version + self.settings.max_staleness + 1 - state.next_step
        return max(steps, 0) * self.settings.groups_per_step

    def open_prompts(self) -> list[sqlite3.Row]:
        """Issued ordinals that are neither dropped nor in a manifest, in order."""
        return self.store.all(
            "SELECT ordinal, row, state FROM prompt p WHERE run = ? AND state IN ('pending', 'leased', 'done') "
            "AND NOT EXISTS (SELECT 1 FROM manifest m WHERE m.run = p.run AND m.ordinal = p.ordinal) ORDER BY ordinal"
        )

    def room(self) -> int:
        """Ordinals that may still be issued for the first time."""
        room = self.places() - len(self.open_prompts())
        if self.stream.length is not None:
            room = min(room, self.stream.length - self.store.state().next_ordinal)
        return max(room, 0)

    def given_back(self) -> list[int]:
        """Ordinals that wait to be leased again. After a short manifest some may have to wait for the next version."""
        return [row["ordinal"] for row in self.open_prompts()[: self.places()] if row["state"] == "pending"]

    def progress(self) -> tuple[int, int]:
        """Finished groups that are not trained yet, and dropped ones of the step that is being filled."""
        step = self.store.state().next_step
        return (
            self.store.value("SELECT count(*) FROM prompt WHERE run = ? AND state = 'done'"),
            self.store.value("SELECT count(*) FROM dropped WHERE run = ? AND step = ?", step),
        )

    def at_drop_limit(self) -> bool:
        """True when the step that is being filled has seen its `drop_limit` of dropped groups."""
        return self.progress()[1] >= self.settings.drop_limit

    def waiting(self) -> int:
        """Ordinals that `lease` would hand out now: given-back ones and new ones."""
        return 0 if self.at_drop_limit() else len(self.given_back()) + self.room()

    def lease(self, n: int, worker: str, ttl: float) -> list[Lease]:
        """Up to n ordinals for `ttl` seconds, given-back ones first, each list in order. Raises ExperienceError."""
        checked_name(worker, "worker")
        if n < 0 or not (ttl > 0 and math.isfinite(ttl)):
            raise ExperienceError(
                f"lease(n={n}, ttl={ttl}): n must not be negative and ttl a positive number of seconds"
            )
        self.expire()
        if self.at_drop_limit():
            return []
        ordinals = self.given_back()[:n]
        ordinals += self._issue(min(n - len(ordinals), self.room()))
        expires, version = self.clock() + ttl, self.store.state().weight_version
        leases = [Lease(ordinal, uuid.uuid4().hex, expires, version) for ordinal in ordinals]
        self.store.db.executemany(
            "UPDATE prompt SET state = 'leased', lease_id = ?, worker = ?, lease_expires = ?, lease_ttl = ?, "
            "min_version = ?, attempts = attempts + 1 WHERE run = ? AND ordinal = ?",
            [(each.lease_id, worker, expires, ttl, version, self.store.run, each.ordinal) for each in leases],
        )
        return leases

    def _issue(self, n: int) -> list[int]:
        first = self.store.state().next_ordinal
        ordinals = list(range(first, first + n))
        self.store.db.executemany(
            "INSERT INTO prompt (run, ordinal, row, state, attempts) VALUES (?, ?, ?, 'pending', 0)",
            [(self.store.run, ordinal, self.stream.at(ordinal).row) for ordinal in ordinals],
        )
        self.store.db.execute("UPDATE run SET next_ordinal = ? WHERE id = ?", (first + n, self.store.run))
        return ordinals

    def expire(self) -> None:
        """Take back leases that ran out; a prompt whose last try ran out is dropped as dead."""
        rows = self.store.all(
            "SELECT ordinal, attempts, worker FROM prompt WHERE run = ? AND state = 'leased' AND lease_expires < ?",
            self.clock(),
        )
        for row in rows:
            if row["attempts"] < self.settings.max_attempts:
                self._set_state(row["ordinal"], "pending")
                continue
            detail = f"{row['attempts']} leases ran out, the last one held by {row['worker']}"
            self.discard(row["ordinal"], DEAD, detail)
            self.store.event(self.clock(), DEAD, {"ordinal": row["ordinal"], "detail": detail})

    def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """Those that are still held, each good for its ttl from now."""
        held = []
        for lease in leases:
            row = self._prompt(lease.ordinal)
            if row is None or row["state"] != "leased" or row["lease_id"] != lease.lease_id:
                continue
            expires = self.clock() + row["lease_ttl"]
            self.store.db.execute(
                "UPDATE prompt SET lease_expires = ? WHERE run = ? AND ordinal = ?",
                (expires, self.store.run, lease.ordinal),
            )
            held.append(Lease(lease.ordinal, lease.lease_id, expires, row["min_version"]))
        return held

    def put(self, lease: Lease, group: Group, frame: Frame) -> bool:
        """Store a group; False where it is stored already. Raises LeaseLost and GroupRefused."""
        if group.ordinal != lease.ordinal:
            raise GroupRefused(f"the lease is for ordinal {lease.ordinal}, the group is of ordinal {group.ordinal}")
        row = self._prompt(lease.ordinal)
        if row is not None and self._stored_before(row, lease, frame):
            return False
        row = self._held(lease)
        self._check(group, row)
        self._insert(group, frame)
        self._set_state(group.ordinal, "done")
        return True

    def drop(self, lease: Lease, reason: str, group: Group | None, frame: Frame | None) -> None:
        """Give up on an ordinal. `reason`: a name, or `name: what happened`. Raises LeaseLost and GroupRefused."""
        name, _, detail = reason.partition(":")
        checked_name(name, "the reason")
        row = self._prompt(lease.ordinal)
        if row is not None and row["state"] == "dropped" and row["lease_id"] == lease.lease_id:
            return
        self._held(lease)
        if group is not None and group.ordinal != lease.ordinal:
            raise GroupRefused(f"the lease is for ordinal {lease.ordinal}, the group is of ordinal {group.ordinal}")
        # What makes a group unfit to train on may be why it is dropped, so it is not looked at here.
        if group is not None and frame is not None and self.settings.keep_dropped:
            self._insert(group, frame)
        summary = None if group is None else encode_summary(summarise(group, name))
        self.discard(lease.ordinal, name, detail.strip() or None, summary)

    def release(self, lease: Lease) -> None:
        """Give an ordinal back; the try does not count. Raises LeaseLost."""
        row = self._prompt(lease.ordinal)
        if row is not None and row["state"] == "pending" and row["lease_id"] == lease.lease_id:
            return
        self._held(lease)
        self._give_back("ordinal = ?", lease.ordinal)

    def release_all(self) -> int:
        """Give back every lease, where it is known that nobody holds one any more; the number of them."""
        return self._give_back("state = 'leased'")

    def discard(self, ordinal: int, reason: str, detail: str | None = None, summary: str | None = None) -> None:
        """Drop an ordinal, counted in the step that is being filled."""
        step = self.store.state().next_step
        self.store.db.execute(
            "INSERT INTO dropped VALUES (?, ?, ?, ?, ?, ?)", (self.store.run, ordinal, step, reason, detail, summary)
        )
        self._set_state(ordinal, "dropped")

    def _give_back(self, condition: str, *values: int) -> int:
        return self.store.db.execute(
            f"UPDATE prompt SET state = 'pending', attempts = attempts - 1 WHERE run = ? AND {condition}",
            (self.store.run, *values),
        ).rowcount

    def _set_state(self, ordinal: int, state: str) -> None:
        self.store.db.execute(
            "UPDATE prompt SET state = ? WHERE run = ? AND ordinal = ?", (state, self.store.run, ordinal)
        )

    def _prompt(self, ordinal: int) -> sqlite3.Row | None:
        return self.store.one("SELECT * FROM prompt WHERE run = ? AND ordinal = ?", ordinal)

    def _held(self, lease: Lease) -> sqlite3.Row:
        """The prompt's row, where `lease` is the one that holds it. An expired lease that nobody took back still holds."""
        row = self._prompt(lease.ordinal)
        if row is None:
            raise LeaseLost(f"ordinal {lease.ordinal} was never issued by this ledger: lease it first")
        if row["state"] != "leased" or row["lease_id"] != lease.lease_id:
            raise LeaseLost(
                f"ordinal {lease.ordinal} is {row['state']}, and the lease {lease.lease_id[:8]} does not hold it: it ran out "
                "and the prompt went on without it; drop this work and lease again (buffer.lease_s says how long a lease is)"
            )
        return row

    def _stored_before(self, row: sqlite3.Row, lease: Lease, frame: Frame) -> bool:
        """True for the same content again. Raises GroupRefused for other content under the lease that finished it."""
        if row["state"] == "dropped":
            reason = self.store.value("SELECT reason FROM dropped WHERE run = ? AND ordinal = ?", lease.ordinal)
            if reason != REPEATED:
                return False
        elif row["state"] not in ("done", "trained"):
            return False
        stored = self.store.value("SELECT hash FROM grp WHERE run = ? AND ordinal = ?", lease.ordinal)
        if stored == frame.digest:
            return True
        if row["lease_id"] == lease.lease_id:
            raise GroupRefused(
                f"ordinal {lease.ordinal} is finished with the content {stored[:16]} and cannot become "
                f"{frame.digest[:16]}: a finished group never changes"
            )
        return False

    def _check(self, group: Group, row: sqlite3.Row) -> None:
        """What only the ledger knows of a group. Raises GroupRefused."""
        version, where = self.store.state().weight_version, f"ordinal {group.ordinal}"
        oldest, newest = version_range(group)
        if group.row != row["row"]:
            raise GroupRefused(f"{where} stands for row {row['row']} of the data, the group says row {group.row}")
        if newest > version:
            raise GroupRefused(f"{where}: tokens of version {newest}, but the newest version is {version}")
        if oldest < row["min_version"]:
            raise GroupRefused(
                f"{where}: tokens of version {oldest}, older than {row['min_version']}, the lease's min_version: "
                "sample it again with newer weights"
            )
        if self.settings.group_size is not None and len(group.samples) != self.settings.group_size:
            raise GroupRefused(
                f"{where}: {len(group.samples)} samples, but rollout.group_size is {self.settings.group_size}: fill the "
                "group up, or drop all of it"
            )

    def _insert(self, group: Group, frame: Frame) -> None:
        segment = offset = None
        if len(frame.payload) >= self.settings.inline_bytes:
            segment, offset = self.store.segments.append(frame.payload)
        rewards = [reward for reward in group.rewards if reward is not None]
        self.store.db.execute(
            "INSERT INTO grp VALUES (?, ?, ?, ?, ?, ?, ?, NULL, ?, ?, ?, ?, ?, ?)",
            (
                self.store.run,
                group.ordinal,
                *version_range(group),
                len(group.samples),
                statistics.fmean(rewards) if rewards else None,
                statistics.stdev(rewards) if len(rewards) > 1 else None,
                segment,
                offset,
                len(frame.payload),
                frame.digest,
                encode_summary(summarise(group, None)),
                frame.payload if segment is None else None,
            ),
        )
