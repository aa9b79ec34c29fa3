"""The buffer as a learner has it: in its own folder, at `buffer.url`, or filled by collectors in other processes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.buffer.backend import Where
from miles.buffer.client import InlineRemote, RemoteSink, RemoteSource
from miles.buffer.embedded import EmbeddedBuffer
from miles.buffer.ledger import DEFAULT_RUN, Ledger, LedgerReader
from miles.buffer.payloads import Payloads
from miles.buffer.rewinding import RewindMode
from miles.buffer.settings import LedgerSettings
from miles.buffer.stream import PromptStream
from miles.buffer.transport import Address
from miles.config import schema
from miles.errors import BadInput
from miles.protocols import ExperienceSink, ExperienceSource
from miles.run.meeting import Meeting, address_of, payloads_of
from miles.run.resume import newest_snapshot, restore_ledger
from miles.types import Group

Run = Callable[[Coroutine[Any, Any, None]], None]
LOOK_S = 1.0


@dataclass(frozen=True)
class OpenBuffer:
    """The learner's side of the buffer; `rewind`: how a resumed learner goes back to its checkpoint.

    `end`: called when the run has ended well, so that collectors in other processes end too.
    """

    source: ExperienceSource
    rewind: RewindMode
    end: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class RunFacts:
    """What makes the run this run."""

    settings: LedgerSettings
    stream: PromptStream
    identity: Mapping[str, Any]


@contextmanager
def open_buffer(
    recipe: schema.Buffer, run_dir: Path, facts: RunFacts, run: Run, collect: Callable[[ExperienceSink], None],
    *, resume: bool,
) -> Iterator[OpenBuffer]:  # fmt: skip
    """`collect` runs a collector on a sink until it has nothing to lease; `run` a coroutine on the loop that it uses.

    Raises RunDirError where the buffer holds another run, or one and `resume` is False; BadInput where it cannot be joined.
    """
    with ExitStack() as stack:
        if recipe.url is None:
            yield _embedded(recipe, run_dir, facts, stack, collect, resume)
        else:
            yield _remote(recipe, run_dir, facts, stack, run, collect, resume)


@contextmanager
def join_buffer(
    meeting: Meeting, run_dir: Path, facts: RunFacts, look: Callable[[], None], *, resume: bool
) -> Iterator[OpenBuffer]:
    """The buffer of a learner that does not collect. `look` is called while it waits, and may raise.

    Raises RunDirError where the buffer holds another run, or one and `resume` is False; BadInput where it cannot be joined.
    """
    with WaitingSource(meeting.address(), facts.settings.vocabulary, look, meeting.payloads()) as source:
        lost = _registered(source, run_dir, facts, resume)
        yield OpenBuffer(source, "resample" if lost else "replay", lambda: source.end("the learner is done"))


class WaitingSource(RemoteSource):
    """A source whose `take` looks up from its waiting, so that a signal is noticed where it must not interrupt."""

    def __init__(
        self, address: Address, vocabulary: int | None, look: Callable[[], None], payloads: Payloads | None = None
    ) -> None:
        super().__init__(address, vocabulary, payloads=payloads)
        self._look = look

    def take(self, version: int) -> list[Group]:
        while (groups := self.take_now(version, wait=LOOK_S)) is None:
            self._look()
        return groups


def where_of(recipe: schema.Buffer) -> Where:
    """Where the ledger of a run without `buffer.url` stands."""
    return Where(ledger=recipe.ledger, payloads=recipe.payloads)


def open_reader(run_dir: Path, recipe: schema.Buffer) -> LedgerReader:
    """The ledger of a run that is over. Raises RunDirError where there is none, BadInput where a service keeps it."""
    if recipe.url is not None:
        raise BadInput(
            f"the ledger of {run_dir} is kept by the buffer at {recipe.url}, in the folder {recipe.run} of its --dir: copy what is "
            f"in there into {run_dir}, and take the key url out of [buffer] in its config.toml"
        )
    return LedgerReader(run_dir, recipe.run or DEFAULT_RUN, where_of(recipe))


def _embedded(
    recipe: schema.Buffer, run_dir: Path, facts: RunFacts, stack: ExitStack,
    collect: Callable[[ExperienceSink], None], resume: bool,
) -> OpenBuffer:  # fmt: skip
    where = where_of(recipe)
    lost = resume and restore_ledger(run_dir, recipe.run or DEFAULT_RUN, where)
    ledger = Ledger(
        run_dir, facts.settings, facts.stream, facts.identity, resume=resume, run=recipe.run or DEFAULT_RUN, where=where
    )
    stack.callback(ledger.close)
    buffer = EmbeddedBuffer(ledger, collect=lambda: collect(buffer))
    return OpenBuffer(buffer, "resample" if lost else "replay")


def _remote(
    recipe: schema.Buffer, run_dir: Path, facts: RunFacts, stack: ExitStack, run: Run,
    collect: Callable[[ExperienceSink], None], resume: bool,
) -> OpenBuffer:  # fmt: skip
    assert recipe.url is not None
    assert recipe.run is not None
    address, vocabulary = address_of(recipe, recipe.url, recipe.run), facts.settings.vocabulary
    payloads = payloads_of(recipe)
    sink = RemoteSink(address, vocabulary, wait=False, payloads=payloads)
    stack.callback(lambda: run(sink.close()))
    source = InlineRemote(address, collect=lambda: collect(sink), vocabulary=vocabulary, payloads=payloads)
    stack.callback(source.close)
    lost = _registered(source, run_dir, facts, resume)
    return OpenBuffer(source, "resample" if lost else "replay")


def _registered(source: RemoteSource, run_dir: Path, facts: RunFacts, resume: bool) -> bool:
    """Make or join the run at the service; True where it was lost there, and was made again from a checkpoint."""
    found = newest_snapshot(run_dir) if resume else None
    lost = found is not None and not source.exists()
    if found is not None and lost:
        source.restore(found)
    source.register(facts.settings, facts.stream, facts.identity, resume=resume)
    return lost
