"""The buffer of a run that collects and learns in one process: in its own folder, or the one that `buffer.url` names."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from miles.buffer.backend import Where
from miles.buffer.client import InlineRemote, RemoteSink
from miles.buffer.embedded import EmbeddedBuffer
from miles.buffer.ledger import DEFAULT_RUN, Ledger, LedgerReader
from miles.config import schema
from miles.errors import BadInput
from miles.protocols import ExperienceSink
from miles.run.joining import OpenBuffer, RunFacts, registered
from miles.run.meeting import address_of, payloads_of
from miles.run.resume import newest_snapshot, restore_ledger

Run = Callable[[Coroutine[Any, Any, None]], None]


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
    lost = registered(source, facts, newest_snapshot(run_dir) if resume else None, resume=resume)
    return OpenBuffer(source, "resample" if lost else "replay")
