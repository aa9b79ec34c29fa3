"""The one exception tree: each class says what kind of thing went wrong and which exit code the command ends with."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any

LONGEST = 500  # characters of someone else's words in a message


class MilesError(Exception):
    """A failure with a one-paragraph reason; commands print the message and end with `exit_code`."""

    exit_code = 1


class BadInput(MilesError):
    """Something the user gave cannot be used; the message names the place, the value and the way out."""

    exit_code = 2


class ConfigError(BadInput):
    """One or more keys of the recipe are wrong; `problems` holds one sentence for each."""

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(BadInput):
    """A dataset, a row, a column or a prompt cannot be used."""


class ModelError(BadInput):
    """A model or tokenizer cannot be loaded, or cannot be trained exactly."""


class RunDirError(BadInput):
    """The run directory holds something else than this run."""


class DoesNotFit(MilesError):
    """The models of a recipe need more memory than the GPUs have; the message says what would fit."""


class RewardError(MilesError):
    """A reward function raised, timed out, or returned something that is not one number or None per completion."""


class EpisodeError(MilesError):
    """An environment's own code raised, timed out, or answered with something that is no message."""


class EngineError(MilesError):
    """The engine could not produce a whole completion."""


class ServerFault(EngineError):
    """One server did not do what was asked; another one may. `gone`: it cannot be reached, or has other weights than it should."""

    def __init__(self, message: str, *, gone: bool = False) -> None:
        super().__init__(message)
        self.gone = gone


class ExperienceError(MilesError):
    """The experience buffer refused a call."""


class BufferClosed(ExperienceError):
    """The prompt stream has ended and no further manifest can be filled."""


class LeaseLost(ExperienceError):
    """The lease expired or belongs to someone else; the group must not be counted twice."""


class GroupRefused(ExperienceError):
    """A group, or bytes that claim to be one, cannot be trained on; `reason` is one word for it."""

    def __init__(self, message: str, reason: str = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


class LearnerFenced(ExperienceError):
    """Another learner has taken the run over; this one must end without writing anything more."""


class LedgerLost(ExperienceError):
    """The ledger is gone, or not there yet; a checkpoint's snapshot makes it again."""


class LedgerUnreachable(ExperienceError):
    """The server that holds the ledger, or its payloads, does not answer; the call may be made again."""


class DiskFull(ExperienceError):
    """There is no room for what was to be stored. Nothing acknowledged is lost, and it may be tried again."""


class PoisonedData(MilesError):
    """Too many groups were refused as unfit to train on; the message holds the table of reasons."""

    exit_code = 3


class NothingToTrain(MilesError):
    """Every group of a step was dropped; the message holds the table of rewards."""


class CheckpointError(MilesError):
    """A checkpoint is incomplete, altered, or belongs to another model or recipe."""


class RankFailed(MilesError):
    """A rank of a run died, or ended with an error of its own, whose exit code the run ends with."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RoleFailed(RankFailed):
    """A role of a run that was started as processes died for good; the message holds its last lines."""


class TrainingAborted(MilesError):
    """Training stopped to protect the model (non-finite loss, poisoned data); `metrics` are those of the step it ended in."""

    exit_code = 3

    def __init__(self, message: str, metrics: Mapping[str, float] | None = None) -> None:
        super().__init__(message)
        self.metrics = dict(metrics or {})


def in_words(error: BaseException) -> str:
    """`ValueError: its text` of an error that code of the user's raised: short, printable, whatever that code does."""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be made)"
    return f"{type(error).__name__}: {_printable(text)}" if text else type(error).__name__


def in_short(value: Any) -> str:
    """The `repr` of a value that code of the user's gave: short, printable, whatever its class does."""
    try:
        return _printable(repr(value), 200)
    except Exception:
        return f"<{type(value).__name__} whose repr fails>"


def _printable(text: str, longest: int = LONGEST) -> str:
    """No colours of a terminal and no half characters; line breaks stay, for a message may have several lines."""
    cut = text if len(text) <= longest else text[:longest] + " ..."
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs") else "\N{REPLACEMENT CHARACTER}" for c in cut
    )
