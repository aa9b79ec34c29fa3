"""What moves a run back or away: the watermark of kept checkpoints, rewinding to one, and the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from miles.buffer.leases import OPEN, Leases
from miles.errors import ExperienceError

OLDER_EPOCH = "older_epoch"
RewindMode = Literal["replay", "resample"]


class Rewinding:
    """Every method runs inside a transaction of the store."""

    def __init__(self, leases: Leases, clock: Callable[[], float]) -> None:
        self._leases = leases
        self._store = leases.store
        self._keep = leases.settings.keep
        self._clock = clock

    def commit(self, version: int, checkpoint: str) -> None:
        """Note the oldest checkpoint that is kept, and delete the groups below it where `buffer.keep` says so."""
        self._reached("commit", version)
        committed = max(version, self._store.state().committed_step)
        self._store.set(committed_step=committed)
        self._store.event(self._clock(), "commit", {"version": version, "checkpoint": checkpoint})
        if self._keep == "checkpoints":
            self._delete_below(committed)

    def _delete_below(self, version: int) -> None:
        """Rows, summaries and hashes stay; bytes go."""
        first = self._store.state().kept_from
        if first >= version:
            return
        for table in ("manifest", "dropped"):
            self._store.db.execute(
                f'UPDATE grp SET payload = NULL, segment = NULL, "offset" = NULL WHERE run = ? AND ordinal IN '
                f"(SELECT ordinal FROM {table} WHERE run = ? AND step >= ? AND step < ?)",
                (self._store.run, self._store.run, first, version),
            )
        self._store.set(kept_from=version)
        self._store.event(self._clock(), "deleted", {"below": version})

    def tidy(self) -> None:
        """Delete what no row points at any more; called after the transaction, and harmless to repeat."""
        store = self._store
        first = store.value("SELECT min(segment) FROM grp WHERE run = ?")
        kept_from = store.state().kept_from
        rows = store.all("SELECT ordinal, object FROM grp WHERE run = ? AND object IS NOT NULL AND step < ?", kept_from)
        store.payloads.delete([row["object"] for row in rows], first)
        for row in rows:
            store.db.execute("UPDATE grp SET object = NULL WHERE run = ? AND ordinal = ?", (store.run, row["ordinal"]))

    def rewind(self, version: int, mode: RewindMode) -> None:
        """The learner starts again from `version`.

        replay: stored manifests stay as they are and are taken again in order, until the learner stands where it stood.
        resample: manifests from `version` on are void, their prompts and all open ones are collected again by the weights
        of `version`. Manifests below stay.
        """
        self._reached("rewind", version)
        state = self._store.state()
        if mode == "replay" and version < state.kept_from and version < state.weight_version:
            raise ExperienceError(
                f"rewind({version}): groups of the steps below {state.kept_from} were deleted (buffer.keep is "
                f'"checkpoints"), so replay starts from version {state.kept_from} at the earliest: use that checkpoint'
            )
        self._store.set(stored=0, refused=0, ended=None)
        self._store.db.execute("DELETE FROM quarantine WHERE run = ?", (self._store.run,))
        if mode == "resample":
            self._resample(version)
        self._store.event(self._clock(), "rewind", {"version": version, "mode": mode})

    def _resample(self, version: int) -> None:
        store, state = self._store, self._store.state()
        undone = f"run = ? AND (state IN {OPEN} OR step >= ?)"
        values = (store.run, version)
        finished = store.db.query(
            f"SELECT ordinal FROM prompt WHERE {undone} AND state IN ('done', 'placed', 'trained')", values
        )
        for row in finished:
            detail = f"sampled before the run was rewound to version {version}"
            self._leases.discard(row["ordinal"], OLDER_EPOCH, detail)
        store.db.execute(
            f"DELETE FROM grp WHERE run = ? AND ordinal IN (SELECT ordinal FROM prompt WHERE {undone})",
            (store.run, *values),
        )
        store.db.execute(
            f"UPDATE prompt SET state = 'pending', step = NULL, lease_id = NULL, attempts = 0 WHERE {undone}", values
        )
        store.set(
            epoch=state.epoch + 1, next_step=version, weight_version=version, kept_from=min(state.kept_from, version)
        )

    def end(self, reason: str) -> None:
        """Nothing more is leased, until a rewind."""
        if self._store.state().ended is None:
            self._store.set(ended=reason)
            self._store.event(self._clock(), "ended", {"reason": reason})

    def _reached(self, call: str, version: int) -> None:
        state = self._store.state()
        if not 0 <= version <= state.weight_version:
            raise ExperienceError(
                f"{call}({version}): the ledger {self._store.name} stands at version {state.weight_version}, so the "
                f"checkpoint is of another run or the ledger an older copy: use the ledger that belongs to it, or resume from "
                f"a checkpoint of version {state.weight_version} or below"
            )
