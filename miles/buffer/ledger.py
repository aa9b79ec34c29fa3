"""The experience ledger: a durable store of prompts, leases, groups and manifests in the run directory.

It knows nothing of engines, models or networks, and every call is synchronous and durable when it returns. The embedded
buffer puts the sink and source protocols around it.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from miles.buffer import reading
from miles.buffer.leases import Leases, checked_name
from miles.buffer.manifests import Manifests
from miles.buffer.place import RunLock, refuse_network_file_system
from miles.buffer.schema import LEDGER_NAME, SEGMENTS_NAME, connect, connect_readonly
from miles.buffer.segments import Segments, fsync_folder
from miles.buffer.store import LedgerSettings, Store
from miles.buffer.stream import PromptStream
from miles.buffer.wire import encode_group
from miles.errors import ExperienceError, RunDirError
from miles.types import FinishedGroup, Group, Lease

DEFAULT_RUN = "local"


class LedgerReader:
    """Reads a ledger, also one that another process is writing, or that of a dead run."""

    def __init__(self, run_dir: Path, run: str = DEFAULT_RUN) -> None:
        """Raises RunDirError where the directory holds no ledger, or none of this run; ExperienceError where it is damaged."""
        path = Path(run_dir) / LEDGER_NAME
        store = Store(_opened(connect_readonly, path), path, Segments(path.parent / SEGMENTS_NAME), run)
        self._store = store
        try:
            with store.reading():
                found = store.one("SELECT id FROM run WHERE id = ?") is not None
            if not found:
                raise RunDirError(f"{path} holds no run named {run!r}")
        except BaseException:
            store.db.close()
            raise

    def identity(self) -> dict[str, Any]:
        """What makes this run this run, as the ledger was opened with; see `Ledger`."""
        with self._store.reading():
            return msgspec.json.decode(self._store.value("SELECT identity FROM run WHERE id = ?"))

    def short(self, version: int) -> str | None:
        """Why the manifest of `version` holds fewer groups than a step asks for; None where it is full, or not made yet."""
        with self._store.reading():
            row = self._store.one("SELECT short FROM step WHERE run = ? AND step = ?", version)
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
                raise ExperienceError(f"the ledger {self._store.path} has no manifest for version {version}")
            return [self._store.group(ordinal) for ordinal in ordinals]

    def group(self, ordinal: int) -> Group:
        """One finished group, trained or not; of a dropped one where its samples were kept. Raises ExperienceError."""
        with self._store.reading():
            return self._store.group(ordinal)

    def finished(self, version: int) -> list[FinishedGroup]:
        """Summaries of the step's trained and dropped groups, in ordinal order."""
        with self._store.reading():
            return reading.finished(self._store, version)

    def stats(self) -> reading.Stats:
        """Where the run's groups are, drops by reason, staleness of each step."""
        with self._store.reading():
            return reading.stats(self._store)

    def events(self) -> list[reading.Event]:
        """What happened to the ledger, in order."""
        with self._store.reading():
            return reading.events(self._store)

    def verify(self) -> int:
        """Check the chain of manifests and the bytes of every group in it; the number of steps. Raises ExperienceError."""
        with self._store.reading():
            steps = reading.verify(self._store)
            for step in range(steps):
                for ordinal in reading.manifest(self._store, step):
                    self._store.group(ordinal)
            return steps

    def close(self) -> None:
        self._store.db.close()
        self._store.segments.close()


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
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the ledger of `run_dir`, or make it.

        `identity` says what makes this run this run (hashes of the resolved recipe, of the data; plain JSON values); the
        numbers of the stream and of the manifests are added to it. `clock` gives seconds since the epoch.

        Raises RunDirError where the directory holds a run and `resume` is False, where it holds another run, is in use, or is
        no place for a ledger; ExperienceError where the disk fails.
        """
        checked_name(run, "the run's name")
        folder = Path(run_dir)
        refuse_network_file_system(folder)
        path = folder / LEDGER_NAME
        self._lock = RunLock(folder)
        try:
            store = Store(_opened(_connect, path), path, Segments(folder / SEGMENTS_NAME, settings.segment_bytes), run)
        except BaseException:
            self._lock.release()
            raise
        self._store = store
        self.settings = settings
        self.stream = stream
        self._leases = Leases(store, settings, stream, clock)
        self._manifests = Manifests(self._leases, clock)
        try:
            self._claim(_identity(settings, stream, identity), resume, clock())
        except BaseException:
            self.close()
            raise

    def _claim(self, identity: dict[str, Any], resume: bool, now: float) -> None:
        """Write the run's row, or compare with the one that is there."""
        text = msgspec.json.encode(identity, order="deterministic").decode()
        store, settings = self._store, self.settings
        with store.transaction():
            row = store.one("SELECT identity FROM run WHERE id = ?")
            if row is None:
                config_hash = hashlib.sha256(text.encode()).hexdigest()
                store.db.execute(
                    "INSERT INTO run VALUES (?, ?, ?, ?, ?, 0, 0, 0, 0, ?)",
                    (store.run, config_hash, text, settings.max_staleness, settings.groups_per_step, now),
                )
                store.event(now, "created", {})
                return
        folder = store.path.parent
        if not resume:
            raise RunDirError(
                f"{folder} already holds a run: continue it with --resume, or choose another directory with --run"
            )
        if row["identity"] != text:
            raise RunDirError(
                f"{folder} holds another run: {_difference(msgspec.json.decode(row['identity']), msgspec.json.decode(text))}. "
                f"Continue it with the recipe in {folder / 'config.toml'} and the same data, or choose another directory with "
                "--run"
            )

    # --- collectors ---

    def waiting(self) -> int:
        """Ordinals that `lease` would hand out now, leases that ran out aside."""
        with self._store.reading():
            return self._leases.waiting()

    def progress(self) -> tuple[int, int]:
        """Finished groups that are not trained yet, and dropped ones of the step that is being filled."""
        with self._store.reading():
            return self._leases.progress()

    def lease(self, n: int, worker: str, ttl: float) -> list[Lease]:
        """Up to n ordinals for `ttl` seconds; none while credit is used up, at the drop limit, or after the stream's end."""
        with self._store.transaction():
            return self._leases.lease(n, worker, ttl)

    def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """The leases that are still held, each with a new expiry."""
        with self._store.transaction():
            return self._leases.renew(leases)

    def put(self, lease: Lease, group: Group) -> bool:
        """Store a finished group; False where the same group was stored before. Raises LeaseLost and GroupRefused."""
        return self.put_many([(lease, group)])[0]

    def put_many(self, items: Sequence[tuple[Lease, Group]]) -> list[bool]:
        """Store several groups with one sync of the disk: all of them, or none and an error. Otherwise as `put`."""
        frames = [encode_group(group, self.settings.vocabulary) for _, group in items]
        with self._store.transaction():
            new = [self._leases.put(lease, group, frame) for (lease, group), frame in zip(items, frames, strict=True)]
            self._store.segments.sync()
            return new

    def drop(self, lease: Lease, reason: str, group: Group | None = None) -> None:
        """Give up on an ordinal for good. `reason`: a name, or `name: what happened`. Raises LeaseLost and GroupRefused."""
        frame = None if group is None else encode_group(group, self.settings.vocabulary)
        with self._store.transaction():
            self._leases.drop(lease, reason, group, frame)
            self._store.segments.sync()

    def release(self, lease: Lease) -> None:
        """Give an ordinal back, to be leased again; the try does not count. Raises LeaseLost."""
        with self._store.transaction():
            self._leases.release(lease)

    def release_all(self) -> int:
        """Give back every lease, where it is known that nobody holds one any more; the number of them."""
        with self._store.transaction():
            return self._leases.release_all()

    # --- learner ---

    def create(self, version: int) -> list[int]:
        """The ordinals of the manifest of `version`, made now if it can be; empty while an earlier ordinal is still open.

        Raises ExperienceError for a version whose turn it is not, BufferClosed after the stream's end, and NothingToTrain.
        """
        with self._store.transaction():
            self._manifests.check_version(version)
            ordinals = reading.manifest(self._store, version) or self._manifests.create(version)
        if not ordinals:
            with self._store.reading():
                self._manifests.raise_if_over()
        return ordinals

    def check_version(self, version: int) -> None:
        """Raises ExperienceError where `version` is neither stored nor the one to be made next."""
        with self._store.reading():
            self._manifests.check_version(version)

    def advance(self, version: int) -> None:
        """The learner holds `version`: the groups of the manifest before it are trained and their credit is free."""
        with self._store.transaction():
            self._manifests.advance(version)

    def commit(self, version: int, checkpoint: Path) -> None:
        """`checkpoint` at `version` is the oldest one kept. Nothing is deleted: the whole run stays replayable."""
        with self._store.transaction():
            self._manifests.commit(version, checkpoint)

    def rewind(self, version: int) -> None:
        """The learner starts again from `version`, and takes stored manifests until it stands where it stood before."""
        with self._store.transaction():
            self._manifests.rewind(version)

    def close(self) -> None:
        super().close()
        self._lock.release()


def _connect(path: Path) -> sqlite3.Connection:
    db = connect(path)
    fsync_folder(path.parent)
    return db


def _opened(connect: Callable[[Path], sqlite3.Connection], path: Path) -> sqlite3.Connection:
    try:
        return connect(path)
    except (sqlite3.Error, OSError) as error:
        raise ExperienceError(
            f"the ledger {path} could not be opened ({error}): free space on the disk, or put a copy back that is whole, then start again"
        ) from error


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
