"""LoRA products on a CPU, inside of vLLM's workers: one matrix product for each adapter in the batch.

vLLM's own way copies an adapter's weights once for every token. A run's tokens nearly all use one adapter, so the copies are
all the same; measured on a 135M model at rank 16 they cost many times the model itself.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def by_adapter(x: Tensor, stacked: Tensor, slots: Tensor) -> Tensor:
    """[n, out]: row i of x [n, in] times the weight [out, in] in slot slots[i] of `stacked` [slots, (1,) out, in].

    Rows of slot -1 have no adapter and get zeros.
    """
    weights = stacked.squeeze(1) if stacked.dim() == 4 else stacked
    first = int(slots[0])
    if bool((slots == first).all()):
        return x @ weights[first].T if first >= 0 else x.new_zeros(len(x), weights.shape[1])
    out = x.new_zeros(len(x), weights.shape[1])
    for slot in slots.unique().tolist():
        if slot >= 0:
            rows = slots == slot
            out[rows] = x[rows] @ weights[slot].T
    return out


def shrink(wrapper: Any, y: Tensor, x: Tensor, stacked: Tensor, scale: float) -> None:
    """y[:, :rank] = scale * A x."""
    if not wrapper.no_lora:
        product = by_adapter(x.to(y.dtype), stacked.to(y.dtype), wrapper.token_lora_indices)
        y[:, : product.shape[1]] = scale * product


def expand(wrapper: Any, y: Tensor, x: Tensor, stacked: Tensor, offset: int, size: int, add_inputs: bool) -> None:
    """y[:, offset : offset + size] += B x, or = without `add_inputs`."""
    if not wrapper.no_lora:
        product = by_adapter(x.to(y.dtype), stacked.to(y.dtype), wrapper.token_lora_indices)
        place = y[:, offset : offset + size]
        place.copy_(place + product if add_inputs else product)


def install(wrapper_class: Any) -> None:
    """Give vLLM's `PunicaWrapperCPU` these products."""
    wrapper_class._shrink_prefill = wrapper_class._shrink_decode = shrink
    wrapper_class._expand_slice_prefill = wrapper_class._expand_slice_decode = expand
