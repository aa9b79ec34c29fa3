"""Counts the bytes that tensors hold, by kind, through every operation of a block of code; the same on real and on fake tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
GATHERED, LOGITS, ACTIVATIONS = "gathered", "logits", "activations"
HOST = "host"  # weights that wait in the machine's own memory
TRANSPORT = ("fsdp", "c10d", "_c10d_functional")  # namespaces of operations that move shards between ranks


@dataclass
class _Held:
    """One storage that is alive."""

    size: int  # bytes
    kind: str
    gone: weakref.ref[Any]  # keeps the callback that takes it out of the count


class LiveBytes(TorchDispatchMode):
    """While it is entered, every storage that an operation makes is counted until it is freed.

    `now` holds bytes by kind; `peaks` the bytes by kind at the fullest moment of each phase. A new storage is of kind
    `activations` (which includes every temporary) unless its tensor ends in the vocabulary's axis, then of kind `logits`,
    or takes part in an exchange between ranks, then `gathered`; `label` says more. Of a sharded tensor this rank's part counts.
    """

    def __init__(self, vocabulary: int = 0) -> None:
        super().__init__()
        self.now: Counter[str] = Counter()
        self.phase = ""
        self.peaks: dict[str, dict[str, int]] = {}
        self._vocabulary = vocabulary
        self._held: dict[int, _Held] = {}
        self._total = 0
        self._tops: Counter[str] = Counter()
        self._muted = 0
        self._undo: list[Callable[[], None]] = []

    def begin(self, phase: str) -> None:
        """What happens from here on belongs to this phase; one that comes again keeps its fullest moment."""
        self.phase = phase
        self._mark()

    def forget_peaks(self) -> None:
        self.peaks.clear()
        self._tops.clear()

    def label(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """These storages are of this kind, whether they were counted already or are older than the count."""
        for tensor in tensors:
            if tensor is not None:
                self._add(_local(tensor), kind)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again, as operations on the local parts
        out = func(*args, **(kwargs or {}))
        if self._muted:
            return out
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        if func.namespace in TRANSPORT:
            self._label_buffers(tree_leaves((args, kwargs)))
        return out

    def __enter__(self) -> LiveBytes:
        self._watch_resizes()
        self._ignore_global_shapes()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        while self._undo:
            self._undo.pop()()

    # --- storages --------------------------------------------------------------------------------------------------

    def _add(self, tensor: Tensor, kind: str | None = None) -> None:
        storage = _storage(tensor)
        if storage is None:
            return
        key = storage._cdata
        held = self._held.get(key)
        if held is None:
            held = _Held(0, kind or self._kind_of(tensor), weakref.ref(storage, lambda _: self._drop(key)))
            self._held[key] = held
            self._change(held, storage.nbytes(), held.kind)
        elif kind is not None and held.kind != kind:
            self._change(held, held.size, kind)

    def _drop(self, key: int) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._change(held, 0, held.kind)

    def _change(self, held: _Held, size: int, kind: str) -> None:
        self.now[held.kind] -= held.size
        self.now[kind] += size
        self._total += size - held.size
        held.size, held.kind = size, kind
        self._mark()

    def _mark(self) -> None:
        if self._total > self._tops.get(self.phase, -1):
            self._tops[self.phase] = self._total
            self.peaks[self.phase] = {kind: size for kind, size in self.now.items() if size}

    def _kind_of(self, tensor: Tensor) -> str:
        return LOGITS if tensor.dim() == 2 and tensor.shape[1] == self._vocabulary else ACTIVATIONS

    def _label_buffers(self, leaves: Iterable[Any]) -> None:
        for tensor in leaves:
            if isinstance(tensor, Tensor) and (storage := _storage(tensor)) is not None:
                held = self._held.get(storage._cdata)
                if held is not None and held.kind == ACTIVATIONS:
                    self._change(held, held.size, GATHERED)

    # --- what no operation shows ------------------------------------------------------------------------------------

    def _watch_resizes(self) -> None:
        """Sharding empties and fills its gathered weights by resizing their storages, which is no operation."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            out = original(storage, size)
            held = self._held.get(storage._cdata)
            if held is not None:
                self._change(held, storage.nbytes(), GATHERED)
            return out

        torch.UntypedStorage.resize_ = resize_
        self._undo.append(lambda: setattr(torch.UntypedStorage, "resize_", original))

    def _ignore_global_shapes(self) -> None:
        """DTensor works out results on fake tensors of global shape, in the fake mode that is active where there is one."""
        original = ShardingPropagator._propagate_tensor_meta_non_cached

        def propagate(propagator: ShardingPropagator, *args: Any, **kwargs: Any) -> Any:
            self._muted += 1
            try:
                return original(propagator, *args, **kwargs)
            finally:
                self._muted -= 1

        ShardingPropagator._propagate_tensor_meta_non_cached = propagate
        self._undo.append(lambda: setattr(ShardingPropagator, "_propagate_tensor_meta_non_cached", original))


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """None for meta tensors, which hold nothing, and for kinds of tensors without a storage."""
    tensor = _local(tensor)
    if tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return None
    return tensor.untyped_storage()
