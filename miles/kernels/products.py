"""Matrix products by the library that is fast on this processor.

On a CPU PyTorch multiplies float32 matrices with MKL, which is slow on processors that are not Intel's: measured on an AMD
EPYC (AVX-512, 2 cores), oneDNN is 1.5 to 2.7 times as fast for every shape that a 135M model has, forward and backward.
The choice follows from the processor and the weight's shape alone, never from a measurement, so that equal runs make
equal numbers.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_SMALLEST = 2**15
"""Weights with fewer entries gain nothing: a call of oneDNN costs about 10 microseconds more."""


class Linear(nn.Linear):
    """`nn.Linear` whose product is `linear`. Parameters, names and numbers (to rounding) are the same."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_fast_products(model: nn.Module) -> None:
    """Make every plain `nn.Linear` of the model a `Linear`, in place; nothing is copied, and nothing else changes."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] @ weight.T [K, N] + bias [N] -> [..., N], as `F.linear`, with gradients to all three."""
    if torch.compiler.is_compiling() or not (suits_onednn(weight) and x.dtype == weight.dtype and x.numel()):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _OneDnnLinear.apply(x, weight, bias)
    return _onednn(x, weight, bias)


def product(left: Tensor, right: Tensor) -> Tensor:
    """left [M, K] @ right [K, N], without gradient. `right` is the operand that decides, as a weight does."""
    return _onednn(left, right.T) if suits_onednn(right) and left.numel() else left @ right


def suits_onednn(weight: Tensor) -> bool:
    """Whether products with this weight go to oneDNN."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() >= _SMALLEST
        and type(weight) in (Tensor, nn.Parameter)
        and onednn_is_faster()
    )


@functools.cache
def onednn_is_faster() -> bool:
    """Whether this is an x86 processor that MKL does not favour, and PyTorch was built with oneDNN."""
    if platform.machine().lower() not in ("x86_64", "amd64") or not torch.backends.mkldnn.is_available():
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and _vendor() not in ("GenuineIntel", None)


def _vendor() -> str | None:
    """The processor's vendor as it names itself; None where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("vendor_id")), None)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        to_x = to_weight = to_bias = None
        if ctx.needs_input_grad[0]:
            to_x = _onednn(flat, weight.T).view(x.shape)
        if ctx.needs_input_grad[1]:
            to_weight = _onednn(flat.T, x.reshape(-1, x.shape[-1]).T)
        if ctx.needs_input_grad[2]:
            to_bias = flat.sum(0)
        return to_x, to_weight, to_bias
