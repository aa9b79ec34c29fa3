"""The buffer of a run that collects and learns in one process: in its own folder, or the one that `buffer.url` names."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.buffer.backend import Where
from miles.buffer.client import InlineRemote, RemoteSink
from miles.buffer.embedded import EmbeddedBuffer
from miles.buffer.ledger import DEFAULT_RUN, Ledger
from miles.buffer.rewinding import RewindMode
from miles.buffer.serve import read_tokens
from miles.buffer.settings import LedgerSettings
from miles.buffer.stream import PromptStream
from miles.buffer.transport import Address
from miles.config import schema
from miles.protocols import ExperienceSink, ExperienceSource
from miles.run.resume import newest_snapshot, restore_ledger

Run = Callable[[Coroutine[Any, Any, None]], None]


@dataclass(frozen=True)
class OpenBuffer:
    """Both sides of the buffer; `rewind`: how a resumed learner goes back to its checkpoint."""

    sink: ExperienceSink
    source: ExperienceSource
    rewind: RewindMode


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


def where_of(recipe: schema.Buffer) -> Where:
    """Where the ledger of a run without `buffer.url` stands."""
    return Where(ledger=recipe.ledger, payloads=recipe.payloads)


def address_of(recipe: schema.Buffer) -> Address:
    """Where the buffer of a run with `buffer.url` is, and the token for it. Raises BadInput."""
    assert recipe.url is not None
    assert recipe.run is not None
    tokens = read_tokens(None if recipe.token_file is None else Path(recipe.token_file), os.environ)
    ca_file = None if recipe.ca_file is None else Path(recipe.ca_file)
    return Address(recipe.url, recipe.run, tokens[0] if tokens else None, ca_file)


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
    return OpenBuffer(buffer, buffer, "resample" if lost else "replay")


def _remote(
    recipe: schema.Buffer, run_dir: Path, facts: RunFacts, stack: ExitStack, run: Run,
    collect: Callable[[ExperienceSink], None], resume: bool,
) -> OpenBuffer:  # fmt: skip
    address, vocabulary = address_of(recipe), facts.settings.vocabulary
    sink = RemoteSink(address, vocabulary, wait=False)
    stack.callback(lambda: run(sink.close()))
    source = InlineRemote(address, collect=lambda: collect(sink), vocabulary=vocabulary)
    stack.callback(source.close)
    found = newest_snapshot(run_dir) if resume else None
    lost = found is not None and not source.exists()
    if found is not None and lost:
        source.restore(found)
    source.register(facts.settings, facts.stream, facts.identity, resume=resume)
    return OpenBuffer(sink, source, "resample" if lost else "replay")
