"""What every rank of a run does when rank 0 calls for it: collect its share, evaluate its share, save, export."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerBase

from miles.config.schema import Recipe
from miles.errors import MilesError
from miles.learn.channel import Channel
from miles.learn.export import save_trained
from miles.learn.learner import Learner
from miles.learn.randomness import random_state
from miles.learn.writer import Writer
from miles.protocols import ExperienceSink
from miles.rollout.evaluate import Evaluation
from miles.run.crew import Crew, heard, said
from miles.run.interrupts import Interrupted
from miles.types import Group, Lease

PUT, DROP, RELEASE = "put", "drop", "release"


@dataclass(frozen=True)
class Finished:
    """How a lease ended on the rank that held it."""

    lease: Lease
    how: str
    reason: str = ""
    group: Group | None = None


class Share:
    """The sink of one rank's collector: it gives the rank's leases, and remembers how each ended."""

    def __init__(self, leases: Sequence[Lease]) -> None:
        self._waiting = list(leases)
        self._finished: list[Finished] = []

    async def lease(self, n: int, worker: str, ttl: float) -> list[Lease]:
        """Up to n of the leases that wait; those that were released among them."""
        given, self._waiting = self._waiting[:n], self._waiting[n:]
        return given

    async def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """All: nobody else asks rank 0's ledger for ordinals during a round."""
        return list(leases)

    async def put(self, lease: Lease, group: Group) -> None:
        self._finished.append(Finished(lease, PUT, group=group))

    async def drop(self, lease: Lease, reason: str, group: Group | None = None) -> None:
        self._finished.append(Finished(lease, DROP, reason, group))

    async def release(self, lease: Lease) -> None:
        self._waiting.append(lease)

    def all(self) -> list[Finished]:
        """How every lease ended; those that wait still are given back."""
        return [*self._finished, *(Finished(lease, RELEASE) for lease in self._waiting)]


@dataclass(frozen=True)
class Reply:
    """What a rank hands in; `error`: what its work was ended by, as JSON."""

    finished: list[Finished] = field(default_factory=list)
    sampled: list[Group] = field(default_factory=list)
    greedy: list[Group] = field(default_factory=list)
    error: dict[str, Any] | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Reply).decode
_groups = msgspec.msgpack.Decoder(list[Group]).decode


def share_of(items: Sequence[Any], channel: Channel) -> Sequence[Any]:
    """Every `size`-th item, so that ranks get equal numbers of them."""
    return items[channel.rank :: channel.size]


def collect_round(
    buffer: ExperienceSink, crew: Crew, recipe: Recipe, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    """Rank 0: let all ranks collect what the buffer gives out now, and hand in how it ended. Raises a rank's error."""
    capacity = recipe.algorithm.groups_per_step * (recipe.buffer.max_staleness + 1)
    leases: list[Lease] = []

    async def lease() -> None:
        leases.extend(await buffer.lease(capacity, "ranks", recipe.buffer.lease_s))

    run(lease())
    finished, error = crew.call("collect", leases=msgspec.to_builtins(leases))
    run(settle(buffer, finished))
    if error is not None:
        raise error


def collect_share(
    leases: Sequence[Mapping[str, Any]], channel: Channel, collect: Callable[[Share], None]
) -> tuple[list[Finished], BaseException | None]:
    """Collect this rank's share of the leases (JSON); on rank 0 how all of them ended, and the first error of a rank."""
    share = Share(share_of(msgspec.convert(leases, list[Lease]), channel))
    error = _error_of(lambda: collect(share))
    replies = _hand_in(channel, Reply(share.all(), error=error))
    finished = sorted((each for reply in replies for each in reply.finished), key=lambda each: each.lease.ordinal)
    return finished, _first_error(replies)


async def settle(sink: ExperienceSink, finished: Sequence[Finished]) -> None:
    """Hand in how leases ended."""
    for each in finished:
        if each.how == PUT and each.group is not None:
            await sink.put(each.lease, each.group)
        elif each.how == DROP:
            await sink.drop(each.lease, each.reason, each.group)
        else:
            await sink.release(each.lease)


def evaluate_share(rows: int, channel: Channel, evaluate: Callable[[Sequence[int]], Evaluation]) -> Evaluation | None:
    """Evaluate this rank's share of the held-out rows; on rank 0 all of it. Raises there the first error of a rank."""
    found: list[Evaluation] = []
    error = _error_of(lambda: found.append(evaluate(share_of(range(rows), channel))))
    mine = found[0] if found else Evaluation((), ())
    replies = _hand_in(channel, Reply(sampled=list(mine.sampled), greedy=list(mine.greedy), error=error))
    if channel.rank:
        return None
    if (failed := _first_error(replies)) is not None:
        raise failed
    sampled, greedy = ([group for reply in replies for group in getattr(reply, kind)] for kind in ("sampled", "greedy"))
    return Evaluation(*(tuple(sorted(groups, key=lambda group: group.ordinal)) for groups in (sampled, greedy)))


def judge_groups(learner: Learner, groups: Sequence[Group], channel: Channel) -> list[Group]:
    """Rank 0's groups with the scores of the learner's reward model."""
    return learner.judge(broadcast_groups(groups if channel.rank == 0 else None, channel))


def save_part(
    learner: Learner, writer: Writer, identity: dict[str, Any], files: Mapping[str, bytes], beside: bool
) -> Path | None:
    """Write this rank's part of a checkpoint; the oldest one that is kept, unless it is written beside training.

    `files`: contents of further files of rank 0.
    """
    tensors, state = learner.state()
    content = (learner.version, tensors, {"learner": state, "run": identity}, {"random": random_state()}, files)
    if beside:
        writer.start(*content)
        return None
    return writer.save(*content)


def export_part(
    learner: Learner, tokenizer: PreTrainedTokenizerBase, folder: Path, recipe: Mapping[str, Any], channel: Channel
) -> None:
    """The trained model, or its adapter, as a folder that rank 0 writes."""
    facts = {"version": learner.version, "recipe": recipe}
    save_trained(learner.model, tokenizer, folder, facts, writes=channel.rank == 0)


def broadcast_groups(groups: Sequence[Group] | None, channel: Channel) -> list[Group]:
    """Rank 0's groups, on every rank."""
    if channel.size == 1 and groups is not None:
        return list(groups)
    payload = None if groups is None else _encode(list(groups))
    return _groups(channel.broadcast(payload))


def _error_of(work: Callable[[], object]) -> dict[str, Any] | None:
    """Run; what ended it, as JSON. The other ranks wait for this one's reply, so an error must not end it before."""
    try:
        work()
    except (MilesError, Interrupted) as error:
        return said(error)
    return None


def _hand_in(channel: Channel, reply: Reply) -> list[Reply]:
    return [_decode(payload) for payload in channel.gather(_encode(reply))]


def _first_error(replies: Sequence[Reply]) -> BaseException | None:
    """A signal before all else: work that it has ended may have failed for that reason."""
    found = [reply.error for reply in replies if reply.error is not None]
    found.sort(key=lambda error: error["kind"] != "Interrupted")
    return heard(found[0]) if found else None
