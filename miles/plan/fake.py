"""Runs real code on numbers that are not there: fake ranks, and fake tensors wherever a tensor is large or holds numbers.

Small tensors of indices stay real, so that code which looks at them (which token is read from where, how many labels a
chunk has) takes the very path that it takes in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from miles.plan.counter import TRANSPORT

SMALL = 2**20  # elements of a tensor that may be real
READ, LIFT = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.lift_fresh.default


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """A default process group of `world_size` ranks in which this process is rank 0 and nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_numbers() -> Iterator[None]:
    """Inside of it new tensors of numbers are fake: they have shape, dtype and storage size, and no memory.

    Reading one gives 1 or True, so that nothing looks non-finite or empty.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), _RealIndices():
        yield


class _RealIndices(TorchDispatchMode):
    """Decides, for each operation, between the fake mode around it and a real result."""

    def __init__(self) -> None:
        super().__init__()
        self._by_value: set[Any] = set()  # operations whose result's shape depends on values

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, FakeTensor) for tensor in given):
            return _answer(args[0]) if func is READ else func(*args, **kwargs)
        if func.namespace in TRANSPORT or not (given or _makes_indices(func, kwargs)):
            return func(*args, **kwargs)
        if not self._surely_small(func) and self._is_large(func, args, kwargs):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _surely_small(self, func: Any) -> bool:
        """One number, a change in place, a constant of the code, or what no shape can be told of beforehand."""
        return func in (READ, LIFT) or func._schema.is_mutable or func in self._by_value

    def _is_large(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """By the fake result; where there is none, the result depends on values, and is as small as indices are."""
        try:
            out = func(*args, **kwargs)
        except Exception:  # each operation has an error of its own for it
            self._by_value.add(func)
            return False
        return any(leaf.numel() > SMALL for leaf in tree_leaves(out) if isinstance(leaf, Tensor))


def _answer(tensor: Tensor) -> bool | int | float:
    if tensor.dtype is torch.bool:
        return True
    return 1.0 if tensor.dtype.is_floating_point else 1


def _makes_indices(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation without a tensor among its inputs makes integers or booleans."""
    dtype = kwargs.get("dtype")
    if dtype is None:
        return func.overloadpacket is torch.ops.aten.arange
    return not (dtype.is_floating_point or dtype.is_complex)
