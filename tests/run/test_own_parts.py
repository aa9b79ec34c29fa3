"""Checkpoints of a learner of one's own: complete or absent, a flipped bit is found, and the oldest ones go."""

from __future__ import annotations

import pytest

from miles.errors import CheckpointError
from miles.run.ownlearn import STATE, OwnCheckpoints
from tests.run.fakes import Learner


def trained(versions: int) -> Learner:
    learner = Learner(0.0)
    for _ in range(versions):
        learner.update([], None)
    return learner


def test_the_newest_is_loaded_and_the_oldest_kept_one_is_told(tmp_path):
    learner = Learner(0.0)
    checkpoints = OwnCheckpoints(tmp_path / "checkpoints", 2, learner)
    assert checkpoints.load() == -1
    kept = []
    for _ in range(3):
        learner.update([], None)
        kept.append(checkpoints.save(b"ledger").name)
    assert kept == ["step_000001", "step_000001", "step_000002"]
    fresh = Learner(0.0)
    again = OwnCheckpoints(tmp_path / "checkpoints", 2, fresh)
    assert again.load() == 3
    assert fresh.state() == learner.state()
    assert again.snapshot.read_bytes() == b"ledger"


def test_a_flipped_bit_is_passed_over_and_never_loaded(tmp_path):
    learner = trained(1)
    checkpoints = OwnCheckpoints(tmp_path, 5, learner)
    checkpoints.save(b"")
    learner.update([], None)
    checkpoints.save(b"")
    for version, left in ((2, 1), (1, None)):
        state = tmp_path / f"step_00000{version}" / STATE
        raw = bytearray(state.read_bytes())
        raw[5] ^= 1
        state.write_bytes(raw)
        if left is None:
            with pytest.raises(CheckpointError, match="can be used"):
                checkpoints.load()
        else:
            assert checkpoints.load() == left
