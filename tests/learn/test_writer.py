"""Checkpoints beside training: what stood when the save began is what comes back."""

from __future__ import annotations

import threading

import pytest
import torch

from miles.errors import CheckpointError
from miles.learn import checkpoint
from miles.learn.channel import Channel
from miles.learn.writer import Writer


class Gate(Channel):
    """A channel that lets nothing through until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()

    def broadcast(self, payload: bytes | None = None) -> bytes:
        assert self.opened.wait(60)
        return super().broadcast(payload)


def test_training_goes_on_while_the_copy_is_written(tmp_path):
    gate, weight = Gate(), torch.nn.Parameter(torch.ones(1000))
    writer = Writer(tmp_path, keep=2, channel=gate)
    writer.start(1, {"model": {"w": weight}}, {"version": 1}, {})
    assert writer.finished() is None
    with torch.no_grad():
        weight.fill_(2)
    assert checkpoint.newest(tmp_path) is None
    gate.opened.set()
    assert writer.wait() == tmp_path / "step_000001"
    assert writer.wait() is None
    tensors, state = checkpoint.load(tmp_path / "step_000001")
    assert tensors["model"]["w"].eq(1).all()
    assert state == {"version": 1}


def test_the_next_save_waits_and_older_ones_are_pruned(tmp_path):
    writer = Writer(tmp_path, keep=2)
    for version in (1, 2, 3):
        writer.start(version, {"model": {"w": torch.full((10,), float(version))}}, {}, {})
    assert writer.save(4, {"model": {"w": torch.zeros(10)}}, {}, {}) == tmp_path / "step_000003"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step_000003", "step_000004"]
    tensors, _ = checkpoint.load(tmp_path / "step_000003")
    assert tensors["model"]["w"].eq(3).all()


def test_a_failure_is_told_to_whoever_asks_next(tmp_path):
    root = tmp_path / "root"
    root.write_text("a file")
    writer = Writer(root, keep=1)
    writer.start(1, {"model": {}}, {}, {})
    with pytest.raises(CheckpointError, match="checkpoint 1 could not be written to"):
        writer.save(2, {"model": {}}, {}, {})
    root.unlink()
    assert writer.save(2, {"model": {}}, {}, {}) == root / "step_000002"
