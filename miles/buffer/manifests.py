"""Which groups a step trains on: an ordered, immutable list for each step, made once and chained by hashes.

A manifest takes the next `groups_per_step` ordinals that were not dropped, in ordinal order, so a slow prompt is waited for
and cannot be overtaken: that, and the credit of `leases`, is what bounds staleness.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from miles.buffer import reading
from miles.buffer.leases import IN_STATES, REPEATED, Leases
from miles.buffer.store import decode_summary, encode_summary
from miles.errors import BufferClosed, ExperienceError, NothingToTrain, PoisonedData
from miles.types import FinishedGroup

AT_DROP_LIMIT = "max_dropped"
AT_STREAM_END = "stream_ended"
MOST_TABLE_ROWS = 12


class Manifests:
    """The learner's half of a ledger. Methods that change something run inside a transaction of the store."""

    def __init__(self, leases: Leases, clock: Callable[[], float]) -> None:
        self._leases = leases
        self._store = leases.store
        self._settings = leases.settings
        self._clock = clock

    def check_version(self, version: int) -> None:
        """Raises ExperienceError where no manifest is stored for `version` and none may be made yet."""
        state = self._store.state()
        if version < 0 or (version >= state.next_step and version != state.weight_version):
            raise ExperienceError(
                f"take({version}): the learner has reached version {state.weight_version} and manifests 0 to "
                f"{state.next_step - 1} are stored; only those and the manifest of version {state.weight_version} can be taken"
            )

    def create(self, version: int) -> list[int]:
        """Make the manifest of `version` from what is done; empty while an earlier ordinal is still open."""
        self._leases.expire()
        ordinals, short = self._choose()
        if ordinals:
            self._write(version, ordinals, short)
        return ordinals

    def raise_if_over(self) -> None:
        """Raises BufferClosed, NothingToTrain or PoisonedData where no more collecting can fill the next manifest."""
        if self._leases.is_poisoned():
            raise PoisonedData(self._poisoned_message())
        if self._leases.open_prompts():
            if self._drained_at_limit() and not self._count("done"):
                raise NothingToTrain(self._nothing_message())
            return
        state = self._store.state()
        if state.next_ordinal == self._leases.stream.length:
            if state.next_step == 0:
                raise NothingToTrain(self._nothing_message())
            raise BufferClosed(
                f"the prompt stream has ended after {state.next_ordinal} prompts and {state.next_step} steps (data.epochs "
                f"is {self._leases.stream.epochs}): there is nothing left to train on"
            )
        if self._leases.at_drop_limit():
            raise NothingToTrain(self._nothing_message())

    def advance(self, version: int) -> None:
        """The learner has reached `version`. A version that it reached before is a replay and changes nothing."""
        state = self._store.state()
        if 0 <= version <= state.weight_version:
            return
        if version != state.weight_version + 1 or version > state.next_step:
            raise ExperienceError(
                f"advance({version}): the learner stood at version {state.weight_version} and manifests 0 to "
                f"{state.next_step - 1} are taken; the next version can only be {state.weight_version + 1}, after its manifest"
            )
        placed = IN_STATES.format("= 'placed'")
        self._store.db.execute(
            f"UPDATE prompt SET state = 'trained' WHERE {placed} AND step = ?",
            (self._store.run, self._store.run, version - 1),
        )
        self._store.set(weight_version=version)

    def _count(self, state: str) -> int:
        return sum(row["state"] == state for row in self._leases.open_prompts())

    def _drained_at_limit(self) -> bool:
        """True when the step has dropped too much and nothing that could still fill it is under way."""
        return self._leases.at_drop_limit() and not self._count("leased")

    def _choose(self) -> tuple[list[int], str | None]:
        """The ordinals of the next manifest and why it is short; no ordinals where it must wait."""
        drained = self._drained_at_limit()
        chosen: dict[int, int] = {}  # row -> ordinal
        for prompt in self._leases.open_prompts():
            if len(chosen) == self._settings.groups_per_step:
                break
            if prompt["state"] != "done":
                if not drained:
                    return [], None
            elif prompt["row"] in chosen:
                self._drop_repeated(prompt["ordinal"], chosen[prompt["row"]])
            else:
                chosen[prompt["row"]] = prompt["ordinal"]
        ordinals = list(chosen.values())
        if len(ordinals) == self._settings.groups_per_step:
            return ordinals, None
        if drained:
            return ordinals, AT_DROP_LIMIT
        if self._store.state().next_ordinal == self._leases.stream.length:
            return ordinals, AT_STREAM_END
        return [], None

    def _drop_repeated(self, ordinal: int, earlier: int) -> None:
        meta = self._store.value("SELECT meta FROM grp WHERE run = ? AND ordinal = ?", ordinal)
        summary = replace(decode_summary(meta), reason=REPEATED)
        self._leases.discard(ordinal, REPEATED, f"the row of ordinal {earlier}", encode_summary(summary))

    def _write(self, version: int, ordinals: list[int], short: str | None) -> None:
        store = self._store
        self._check_staleness(version, ordinals)
        last = reading.step_row(store, version - 1)
        previous = last["manifest_hash"] if last is not None else reading.genesis(store)
        epoch = store.state().epoch
        groups = [
            store.one("SELECT ordinal, version_min, hash FROM grp WHERE run = ? AND ordinal = ?", ordinal)
            for ordinal in ordinals
        ]
        store.db.executemany(
            "INSERT INTO manifest VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(store.run, epoch, version, place, *group) for place, group in enumerate(groups)],
        )
        keys = [(version, store.run, ordinal) for ordinal in ordinals]
        store.db.executemany("UPDATE grp SET step = ? WHERE run = ? AND ordinal = ?", keys)
        store.db.executemany("UPDATE prompt SET state = 'placed', step = ? WHERE run = ? AND ordinal = ?", keys)
        chained = reading.chain_hash(version, [(group["ordinal"], group["hash"]) for group in groups], previous)
        store.db.execute(
            "INSERT INTO step VALUES (?, ?, ?, ?, ?, ?, ?)",
            (store.run, epoch, version, version, chained, previous, short),
        )
        store.set(next_step=version + 1)
        if short is not None:
            store.event(self._clock(), "short", {"step": version, "groups": len(ordinals), "reason": short})

    def _check_staleness(self, version: int, ordinals: list[int]) -> None:
        """Cannot fail while credit and order hold; training on older groups than promised would be silent otherwise."""
        for ordinal in ordinals:
            oldest = self._store.value("SELECT version_min FROM grp WHERE run = ? AND ordinal = ?", ordinal)
            if version - oldest > self._settings.max_staleness:
                raise ExperienceError(
                    f"ordinal {ordinal} has tokens of version {oldest}; at version {version} that is older than "
                    f"buffer.max_staleness = {self._settings.max_staleness} allows: the ledger {self._store.name} was "
                    "altered, or this is a fault of Miles"
                )

    def _poisoned_message(self) -> str:
        state = self._store.state()
        rows = self._store.all(
            "SELECT reason, count(*) AS n, min(detail) AS detail FROM quarantine WHERE run = ? GROUP BY reason ORDER BY 2 DESC"
        )
        table = "\n".join(f"  {row['reason']:<20} {row['n']:>7}   {row['detail'][:90]}" for row in rows)
        return (
            f"{state.refused} groups were refused and {state.stored} accepted since the learner began, more than "
            f"buffer.max_refused = {self._settings.max_refused:g} allows:\n  reason                 groups   an example\n{table}\n"
            "A collector or an engine is broken; the refused bytes are in the table quarantine of the ledger. Repair it, then "
            "continue with --resume. Weights are untouched."
        )

    def _nothing_message(self) -> str:
        step = self._store.state().next_step
        groups = reading.dropped(self._store, step)
        reasons = list(dict.fromkeys(group.reason or "" for group in groups))
        lines = [
            _reason_line(reason, [g for g in groups if g.reason == reason]) for reason in reasons[:MOST_TABLE_ROWS]
        ]
        if len(reasons) > MOST_TABLE_ROWS:
            lines.append(f"  and {len(reasons) - MOST_TABLE_ROWS} more reasons")
        table = "\n".join(["  reason                    groups   reward mean    lowest   highest", *lines])
        return (
            f"step {step}: all {len(groups)} groups were dropped and none is left to train on (rollout.max_dropped = "
            f"{self._settings.drop_limit}):\n{table}\n"
            "Equal rewards teach nothing: choose rows that the model solves sometimes, raise rollout.group_size or "
            "rollout.temperature, look at the reward function, or choose an algorithm that keeps such groups. For other "
            "reasons see logs and samples. Weights and the step count are untouched."
        )


def _reason_line(reason: str, groups: list[FinishedGroup]) -> str:
    rewards = [reward for group in groups for reward in group.rewards if reward is not None]
    if not rewards:
        return f"  {reason:<24} {len(groups):>7}   no rewards"
    mean = sum(rewards) / len(rewards)
    return f"  {reason:<24} {len(groups):>7} {mean:>13.4g} {min(rewards):>9.4g} {max(rewards):>9.4g}"
