"""`miles collect`: a collector on its own: it leases prompts from a buffer service, samples their groups, and puts them there."""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from miles.buffer.client import RemoteSink, RemoteSource
from miles.buffer.stream import PromptStream
from miles.config.schema import Recipe
from miles.errors import BadInput, ConfigError, LedgerLost
from miles.rollout.collect import Collector
from miles.run.coroutines import Coroutines
from miles.run.interrupts import Interrupted, Interrupts
from miles.run.logs import logs_to
from miles.run.meeting import Meeting
from miles.run.own import Making, own_groups
from miles.run.recipes import Resolved, inspect
from miles.run.rundir import DATA, RECIPE, fixed_hash

log = logging.getLogger(__name__)

LOOK_S = 0.5


def collect_command(recipes: Sequence[Path], overrides: Mapping[str, Any], worker: str | None) -> int:
    """Collect until the run is over. Returns the exit code."""
    resolved = inspect(recipes, overrides, os.environ)
    if resolved.row.recorded:
        raise ConfigError(
            f"algorithm.name = {resolved.row.name} learns from recorded answers: there is nothing to collect"
        )
    meeting = Meeting.of(resolved.recipe)
    interrupts = Interrupts()
    with ExitStack() as stack:
        stack.enter_context(logs_to(None, lambda _: None))
        stack.enter_context(interrupts.active())
        loop = stack.enter_context(Coroutines(interrupts))
        try:
            _collect(resolved, meeting, loop, worker or _own_name())
        except Interrupted as interrupted:
            log.info("stopped by a signal; its leases are given back")
            return interrupted.exit_code
    return 0


def _collect(resolved: Resolved, meeting: Meeting, loop: Coroutines, worker: str) -> None:
    making = _making(resolved, meeting)
    while True:
        address = meeting.address()
        with RemoteSource(address) as source:
            _wait_for_run(source)
            _check_same(source.identity(), resolved.recipe, making, meeting)
        sink = RemoteSink(address, making.vocabulary, payloads=meeting.payloads())
        try:
            loop.run(_begin(sink, worker))
            loop.run(_collector(sink, making, resolved, worker).run())
        except LedgerLost:
            log.warning("the buffer has lost the run %s: waiting until its learner has made it again", meeting.run)
            continue
        finally:
            loop.run(sink.close())
        log.info("the run is over")
        return


async def _begin(sink: RemoteSink, worker: str) -> None:
    if released := await sink.begin(worker):
        log.info("%d prompts that an earlier %s held are given back", released, worker)


def _making(resolved: Resolved, meeting: Meeting) -> Making:
    """Of Miles's engines, which load torch, or of one's own."""
    if resolved.recipe.run.parts is not None:
        return own_groups(resolved)
    from miles.run.making import make_groups

    return make_groups(resolved, meeting)


def _wait_for_run(source: RemoteSource) -> None:
    """Until the learner has made the run, or made it again."""
    told = False
    while not source.exists():
        if not told:
            log.info("waits for the learner to begin the run")
            told = True
        time.sleep(LOOK_S)


def _collector(sink: RemoteSink, making: Making, resolved: Resolved, worker: str) -> Collector:
    recipe = resolved.recipe
    stream = PromptStream(
        len(making.rows), recipe.run.seed, recipe.data.shuffle, recipe.algorithm.groups_per_step, recipe.data.epochs
    )
    return Collector(
        sink, stream, making.rows, making.groups, recipe=recipe, row=resolved.row, worker=worker,
        capacity=_share(recipe),
    )  # fmt: skip


def _share(recipe: Recipe) -> int:
    """Groups under way in one collector, so that all of them have something to do."""
    places = recipe.algorithm.groups_per_step * (recipe.buffer.max_staleness + 1)
    return math.ceil(places / recipe.run.collectors)


def _check_same(identity: Mapping[str, Any], recipe: Recipe, making: Making, meeting: Meeting) -> None:
    """Raises BadInput where the learner has registered another run than this recipe's."""
    for name, here in ((RECIPE, fixed_hash(recipe)), (DATA, making.data_hash)):
        if identity.get(name) != here:
            raise BadInput(
                f"the run {meeting.run!r} at {meeting.url} is not of this recipe: the {name} of its learner is "
                f"{str(identity.get(name))[:12]}, here it is {here[:12]}. Give collectors and learner the same recipe and data."
            )


def _own_name() -> str:
    """Of this machine and process; what a lease table may hold."""
    return f"{re.sub(r'[^A-Za-z0-9_-]', '-', socket.gethostname())[:80]}-{os.getpid()}"
