"""Frozen linear layers whose weights are stored in 8 or 4 bits and are put back for each product.

QLoRA, arXiv:2305.14314: 4 bits are NF4 (section 3), 8 bits the dynamic blockwise code of arXiv:2110.02861. bitsandbytes does
both; it is imported when a layer is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

BLOCK = 64
"""Weights of a row that share one scale."""
KIND = "nf4"


class QuantizedLinear(nn.Linear):
    """A linear layer without gradients of its own; x [..., K] -> [..., N]. Rows stand in `codes` and `scales` one after the
    other, so both can be sharded by rows."""

    def __init__(self, layer: nn.Linear, bits: int) -> None:
        """Quantises the weights of a layer whose inputs are a multiple of `BLOCK`. bits: 8 or 4."""
        import bitsandbytes.functional as library

        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bits = layer.in_features, layer.out_features, bits
        self.dtype = layer.weight.dtype
        weight = layer.weight.detach().contiguous()
        levels = library.create_dynamic_map().to(weight.device) if bits == 8 else torch.empty(0, device=weight.device)
        self.register_buffer("levels", levels, persistent=False)
        if bits == 8:
            codes, scales = torch.ops.bitsandbytes.quantize_blockwise(weight, levels, BLOCK)
        else:
            codes, scales = torch.ops.bitsandbytes.quantize_4bit(weight, BLOCK, KIND, torch.uint8)
        self.codes = nn.Parameter(codes.view(self.out_features, -1), requires_grad=False)
        self.scales = nn.Parameter(scales.view(self.out_features, -1).float(), requires_grad=False)
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[N, K], put back: what products are made with."""
        return self.weight_of(self.codes, self.scales)

    def weight_of(self, codes: Tensor, scales: Tensor) -> Tensor:
        """[N, K] from codes and scales of all rows."""
        return _weight(codes, scales, self.levels, self.bits, self.in_features, self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """The weights are put back in the backward again, instead of being kept for it."""
        shape = (self.levels, self.bits, self.in_features, self.dtype)
        return _Product.apply(input, self.codes, self.scales, self.bias, *shape)


def _weight(codes: Tensor, scales: Tensor, levels: Tensor, bits: int, width: int, dtype: torch.dtype) -> Tensor:
    if bits == 8:
        return torch.ops.bitsandbytes.dequantize_blockwise(codes, scales.flatten(), levels, BLOCK, dtype)
    shape = [len(codes), width]
    return torch.ops.bitsandbytes.dequantize_4bit(codes.view(-1, 1), scales.flatten(), BLOCK, KIND, shape, dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, levels: Tensor, *shape: Any
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, levels)
        ctx.shape = shape
        return F.linear(x, _weight(codes, scales, levels, *shape), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        codes, scales, levels = ctx.saved_tensors
        to_x = grad @ _weight(codes, scales, levels, *ctx.shape) if ctx.needs_input_grad[0] else None
        return to_x, None, None, None, None, None, None, None
