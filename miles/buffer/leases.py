"""Who may collect which prompt: credit, leases, expiry, and the one way in for a finished group.

A prompt goes pending -> leased -> done -> placed (in a manifest) -> trained, or ends as dropped. A prompt is issued only while the issued groups that
stand in no manifest are fewer than (version + S + 1 - next step) * groups_per_step. With full manifests that says: issued
but untrained groups stay below (S + 1) * groups_per_step. A manifest that was closed short counts as a full one, because
every manifest uses up one version, however few groups it holds.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from miles.buffer.callers import Call, Callers
from miles.buffer.database import Row
from miles.buffer.payloads import Place
from miles.buffer.record import Record
from miles.buffer.settings import LedgerSettings
from miles.buffer.store import Store, decode_summary, encode_summary
from miles.buffer.stream import PromptStream
from miles.errors import DiskFull, ExperienceError, GroupRefused, LeaseLost
from miles.types import Lease

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
REPEATED = "repeated_prompt"
LEASE = "ordinal, lease_id, lease_expires, min_version"
FEWEST_REFUSED = 20
MOST_KEPT_REFUSED = 100
MOST_KEPT_BYTES = 64 << 10
MOST_DETAIL = 2000
DEAD = "dead"
OPEN = "('pending', 'leased', 'done')"
IN_STATES = "run = ? AND ordinal IN (SELECT ordinal FROM prompt WHERE run = ? AND state {})"
"""Prompts by their state, which the index alone tells: what it costs does not grow with the history of the run."""


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
        self.callers = Callers(store, clock)

    def places(self) -> int:
        """Ordinals outside of manifests that may be under way or done, by the bound on staleness."""
        state = self.store.state()
        steps = state.weight_version + self.settings.max_staleness + 1 - state.next_step
        return max(steps, 0) * self.settings.groups_per_step

    def open_prompts(self) -> Sequence[Row]:
        """Issued ordinals that are neither dropped nor in a manifest, in order."""
        where = IN_STATES.format(f"IN {OPEN}")
        return self.store.all(f"SELECT ordinal, row, state FROM prompt WHERE {where} ORDER BY ordinal", self.store.run)

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
        state = self.store.state()
        return (
            self.store.value("SELECT count(*) FROM prompt WHERE run = ? AND state IN ('done', 'placed')"),
            self.store.value(
                "SELECT count(*) FROM dropped WHERE run = ? AND step = ? AND epoch = ?", state.next_step, state.epoch
            ),
        )

    def at_drop_limit(self) -> bool:
        """True when the step that is being filled has seen its `drop_limit` of dropped groups."""
        return self.progress()[1] >= self.settings.drop_limit

    def waiting(self) -> int:
        """Ordinals that `lease` would hand out now: given-back ones and new ones."""
        return 0 if self._closed() else len(self.given_back()) + self.room()

    def is_poisoned(self) -> bool:
        """True when so many groups were refused that the run must not go on."""
        state = self.store.state()
        return state.refused >= FEWEST_REFUSED and state.refused > self.settings.max_refused * (
            state.refused + state.stored
        )

    def is_over(self) -> bool:
        """True when no lease will be given any more, unless the learner rewinds."""
        state = self.store.state()
        if state.ended is not None or self.is_poisoned():
            return True
        return state.next_ordinal == self.stream.length and not any(
            row["state"] in ("pending", "leased") for row in self.open_prompts()
        )

    def _closed(self) -> bool:
        return self.at_drop_limit() or self.store.state().ended is not None or self.is_poisoned()

    def check_disk(self) -> None:
        """Raises DiskFull below the floor that keeps room for the ledger's own small writes and for checkpoints."""
        free, floor = self.store.payloads.free_bytes(), self.settings.min_free_bytes
        if free is not None and free < floor:
            raise DiskFull(
                f"the disk of the ledger {self.store.name} has {free >> 20} MiB left, less than buffer.min_free_mb = "
                f"{floor >> 20}: free space, and collecting goes on by itself"
            )

    def lease(self, n: int, worker: str, ttl: float, call: Call | None = None) -> list[Lease]:
        """Up to n ordinals for `ttl` seconds, given-back ones first, each list in order.

        A `call` that is made again gets the leases of the first time. Raises ExperienceError and DiskFull.
        """
        checked_name(worker, "worker")
        if n < 0 or not (ttl > 0 and math.isfinite(ttl)):
            raise ExperienceError(
                f"lease(n={n}, ttl={ttl}): n must not be negative and ttl a positive number of seconds"
            )
        self.check_disk()
        self.expire()
        if call is not None and not self.callers.is_new(call):
            return self._leased_by(call)
        if self._closed():
            return []
        ordinals = self.given_back()[:n]
        ordinals += self._issue(min(n - len(ordinals), self.room()))
        now, version = self.clock(), self.store.state().weight_version
        expires = now + ttl
        leases = [Lease(ordinal, uuid.uuid4().hex, expires, version) for ordinal in ordinals]
        key = None if call is None else call.key
        self.store.db.executemany(
            "UPDATE prompt SET state = 'leased', lease_id = ?, worker = ?, call = ?, lease_expires = ?, lease_ttl = ?, "
            "min_version = ?, attempts = attempts + 1, leased = ?, finished = NULL WHERE run = ? AND ordinal = ?",
            [(each.lease_id, worker, key, expires, ttl, version, now, self.store.run, each.ordinal) for each in leases],
        )
        if leases and call is not None:
            self.callers.note(call)
        return leases

    def _leased_by(self, call: Call) -> list[Lease]:
        where = IN_STATES.format("= 'leased'")
        rows = self.store.all(
            f"SELECT {LEASE} FROM prompt WHERE {where} AND call = ? ORDER BY ordinal", self.store.run, call.key
        )
        return [Lease(*row) for row in rows]

    def _issue(self, n: int) -> list[int]:
        first = self.store.state().next_ordinal
        ordinals = list(range(first, first + n))
        self.store.db.executemany(
            "INSERT INTO prompt (run, ordinal, row, state, attempts) VALUES (?, ?, ?, 'pending', 0)",
            [(self.store.run, ordinal, self.stream.at(ordinal).row) for ordinal in ordinals],
        )
        self.store.set(next_ordinal=first + n)
        return ordinals

    def expire(self) -> None:
        """Take back leases that ran out; a prompt whose last try ran out is dropped as dead."""
        where = IN_STATES.format("= 'leased'")
        rows = self.store.all(
            f"SELECT ordinal, attempts, worker FROM prompt WHERE {where} AND lease_expires < ?",
            self.store.run,
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

    def put(self, lease: Lease, record: Record) -> bool:
        """Store a group; False where it is stored already. Raises LeaseLost, GroupRefused and DiskFull."""
        row = self._prompt(lease.ordinal)
        if row is not None and self._stored_before(row, lease, record):
            return False
        row = self._held(lease)
        self._check(lease, record, row)
        self.check_disk()
        self._insert(record)
        self.store.db.execute(
            "UPDATE prompt SET state = 'done', finished = ? WHERE run = ? AND ordinal = ?",
            (self.clock(), self.store.run, record.ordinal),
        )
        self.store.set(stored=self.store.state().stored + 1)
        return True

    def drop(self, lease: Lease, reason: str, record: Record | None) -> None:
        """Give up on an ordinal. `reason`: a name, or `name: what happened`. Raises LeaseLost and GroupRefused."""
        name, _, detail = reason.partition(":")
        checked_name(name, "the reason")
        row = self._prompt(lease.ordinal)
        if row is not None and row["state"] == "dropped" and row["lease_id"] == lease.lease_id:
            return
        self._held(lease)
        self._check_ordinal(lease, record)
        # What makes a group unfit to train on may be why it is dropped, so it is not looked at here.
        if record is not None and self.settings.keep_dropped:
            self._insert(record)
        summary = None if record is None else encode_summary(replace(decode_summary(record.summary), reason=name))
        self.discard(lease.ordinal, name, _plain(detail.strip()) or None, summary)

    def quarantine(self, lease: Lease, refused: GroupRefused, digest: str, payload: bytes | None) -> None:
        """Note a group that was refused; the lease stays with its holder. Content that came before counts once."""
        row = self._prompt(lease.ordinal)
        if row is None or row["state"] != "leased" or row["lease_id"] != lease.lease_id:
            return
        known = "SELECT count(*) FROM quarantine WHERE run = ? AND lease_id = ? AND hash = ?"
        if self.store.value(known, lease.lease_id, digest):
            return
        state = self.store.state()
        kept = payload if payload is not None and state.refused < MOST_KEPT_REFUSED else None
        self.store.db.execute(
            "INSERT INTO quarantine VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                self.store.run, lease.lease_id, digest, self.clock(), lease.ordinal, row["worker"], refused.reason,
                _plain(str(refused)), None if kept is None else kept[:MOST_KEPT_BYTES],
            ),
        )  # fmt: skip
        self.store.set(refused=state.refused + 1)

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

    def release_worker(self, worker: str) -> int:
        """As `release_all`, of one worker."""
        checked_name(worker, "worker")
        return self._give_back("state = 'leased' AND worker = ?", worker)

    def discard(self, ordinal: int, reason: str, detail: str | None = None, summary: str | None = None) -> None:
        """Drop an ordinal, counted in the step that is being filled."""
        state = self.store.state()
        self.store.db.execute(
            "INSERT INTO dropped VALUES (?, ?, ?, ?, ?, ?, ?)",
            (self.store.run, state.epoch, ordinal, state.next_step, reason, detail, summary),
        )
        self.store.db.execute(
            "UPDATE prompt SET state = 'dropped', step = ?, finished = coalesce(finished, ?) WHERE run = ? AND ordinal = ?",
            (state.next_step, self.clock(), self.store.run, ordinal),
        )

    def _give_back(self, condition: str, *values: int) -> int:
        return self.store.db.execute(
            f"UPDATE prompt SET state = 'pending', attempts = attempts - 1 WHERE run = ? AND {condition}",
            (self.store.run, *values),
        )

    def _set_state(self, ordinal: int, state: str) -> None:
        self.store.db.execute(
            "UPDATE prompt SET state = ? WHERE run = ? AND ordinal = ?", (state, self.store.run, ordinal)
        )

    def _prompt(self, ordinal: int) -> Row | None:
        return self.store.one("SELECT * FROM prompt WHERE run = ? AND ordinal = ?", ordinal)

    def _held(self, lease: Lease) -> Row:
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

    def _stored_before(self, row: Row, lease: Lease, record: Record) -> bool:
        """True for the same content again. Raises GroupRefused for other content under the lease that finished it."""
        if row["state"] == "dropped":
            reason = self.store.value(
                "SELECT reason FROM dropped WHERE run = ? AND ordinal = ? ORDER BY epoch DESC", lease.ordinal
            )
            if reason != REPEATED:
                return False
        elif row["state"] not in ("done", "placed", "trained"):
            return False
        found = self.store.one("SELECT hash FROM grp WHERE run = ? AND ordinal = ?", lease.ordinal)
        stored = "" if found is None else found["hash"]  # a restored ledger has lost the groups that were trained
        if stored == record.digest:
            return True
        if row["lease_id"] == lease.lease_id:
            raise GroupRefused(
                f"ordinal {lease.ordinal} is finished with the content {stored[:16]} and cannot become "
                f"{record.digest[:16]}: a finished group never changes",
                "conflict",
            )
        return False

    def _check_ordinal(self, lease: Lease, record: Record | None) -> None:
        if record is not None and record.ordinal != lease.ordinal:
            raise GroupRefused(
                f"the lease is for ordinal {lease.ordinal}, the group is of ordinal {record.ordinal}", "ordinal"
            )

    def _check(self, lease: Lease, record: Record, row: Row) -> None:
        """What only the ledger knows of a group. Raises GroupRefused."""
        self._check_ordinal(lease, record)
        version, where = self.store.state().weight_version, f"ordinal {record.ordinal}"
        oldest, newest = record.version_min, record.version_max
        if record.row != row["row"]:
            raise GroupRefused(
                f"{where} stands for row {row['row']} of the data, the group says row {record.row}", "row"
            )
        if newest > version:
            raise GroupRefused(
                f"{where}: tokens of version {newest}, but the newest version is {version}", "future_version"
            )
        if oldest < row["min_version"]:
            raise GroupRefused(
                f"{where}: tokens of version {oldest}, older than {row['min_version']}, the lease's min_version: "
                "sample it again with newer weights",
                "old_version",
            )
        if self.settings.group_size is not None and record.n != self.settings.group_size:
            raise GroupRefused(
                f"{where}: {record.n} samples, but rollout.group_size is {self.settings.group_size}: fill the "
                "group up, or drop all of it",
                "group_size",
            )

    def _insert(self, record: Record) -> None:
        place, payload = Place(object=record.object), record.payload
        if payload is not None and record.length >= self.settings.inline_bytes and not self.store.db.shared:
            place, payload = (
                self.store.payloads.append(payload, self.store.name_of(record.ordinal, record.digest)),
                None,
            )
        self.store.db.execute(
            "INSERT INTO grp VALUES (?, ?, ?, ?, ?, ?, ?, NULL, ?, ?, ?, ?, ?, ?, ?)",
            (
                self.store.run, record.ordinal, record.version_min, record.version_max, record.n, record.reward_mean,
                record.reward_std, place.segment, place.offset, place.object, record.length, record.digest,
                record.summary, payload,
            ),
        )  # fmt: skip


def _plain(text: str) -> str:
    """Words of others as every database takes them, and no more of them than anyone reads."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")[:MOST_DETAIL]
