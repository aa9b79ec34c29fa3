"""What several ranks have written is the same tensor on any other number of ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from miles.errors import CheckpointError
from miles.learn import checkpoint
from miles.learn.channel import Channel
from miles.learn.optim import matching
from miles.learn.shards import Part, index_of

SHAPES = {"uneven": (7, 3), "short": (1, 5), "vector": (4,), "cube": (6, 2, 2), "empty": (0, 4)}


def whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {**tensors, "half": tensors["uneven"].bfloat16(), "columns": torch.randn(4, 6, generator=generator)}


def sharded(replicate: int) -> dict[str, Tensor]:
    """The tensors of `whole` over all ranks, in the way of FSDP (rows) but for one in columns; and a plain one."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (replicate, size // replicate), mesh_dim_names=("replicate", "shard"))
    placements = {"columns": (Replicate(), Shard(1))}
    out = {
        name: distribute_tensor(tensor, mesh, placements.get(name, (Replicate(), Shard(0))))
        for name, tensor in whole().items()
    }
    return {**out, "count": torch.tensor(5.0)}


def job_save(root: str, replicate: int) -> list[str]:
    tensors = sharded(replicate)
    path = checkpoint.save(Path(root), 3, {"model": tensors}, {"a": 1}, {"rank": dist.get_rank()}, Channel.open())
    return sorted(os.listdir(path)) if dist.get_rank() == 0 else []


def job_load(path: str, replicate: int) -> bool:
    """Whether each of the tensors is what it was, in its placement, and this rank read no more than its part."""
    stored, state, own = checkpoint.read(Path(path))
    mine = sharded(replicate)
    found = {name: matching(stored["model"], name, tensor) for name, tensor in mine.items()}
    same = all(
        torch.equal(found[name].to_local(), mine[name].to_local()) and found[name].placements == mine[name].placements
        for name in whole()
    )
    return same and bool(found["count"] == 5) and state == {"a": 1} and [each["rank"] for each in own] == [0, 1]


def job_fail(root: str) -> str:
    """Rank 1 holds a name that rank 0's disk cannot take; both must hear of it."""
    channel = Channel.open()
    if dist.get_rank() == 0:
        Path(root).mkdir()
        (Path(root) / "step_000003").write_text("a file")
    try:
        checkpoint.save(Path(root) / "step_000003", 3, {"model": sharded(1)}, {}, {}, channel)
    except CheckpointError as error:
        return str(error)
    return "saved"


def job_talk() -> list[object]:
    channel = Channel.open()
    told = [
        channel.broadcast(payload if channel.rank == 0 else None).decode() for payload in (b"", b"one", b"x" * 70_000)
    ]
    handed = [item.decode() for item in channel.gather(b"r" * channel.rank)]
    return [told == ["", "one", "x" * 70_000], handed]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "replicate"), [(2, 1), (2, 2)])
def test_written_on_two_ranks_and_read_on_one_two_and_three(size, replicate, gang, tmp_path):
    files = gang.run(size, job_save, str(tmp_path / "root"), replicate)[0]
    weights = [f"model-{rank:05d}-of-00002.safetensors" for rank in range(size)]
    assert files == sorted(
        ["index.json", "manifest.json", "rank-00000.json", "rank-00001.json", "state.json", *weights][
            : None if replicate == 1 else -1
        ]
    )
    tensors, state = checkpoint.load(tmp_path / "root" / "step_000003")
    assert state == {"a": 1}
    for name, tensor in whole().items():
        assert torch.equal(tensors["model"][name], tensor)
        assert tensors["model"][name].dtype == tensor.dtype
    for ranks in (1, 2, 3):
        assert gang.run(ranks, job_load, str(tmp_path / "root" / "step_000003"), 1) == [True] * ranks


@pytest.mark.slow
def test_a_lost_or_altered_part_of_another_rank_is_found(gang, tmp_path):
    gang.run(2, job_save, str(tmp_path), 1)
    part = tmp_path / "step_000003" / "model-00001-of-00002.safetensors"
    raw = part.read_bytes()
    part.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002.safetensors is altered"):
        checkpoint.load(part.parent)
    part.unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002.safetensors is missing"):
        checkpoint.newest(tmp_path)


@pytest.mark.slow
def test_ranks_talk_in_bytes_and_fail_together(gang, tmp_path):
    assert gang.run(3, job_talk) == [[True, ["", "r", "rr"]], [True, []], [True, []]]
    errors = gang.run(2, job_fail, str(tmp_path / "root"))
    assert errors[0] == errors[1]
    assert "checkpoint 3 could not be written to" in errors[0]


def test_parts_that_do_not_fill_a_tensor_are_no_checkpoint():
    half = Part(torch.float32, torch.Size([4]), (0,), torch.zeros(2)).entry("a")
    other = Part(torch.float32, torch.Size([4]), (2,), torch.zeros(2)).entry("b")
    assert json.loads(json.dumps(index_of([{"model": {"w": half}}, {"model": {"w": other}}])))["model"]["w"]["pieces"] == [
        {"file": "a", "offsets": [0], "shape": [2]}, {"file": "b", "offsets": [2], "shape": [2]},
    ]  # fmt: skip
    with pytest.raises(ValueError, match="the ranks hold 2 numbers of model's w, whose shape is"):
        index_of([{"model": {"w": half}}])


def test_a_box_is_put_together_from_the_pieces_that_it_meets(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"model": whole()}, {})
    stored, _, _ = checkpoint.read(path)
    cube = stored["model"]["cube"]
    assert torch.equal(cube.part((2, 1, 0), (3, 1, 2)), whole()["cube"][2:5, 1:2, 0:2])
    assert cube.part((6, 0, 0), (0, 2, 2)).shape == (0, 2, 2)
