"""The experience ledger: a durable store of prompts, leases, groups and manifests.

It knows nothing of engines, models or networks, and every call is synchronous and durable when it returns. Any number of
threads may call it. The embedded buffer puts the sink and source protocols around it, the service HTTP.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from miles.buffer import reading, snapshot
from miles.buffer.backend import ON_THIS_MACHINE, Backend, Where, open_backend, open_readonly
from miles.buffer.callers import Call
from miles.buffer.leases import Leases, checked_name
from miles.buffer.manifests import Manifests
from miles.buffer.record import Record, record_of
from miles.buffer.rewinding import Rewinding, RewindMode
from miles.buffer.settings import LedgerSettings
from miles.buffer.store import Store
from miles.buffer.stream import PromptStream
from miles.buffer.wire import Frame, digest_of, encode_group
from miles.errors import ExperienceError, GroupRefused, RunDirError
from miles.types import Collected, FinishedGroup, Group, Lease

DEFAULT_RUN = "local"
CONFLICT = "conflict"
_setup_decoder = msgspec.json.Decoder(tuple[LedgerSettings, dict[str, Any]])


class LedgerReader:
    """Reads a ledger, also one that another process is writing, or that of a dead run."""

    def __init__(self, run_dir: Path, run: str = DEFAULT_RUN, where: Where = ON_THIS_MACHINE) -> None:
        """Raises RunDirError where the directory holds no ledger, or none of this run; ExperienceError where it is damaged."""
        self._backend = open_readonly(Path(run_dir), where)
        self._store = Store(self._backend.db, self._backend.payloads, run)
        try:
            with self._store.reading():
                found = self._store.one("SELECT id FROM run WHERE id = ?") is not None
            if not found:
                raise RunDirError(f"{self._store.name} holds no run named {run!r}")
        except BaseException:
            self._backend.close()
            raise

    def identity(self) -> dict[str, Any]:
        """What makes this run this run, as the ledger was opened with; see `Ledger`."""
        with self._store.reading():
            return msgspec.json.decode(self._store.value("SELECT identity FROM run WHERE id = ?"))

    def facts(self) -> dict[str, Any]:
        """What was to be remembered when the ledger was made."""
        with self._store.reading():
            return msgspec.json.decode(self._store.value("SELECT facts FROM run WHERE id = ?"))

    def frame(self, ordinal: int) -> Frame:
        """The stored bytes of a group and their hash, as they are. Raises ExperienceError."""
        with self._store.reading():
            return self._store.payload(ordinal)

    def located(self, ordinal: int) -> tuple[Frame | None, str | None, str, int]:
        """A group's bytes, or the object in the store that holds them; their hash and length. Raises ExperienceError."""
        with self._store.reading():
            return self._store.located(ordinal)

    def entries(self, version: int) -> list[tuple[int, str]]:
        """(ordinal, SHA-256 of the group) of a manifest, in its order; empty where it does not exist yet."""
        with self._store.reading():
            return [(row["ordinal"], row["hash"]) for row in reading.entries(self._store, version)]

    def short(self, version: int) -> str | None:
        """Why the manifest of `version` holds fewer groups than a step asks for; None where it is full, or not made yet."""
        with self._store.reading():
            row = reading.step_row(self._store, version)
            return None if row is None else row["short"]

    def manifest(self, version: int) -> list[int]:
        """The ordinals that step `version` trains on, in order; empty where the manifest does not exist yet."""
        with self._store.reading():
            return reading.manifest(self._store, version)

    def groups(self, version: int) -> list[Group]:
        """The groups of a stored manifest, in order. Raises ExperienceError where there is none."""
        with self._store.reading():
            ordinals = reading.manifest(self._store, version)
            if not ordinals:
                raise ExperienceError(f"the ledger {self._store.name} has no manifest for version {version}")
            return [self._store.group(ordinal) for ordinal in ordinals]

    def group(self, ordinal: int) -> Group:
        """One finished group, trained or not; of a dropped one where its samples were kept. Raises ExperienceError."""
        with self._store.reading():
            return self._store.group(ordinal)

    def finished(self, version: int) -> list[FinishedGroup]:
        """Summaries of the step's trained and dropped groups, in ordinal order."""
        with self._store.reading():
            return reading.finished(self._store, version)

    def collected(self, version: int) -> list[Collected]:
        """Who collected the step's trained and dropped groups and when, in ordinal order."""
        with self._store.reading():
            return reading.collected(self._store, version)

    def stats(self) -> reading.Stats:
        """Where the run's groups are, drops by reason, staleness of each step."""
        with self._store.reading():
            return reading.stats(self._store)

    def events(self) -> list[reading.Event]:
        """What happened to the ledger, in order."""
        with self._store.reading():
            return reading.events(self._store)

    def gauges(self) -> dict[str, int]:
        """Numbers for monitoring, which cost the same however long the run is."""
        with self._store.reading():
            return reading.gauges(self._store)

    def snapshot(self) -> Iterator[bytes]:
        """The ledger without its groups, piece by piece: what a checkpoint keeps of it."""
        with self._store.reading():
            yield from snapshot.chunks(self._store)

    def verify(self) -> int:
        """Check the chain of manifests and the bytes of every group kept; the number of steps. Raises ExperienceError."""
        with self._store.reading():
            steps = reading.verify(self._store)
            for step in range(self._store.state().kept_from, steps):
                for ordinal in reading.manifest(self._store, step):
                    self._store.group(ordinal)
            return steps

    def close(self) -> None:
        self._backend.close()


class Ledger(LedgerReader):
    """The one writer of a run's ledger. A call that has returned is durable."""

    def __init__(
        self,
        run_dir: Path,
        settings: LedgerSettings,
        stream: PromptStream,
        identity: Mapping[str, Any],
        *,
        resume: bool = False,
        run: str = DEFAULT_RUN,
        where: Where = ON_THIS_MACHINE,
        facts: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the ledger of `run_dir`, or make it.

        `facts`: plain values to remember where this call makes it.

        `identity` says what makes this run this run (hashes of the resolved recipe, of the data; plain JSON values); the
        numbers of the stream and of the manifests are added to it. `clock` gives seconds since the epoch.

        Raises RunDirError where the directory holds a run and `resume` is False, where it holds another run, is in use, or is
        no place for a ledger; ExperienceError where the disk fails.
        """
        checked_name(run, "the run's name")
        self._open(open_backend(Path(run_dir), where), run, settings, stream, clock)
        try:
            self._claim(_identity(settings, stream, identity), resume, Path(run_dir), facts or {})
        except BaseException:
            self.close()
            raise

    @classmethod
    def stored(cls, run_dir: Path, run: str, where: Where, clock: Callable[[], float] = time.time) -> Ledger:
        """Open a ledger as it was made, for a server that starts again. Raises RunDirError where there is none."""
        checked_name(run, "the run's name")
        self = cls.__new__(cls)
        backend = open_backend(Path(run_dir), where)
        try:
            row = Store(backend.db, backend.payloads, run).one("SELECT setup FROM run WHERE id = ?")
            if row is None:
                raise RunDirError(f"{backend.db.name} holds no run named {run!r}")
            settings, stream = _setup_decoder.decode(row["setup"])
            self._open(backend, run, settings, PromptStream(**stream), clock)
        except BaseException:
            backend.close()
            raise
        return self

    def rejoin(self, settings: LedgerSettings, stream: PromptStream, identity: Mapping[str, Any], folder: Path) -> None:
        """Go on with new settings, while others use the ledger. Raises RunDirError where that would be another run."""
        before = self.settings, self.stream
        self._work_by(settings, stream)
        try:
            self._claim(_identity(settings, stream, identity), True, folder, {})
        except BaseException:
            self._work_by(*before)
            raise

    def _open(
        self, backend: Backend, run: str, settings: LedgerSettings, stream: PromptStream, clock: Callable[[], float]
    ) -> None:
        self._backend = backend
        self._store = Store(backend.db, backend.payloads, run)
        self._clock = clock
        self._work_by(settings, stream)

    def _work_by(self, settings: LedgerSettings, stream: PromptStream) -> None:
        self.settings = settings
        self.stream = stream
        self._leases = Leases(self._store, settings, stream, self._clock)
        self._manifests = Manifests(self._leases, self._clock)
        self._rewinding = Rewinding(self._leases, self._clock)

    def _claim(self, identity: dict[str, Any], resume: bool, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write the run's row, or compare with the one that is there."""
        text = msgspec.json.encode(identity, order="deterministic").decode()
        there = self._store.write(lambda: self._claimed(text, msgspec.json.encode(facts).decode()))
        if there is None:
            return
        if not resume:
            raise RunDirError(
                f"{folder} already holds a run: continue it with --resume, or choose another directory with --run"
            )
        if there != text:
            raise RunDirError(
                f"{folder} holds another run: {_difference(msgspec.json.decode(there), msgspec.json.decode(text))}. "
                f"Continue it with the recipe in {folder / 'config.toml'} and the same data, or choose another directory with "
                "--run"
            )
        self._store.write(lambda: self._store.set(setup=self._setup()))

    def _claimed(self, identity: str, facts: str) -> str | None:
        """The identity of the run that is there, or None where this one has been written now."""
        row = self._store.one("SELECT identity FROM run WHERE id = ?")
        if row is not None:
            return row["identity"]
        config_hash = hashlib.sha256(identity.encode()).hexdigest()
        self._store.db.execute(
            "INSERT INTO run VALUES (?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, 0, 0, NULL, 0, 0, NULL, ?)",
            (
                self._store.run, config_hash, identity, self._setup(), facts, self.settings.max_staleness,
                self.settings.groups_per_step, self._clock(),
            ),
        )  # fmt: skip
        self._store.event(self._clock(), "created", {})
        return None

    def _setup(self) -> str:
        return msgspec.json.encode([asdict(self.settings), self.stream.arguments()]).decode()

    # --- collectors ---

    def waiting(self) -> int:
        """Ordinals that `lease` would hand out now, leases that ran out aside."""
        with self._store.reading():
            return self._leases.waiting()

    def progress(self) -> tuple[int, int]:
        """Finished groups that are not trained yet, and dropped ones of the step that is being filled."""
        with self._store.reading():
            return self._leases.progress()

    def lease(self, n: int, worker: str, ttl: float, call: Call | None = None) -> list[Lease]:
        """Up to n ordinals for `ttl` seconds; none while credit is used up, at the drop limit, or after the stream's end.

        A `call` that is made again gets the leases of the first time. Raises DiskFull while the disk is below its floor.
        """
        return self._store.write(lambda: self._leases.lease(n, worker, ttl, call))

    def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """The leases that are still held, each with a new expiry."""
        return self._store.write(lambda: self._leases.renew(leases))

    def put(self, lease: Lease, group: Group) -> bool:
        """Store a finished group; False where the same group was stored before.

        Raises LeaseLost, DiskFull, and GroupRefused for a group that cannot be trained on; that is noted in the quarantine.
        """
        try:
            frame = encode_group(group, self.settings.vocabulary)
        except GroupRefused as refused:
            self.quarantine(lease, refused, repr(group).encode())
            raise
        return self.put_record(lease, record_of(group, frame))

    def put_record(self, lease: Lease, record: Record) -> bool:
        """As `put`, of a group that was checked and encoded already."""
        record = self._stored_apart(record)
        try:
            return self._store.write(lambda: self._leases.put(lease, record))
        except GroupRefused as refused:
            if refused.reason != CONFLICT:
                self.quarantine(lease, refused, record.payload or b"", record.digest)
            raise

    def _stored_apart(self, record: Record) -> Record:
        """A large group goes to the object store, where there is one, before anyone waits for the ledger."""
        payloads, payload = self._store.payloads, record.payload
        if payload is None or not payloads.shared or record.length < self.settings.inline_bytes:
            return record
        place = payloads.append(payload, self._store.name_of(record.ordinal, record.digest))
        return replace(record, payload=None, object=place.object)

    def put_stored(self, lease: Lease, record: Record) -> bool:
        """As `put_record`, of a group whose bytes its collector has put into the object store. Raises GroupRefused too
        where they are not there in the length that is said."""
        name = self._store.name_of(record.ordinal, record.digest)
        size = self._store.payloads.size_of(name)
        if record.payload is not None or record.object is None or size != record.length:
            raise GroupRefused(
                f"ordinal {record.ordinal}: the object store holds {size} bytes as {name}, the record says {record.length}",
                "object",
            )
        return self.put_record(lease, replace(record, object=self._store.payloads.place_of(name)))

    @property
    def shared(self) -> bool:
        """Whether other processes may write this run."""
        return self._store.db.shared

    def quarantine(self, lease: Lease, refused: GroupRefused, content: bytes, digest: str | None = None) -> None:
        """Note that a holder of a lease brought something that cannot be trained on."""
        digest = digest_of(content) if digest is None else digest
        self._store.write(lambda: self._leases.quarantine(lease, refused, digest, content))

    def drop(self, lease: Lease, reason: str, group: Group | None = None) -> None:
        """Give up on an ordinal for good. `reason`: a name, or `name: what happened`. Raises LeaseLost and GroupRefused."""
        record = None if group is None else record_of(group, encode_group(group, self.settings.vocabulary))
        self.drop_record(lease, reason, record)

    def drop_record(self, lease: Lease, reason: str, record: Record | None) -> None:
        """As `drop`, of a group that was checked and encoded already."""
        if record is not None and self.settings.keep_dropped:
            record = self._stored_apart(record)
        self._store.write(lambda: self._leases.drop(lease, reason, record))

    def release(self, lease: Lease) -> None:
        """Give an ordinal back, to be leased again; the try does not count. Raises LeaseLost."""
        self._store.write(lambda: self._leases.release(lease))

    def release_all(self) -> int:
        """Give back every lease, where it is known that nobody holds one any more; the number of them."""
        return self._store.write(self._leases.release_all)

    def release_worker(self, worker: str) -> int:
        """Give back what a worker holds that is known to have died; the number of leases."""
        return self._store.write(lambda: self._leases.release_worker(worker))

    def is_over(self) -> bool:
        """True when no lease will be given any more, unless the learner rewinds."""
        with self._store.reading():
            return self._leases.is_over()

    # --- learner: `session` names it where several may call; None is the process that has the ledger open ---

    def create(self, version: int, session: str | None = None) -> list[int]:
        """The ordinals of the manifest of `version`, made now if it can be; empty while an earlier ordinal is still open.

        Raises ExperienceError for a version whose turn it is not, BufferClosed after the stream's end, NothingToTrain and
        PoisonedData; LearnerFenced where another learner holds the run.
        """
        ordinals = self._store.write(lambda: self._create(version, session))
        if not ordinals:
            with self._store.reading():
                self._manifests.raise_if_over()
        return ordinals

    def _create(self, version: int, session: str | None) -> list[int]:
        self._leases.callers.check_learner(session)
        self._manifests.check_version(version)
        return reading.manifest(self._store, version) or self._manifests.create(version)

    def check_version(self, version: int) -> None:
        """Raises ExperienceError where `version` is neither stored nor the one to be made next."""
        with self._store.reading():
            self._manifests.check_version(version)

    def advance(self, version: int, session: str | None = None) -> None:
        """The learner holds `version`: the groups of the manifest before it are trained and their credit is free."""

        def work() -> None:
            self._leases.callers.check_learner(session)
            self._manifests.advance(version)

        self._store.write(work)

    def commit(self, version: int, checkpoint: str | Path, session: str | None = None) -> None:
        """`checkpoint` at `version` is the oldest one kept. With `buffer.keep` = "checkpoints" groups below it are deleted."""

        def work() -> None:
            self._leases.callers.check_learner(session)
            self._rewinding.commit(version, Path(checkpoint).name)

        self._store.write(work)
        if self.settings.keep == "checkpoints":
            self._store.write(self._rewinding.tidy)

    def rewind(self, version: int, mode: RewindMode = "replay", call: Call | None = None) -> None:
        """The learner starts again from `version`; see `Rewinding.rewind` for the modes.

        The session of `call` holds the run from then on, and whoever held it before is fenced off.
        """

        def work() -> None:
            if call is None or self._leases.callers.take_over(call):
                self._rewinding.rewind(version, mode)

        self._store.write(work)

    def end(self, reason: str, session: str | None = None) -> None:
        """Nothing more is leased, until a rewind; `reason` is what collectors are told."""

        def work() -> None:
            self._leases.callers.check_learner(session)
            self._rewinding.end(reason)

        self._store.write(work)


def has_run(run_dir: Path, run: str, where: Where) -> bool:
    """Whether there is a ledger with this run."""
    try:
        LedgerReader(run_dir, run, where).close()
    except RunDirError:
        return False
    return True


def restore(run_dir: Path, source: Path | bytes, run: str = DEFAULT_RUN, where: Where = ON_THIS_MACHINE) -> None:
    """Make a lost ledger again from the snapshot of a checkpoint, which the learner then rewinds to with "resample".

    Raises RunDirError where there is a run already, ExperienceError where the snapshot was altered.
    """
    checked_name(run, "the run's name")
    backend = open_backend(Path(run_dir), where)
    store = Store(backend.db, backend.payloads, run)

    def work() -> None:
        if store.one("SELECT id FROM run WHERE id = ?") is not None:
            raise RunDirError(f"{store.name} holds the run {run!r} already: a snapshot is for a ledger that was lost")
        with snapshot.as_file(source) as file:
            snapshot.load(store, file)
        store.set(kept_from=store.state().next_step)
        store.event(time.time(), "restored", {"weight_version": store.state().weight_version})

    try:
        store.write(work)
    finally:
        backend.close()


def _identity(settings: LedgerSettings, stream: PromptStream, identity: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **identity,
        "algorithm.groups_per_step": settings.groups_per_step,
        "buffer.max_staleness": settings.max_staleness,
        "data.epochs": stream.epochs,
        "data.shuffle": stream.shuffle,
        "rows of the data": stream.num_rows,
        "run.seed": stream.seed,
    }


def _difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    keys = [key for key in sorted({*there, *here}) if there.get(key) != here.get(key)]
    return "; ".join(f"{key} is {there.get(key)!r} there and {here.get(key)!r} here" for key in keys)
