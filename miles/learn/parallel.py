"""Weights over ranks: the mesh that a recipe asks for, and FSDP2 on each block of a root and then on the rest of it.

Gradients are summed over ranks, never averaged: a loss is divided by the count of the whole update already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from miles.errors import ConfigError, ModelError
from miles.learn.blocks import blocks_of

if TYPE_CHECKING:
    from miles.config.schema import Parallel

REPLICATE, SHARD = "replicate", "shard"


def make_mesh(parallel: Parallel, ranks: int, device_type: str) -> DeviceMesh | None:
    """[replicate, shard], or [shard] where nothing is replicated; None for one rank alone.

    Raises ConfigError where the recipe asks for another number of ranks than there are.
    """
    wanted = parallel.shard * parallel.replicate
    if wanted != ranks:
        raise ConfigError(
            f"parallel.shard = {parallel.shard} times parallel.replicate = {parallel.replicate} is {wanted} ranks, but "
            f"{ranks} {'was' if ranks == 1 else 'were'} started: let `miles train` start them, give torchrun "
            f"--nproc-per-node and --nnodes whose product is {wanted}, or set parallel.shard to {ranks // parallel.replicate or 1}."
        )
    if ranks == 1:
        return None
    if parallel.replicate == 1:
        return init_device_mesh(device_type, (ranks,), mesh_dim_names=(SHARD,))
    return init_device_mesh(device_type, (parallel.replicate, parallel.shard), mesh_dim_names=(REPLICATE, SHARD))


def parallelize(
    root: nn.Module, trunk: nn.Module, mesh: DeviceMesh, *, dtype: torch.dtype = torch.float32, offload: bool = False
) -> None:
    """Shards the parameters of `root` in place: each block of its `trunk` is gathered for its own forward and backward, an
    embedding that is not the head too, and the rest for the whole of the root's.

    dtype: what blocks compute in, from parameters of another type; float32: what they are stored in. Everything else is
    used as it is stored, and gradients are reduced in float32. offload: shards live in host memory. After `Blocks`, which
    compiles and recomputes inside of it. Raises ModelError for a trunk without blocks.
    """
    blocks = blocks_of(trunk)
    if not blocks:
        raise ModelError(
            f"{type(trunk).__name__} has no list of blocks to shard one by one: train it on one rank (parallel.shard = 1), "
            "or choose another model."
        )
    rest = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    inside = rest if dtype is torch.float32 else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    last = inside if inside is rest else MixedPrecisionPolicy(dtype, torch.float32, torch.float32)
    place = _placement(mesh, offload)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=last if block is blocks[-1] else inside, offload_policy=place)
    embedding = _own_embedding(root, trunk)
    if embedding is not None:
        fully_shard(embedding, mesh=mesh, mp_policy=rest, offload_policy=place)
    fully_shard(root, mesh=mesh, mp_policy=rest, offload_policy=place)
    for module in sharded_modules(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # the product with 1 / factor is not known to every backend


def sharded_modules(root: nn.Module) -> list[FSDPModule]:
    """Itself and what is gathered on its own inside."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def free_gathered(roots: Sequence[nn.Module]) -> None:
    """Lets go of what forwards without a backward have left gathered: it would be held, and be stale after an update."""
    for root in roots:
        for module in sharded_modules(root):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of a sharded one: then every rank must ask for it, in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def put(parameter: Tensor, value: Tensor) -> None:
    """Copies a whole tensor, equal on all ranks, into a parameter; of a sharded one each rank its part, without a message."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(value)
        return
    shape, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    box = tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))
    parameter.to_local().copy_(value[box])


def _placement(mesh: DeviceMesh, offload: bool) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()


def _own_embedding(root: nn.Module, trunk: nn.Module) -> nn.Module | None:
    """The input embedding, unless a head of the root uses its weight too."""
    embedding = trunk.get_input_embeddings()
    holders = [m for m in root.modules() if any(p is embedding.weight for p in m.parameters(recurse=False))]
    return embedding if holders == [embedding] else None
