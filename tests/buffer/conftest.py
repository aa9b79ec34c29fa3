"""Groups with chosen versions, a clock that stands still, and ledgers that are closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from miles.buffer.backend import Where
from miles.buffer.ledger import Ledger
from miles.buffer.settings import LedgerSettings
from miles.buffer.stream import PromptStream
from miles.types import Group, Sample, Segment

from .programs import Postgres, missing


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests a missing program has cost."""
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    for message in sorted(missing):
        terminalreporter.write_line(f"{sum(message in text for text in skipped)} tests were skipped: {message}")


def build_group(
    ordinal: int, row: int, version: int = 0, rewards: tuple[float | None, ...] = (0.0, 1.0), length: int = 3
) -> Group:
    """One prompt token and `length` sampled ones for each reward; contents differ between ordinals and samples."""
    samples = []
    for index, reward in enumerate(rewards):
        tokens = tuple((ordinal * 31 + index * 7 + place) % 1000 for place in range(length))
        segment = Segment(
            token_ids=(5, *tokens),
            loss_mask=(False, *(True,) * length),
            behavior_logprobs=(0.0, *(-(place + 1) / 7 for place in range(length))),
            versions=(-1, *(version,) * length),
        )
        samples.append(Sample((segment,), "stop", f"sample {index}", reward, {"score": reward}))
    return Group(ordinal, row, tuple(samples), prompt_text=f"row {row}")


class Clock:
    """Seconds since the epoch, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def make_group() -> Callable[..., Group]:
    return build_group


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One server for the session; each test takes databases of its own."""
    server = Postgres()
    yield server
    server.remove()


@pytest.fixture
def where(request: pytest.FixtureRequest) -> Callable[..., Where]:
    """where(folder): what the ledger of a folder stands on, as `EVERY_STORE` says; the same for the same folder."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return lambda folder, segment_bytes=1 << 20: Where(segment_bytes=segment_bytes)
    server, databases = request.getfixturevalue("postgres"), {}

    def of(folder: Path, segment_bytes: int = 0) -> Where:
        return databases.setdefault(folder, Where(ledger=server.database()))

    return of


@pytest.fixture
def open_ledger(tmp_path: Path, clock: Clock, where: Callable[..., Where]) -> Iterator[Callable[..., Ledger]]:
    """open_ledger(groups_per_step, num_rows=..., epochs=..., folder=..., resume=..., identity=..., and LedgerSettings' keys)."""
    opened: list[Ledger] = []

    def open_one(groups_per_step: int = 2, **keys: Any) -> Ledger:
        rows, epochs = keys.pop("num_rows", 100), keys.pop("epochs", None)
        folder, resume = keys.pop("folder", tmp_path), keys.pop("resume", False)
        identity, seed = keys.pop("identity", {"config": "c"}), keys.pop("seed", 0)
        stream = PromptStream(rows, seed, keys.pop("shuffle", False), groups_per_step, epochs)
        place = where(folder, keys.pop("segment_bytes", 1 << 20))
        settings = LedgerSettings(groups_per_step, **keys)
        ledger = Ledger(folder, settings, stream, identity, resume=resume, clock=clock, where=place)
        opened.append(ledger)
        return ledger

    yield open_one
    for ledger in opened:
        ledger.close()


@pytest.fixture
def fill(make_group: Callable[..., Group]) -> Callable[..., list[int]]:
    """fill(ledger): lease all that can be leased and finish it with tokens of the newest version; the ordinals."""

    def fill_all(ledger: Ledger, n: int = 10**6, drop: Callable[[int], str | None] = lambda ordinal: None) -> list[int]:
        leases = ledger.lease(n, "worker", 60.0)
        for lease in leases:
            group = make_group(lease.ordinal, ledger.stream.at(lease.ordinal).row, lease.min_version)
            reason = drop(lease.ordinal)
            if reason is None:
                ledger.put(lease, group)
            else:
                ledger.drop(lease, reason, group)
        return [lease.ordinal for lease in leases]

    return fill_all
