"""Log-probabilities and entropies from hidden states, a few tokens at a time: logits exist one chunk long.

Kept for the backward are hidden states, labels, log-normalisers and entropies; the logits of a chunk are made again there
(measured: for 4096 tokens and 49152 symbols 0.25 GiB instead of 3.8). Probabilities come from `softmax`, whose exponentials
are three times as fast on a CPU as those of `exp` and `logsumexp`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.products import linear, product


@dataclass(frozen=True)
class Head:
    """logits = softcap(scale * (hidden @ weight.T + bias)) / temperature, in float32."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None  # c * tanh(x / c)
    temperature: float = 1.0
    chunk: int = 1024  # hidden states whose logits exist at the same time

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, H] -> [M, V] float32, a new tensor."""
        out = linear(hidden.float(), self.weight.float(), self.bias)
        if self.scale != 1.0:
            out *= self.scale
        if self.softcap is not None:
            out.div_(self.softcap).tanh_().mul_(self.softcap)
        return out if self.temperature == 1.0 else out.div_(self.temperature)

    def input_gradient(self, grad: Tensor, logits: Tensor) -> Tensor:
        """From the gradient of `logits` to that of hidden @ weight.T + bias; overwrites both."""
        if self.softcap is not None:
            grad *= 1 - logits.mul_(self.temperature / self.softcap).square_()
        factor = self.scale / self.temperature
        return grad if factor == 1.0 else grad.mul_(factor)


def token_logprobs(
    hidden: Tensor, head: Head, labels: Tensor, rows: Tensor, with_entropy: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each label, and the entropy of each row; with gradients to hidden states, weight and bias.

    hidden: [M, H]; labels: [n] int64; rows: [n] int64 ascending, the hidden state that label i is read from: several labels
    may share one. Returns [n] float32, and [M] float32, over the full vocabulary at the head's temperature (-inf logits
    count as absent), or None.
    """
    logprobs, entropy = _TokenLogprobs.apply(hidden, head.weight, head.bias, head, labels, rows, with_entropy)
    return logprobs, (entropy if with_entropy else None)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        labels: Tensor,
        rows: Tensor,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(len(labels), dtype=torch.float32)
        normalisers = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy = torch.zeros_like(normalisers)
        for part, own in _chunks(len(hidden), rows, head.chunk):
            logits = head.logits(hidden[part])
            probabilities = logits.softmax(1)
            normaliser = logits.amax(1) - probabilities.amax(1).log_()  # the largest logit has p = exp(0) / sum
            logprobs[own] = logits[rows[own] - part.start, labels[own]] - normaliser[rows[own] - part.start]
            normalisers[part] = normaliser
            if with_entropy:
                entropy[part] = normaliser - _expectation(logits, probabilities)
            del logits, probabilities  # before the next chunk has its own
        ctx.save_for_backward(hidden, weight, bias, labels, rows, normalisers, entropy)
        ctx.head = replace(head, weight=weight.new_empty(0), bias=None)
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, rows, normalisers, entropy = ctx.saved_tensors
        head = replace(ctx.head, weight=weight, bias=bias)
        out = _Gradients.zeros(hidden, weight, bias, ctx.needs_input_grad)
        if grad_logprobs is None:
            grad_logprobs = normalisers.new_zeros(len(labels))
        by_row = torch.zeros_like(normalisers).index_add_(0, rows, grad_logprobs)
        for part, own in _chunks(len(hidden), rows, head.chunk):
            logits = head.logits(hidden[part])
            grad = logits.softmax(1)
            if grad_entropy is None:
                grad.mul_(-by_row[part, None])
            else:
                logp = logits - normalisers[part, None]
                grad = _with_entropy(grad, logp, entropy[part, None], grad_entropy[part, None], by_row[part, None])
            grad.index_put_((rows[own] - part.start, labels[own]), grad_logprobs[own], accumulate=True)
            out.add(head.input_gradient(grad, logits), hidden, weight, part)
            del logits, grad
        return out.hidden, out.typed(out.weight, weight), out.typed(out.bias, bias), None, None, None, None


@dataclass(frozen=True)
class _Gradients:
    """Those that are asked for; weight and bias gather in float32."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def zeros(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> _Gradients:
        return cls(
            torch.empty_like(hidden) if needed[0] else None,
            torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None,
            torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needed[2] else None,
        )

    def add(self, grad: Tensor, hidden: Tensor, weight: Tensor, part: slice) -> None:
        """grad: of hidden[part] @ weight.T + bias."""
        if self.hidden is not None:
            self.hidden[part] = product(grad, weight.float()).to(hidden.dtype)
        if self.weight is not None:
            self.weight.addmm_(grad.T, hidden[part].float())
        if self.bias is not None:
            self.bias.add_(grad.sum(0))

    @staticmethod
    def typed(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
        return None if grad is None or like is None else grad.to(like.dtype)


def _with_entropy(p: Tensor, logp: Tensor, entropy: Tensor, grad_entropy: Tensor, grad_logprobs: Tensor) -> Tensor:
    """-p * (grad_logprobs + grad_entropy * (log p + entropy)); absent symbols have p = 0 and log p = -inf: 0.

    d log p(y) / d logit = [y] - p, of which the caller adds [y]; d entropy / d logit = -p * (log p + entropy).
    """
    slope = logp.add_(entropy).mul_(grad_entropy).add_(grad_logprobs)
    return torch.where(p > 0, p * slope, 0).neg_()


def _expectation(logits: Tensor, probabilities: Tensor) -> Tensor:
    """[M], sum of p * logit, where absent symbols (-inf) count nothing."""
    mean = torch.linalg.vecdot(probabilities, logits)
    if torch.isfinite(mean).all():
        return mean
    return torch.linalg.vecdot(probabilities, logits.masked_fill(probabilities == 0, 0))


def _chunks(states: int, rows: Tensor, size: int) -> Iterator[tuple[slice, slice]]:
    """Slices of the hidden states, each with the slice of the labels that are read from it."""
    starts = range(0, states, size)
    bounds = torch.searchsorted(rows, torch.tensor([*starts, states], device=rows.device)).tolist()
    for start, first, last in zip(starts, bounds, bounds[1:], strict=False):
        yield slice(start, min(start + size, states)), slice(first, last)
