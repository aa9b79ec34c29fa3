"""Versions on disk: whole under their own name or absent, and what a full disk or a process killed in the middle leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from miles.errors import EngineError
from miles.publish.files import WeightFiles
from miles.types import PolicyUpdate

CONFIG = {"peft_type": "LORA", "r": 2}
TENSORS = {"a": torch.arange(4.0), "b": torch.ones(2, 2)}


def update(version: int, fail_after: int | None = None) -> PolicyUpdate:
    """`fail_after`: the disk is full after so many tensors."""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for number, item in enumerate(TENSORS.items()):
            if number == fail_after:
                raise OSError(28, "No space left on device")
            yield item

    return PolicyUpdate(version, tensors, None, tensors)


@pytest.mark.parametrize("config", [None, CONFIG])
def test_a_full_disk_leaves_nothing_of_the_version_and_the_next_try_is_whole(config, tmp_path: Path) -> None:
    files = WeightFiles(tmp_path, torch.float32, config)
    files.write(update(1))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(EngineError, match=r"version 2 could not be written to .*No space left.*publish.directory"):
        files.write(update(2, fail_after=1))
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    written = files.write(update(2))
    file = written.path / "adapter_model.safetensors" if config else written.path
    assert all(torch.equal(load_file(file)[name], tensor) for name, tensor in TENSORS.items())
    assert (written.tensors, written.size) == (2, file.stat().st_size)


def test_half_an_adapter_of_a_killed_process_is_written_over_and_never_has_the_name(tmp_path: Path) -> None:
    half = tmp_path / ".policy-v5.part"
    half.mkdir()
    (half / "adapter_model.safetensors").write_bytes(b"half")
    files = WeightFiles(tmp_path, torch.float32, CONFIG)
    written = files.write(update(5))
    assert not half.exists()
    assert {path.name for path in written.path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert json.loads((written.path / "adapter_config.json").read_text()) == CONFIG
    files.write(update(6))
    files.forget({6})
    assert [path.name for path in tmp_path.iterdir()] == ["policy-v6"]
