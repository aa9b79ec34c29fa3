"""Draws one token for each sample from its own random stream, and the log-probability of what it drew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_BLOCK = 64  # vocabulary entries summed at a time: the inverse of the distribution is found in two short searches
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# exp needs no shift while the largest logit lies in this range: sums stay finite and what underflows has p < 1e-29.
_SAFE_TOP = (-20.0, 60.0)


@dataclass(frozen=True, slots=True)
class Draw:
    """What was drawn for each of n samples. `finite` is False where the logits hold NaN or infinity: no token then."""

    token_ids: list[int]
    logprobs: list[float]  # at the sampling temperature, over the whole vocabulary; at temperature 1 when greedy
    finite: list[bool]


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> np.ndarray:
    """[n] float64 in [0, 1): number `indices[i]` of the random stream `seeds[i]`, whatever stands beside it.

    Counter based, so a stream has no state to carry: the SplitMix64 output function (Steele, Lea and Flood 2014)
    applied to the seed, and again to the sum of that and the counter's multiple of the golden gamma.
    """
    streams = _mix(np.asarray(seeds, dtype=np.uint64) + _GOLDEN)
    counters = np.asarray(indices, dtype=np.uint64) + np.uint64(1)
    return (_mix(streams + counters * _GOLDEN) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@torch.inference_mode()
def draw(
    logits: Tensor, temperatures: Sequence[float], seeds: Sequence[int], indices: Sequence[int], rows: Sequence[int]
) -> Draw:
    """One token for each of n samples; sample i reads row `rows[i]` of `logits`, [R, V] of any float type and layout.

    `temperatures` [n]; 0 takes the largest logit, the first one of equals. Samples that share a row must share its
    temperature. Otherwise the token is the inverse of the distribution function at `uniforms(seeds, indices)`, which
    needs one random number a token. Sums run in float32 over 64 entries and in float64 over the rest.

    `logits` is overwritten: at 64 rows and 50,000 tokens each copy costs as much as the whole draw.
    """
    scores = _scaled(logits, temperatures, rows)
    tops = scores.amax(dim=1)
    low, high = _SAFE_TOP
    shift = torch.where((tops >= low) & (tops <= high), 0.0, tops)
    if bool(shift.any()):  # also where NaN
        scores -= shift[:, None]
    index = torch.as_tensor(rows, device=logits.device)
    best = scores.argmax(dim=1)[index] if min(temperatures) == 0 else None

    weights = scores.exp_()
    masses, blocks = _block_masses(weights)
    target = torch.from_numpy(uniforms(seeds, indices)).to(logits.device) * masses[index, -1]
    tokens = _invert(weights, masses, blocks, index, target)
    if best is not None:
        greedy = torch.as_tensor([t == 0 for t in temperatures], device=logits.device)
        tokens = torch.where(greedy, best, tokens)
    logprobs = weights[index, tokens].double().log() - masses[index, -1].log()
    finite = torch.isfinite(tops)[index] & torch.isfinite(logprobs)
    return Draw(tokens.tolist(), logprobs.tolist(), finite.tolist())


def _scaled(logits: Tensor, temperatures: Sequence[float], rows: Sequence[int]) -> Tensor:
    """[R, V] float32 logits over the temperature (over 1 when greedy)."""
    scores = logits.float().contiguous()  # a row's bits may depend on its layout
    if all(t in (0.0, 1.0) for t in temperatures):
        return scores
    divisor = [1.0] * len(scores)
    for row, temperature in zip(rows, temperatures, strict=True):
        divisor[row] = temperature or 1.0
    return scores.div_(torch.tensor(divisor, device=scores.device)[:, None])


def _block_masses(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Running sums [R, B] float64 over blocks of `_BLOCK` entries, and the blocks' own sums [R, B] float64."""
    whole = weights.shape[1] // _BLOCK * _BLOCK
    parts = []
    if whole:
        parts.append(weights[:, :whole].unflatten(1, (-1, _BLOCK)).sum(dim=2))
    if whole < weights.shape[1]:
        parts.append(weights[:, whole:].sum(dim=1, keepdim=True))
    blocks = torch.cat(parts, dim=1).double()
    return blocks.cumsum(dim=1), blocks


def _invert(weights: Tensor, masses: Tensor, blocks: Tensor, rows: Tensor, target: Tensor) -> Tensor:
    """[n] int64: the first entry whose running mass exceeds the target. An entry without mass is never taken."""
    masses, blocks = masses[rows], blocks[rows]
    block = _first_above(masses, target)
    before = (masses.gather(1, block[:, None]) - blocks.gather(1, block[:, None])).squeeze(1)
    entries = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=rows.device)
    inside = entries < weights.shape[1]
    entries = entries.clamp(max=weights.shape[1] - 1)
    local = torch.where(inside, weights[rows[:, None], entries], 0.0).double()
    return entries[:, 0] + _first_above(local.cumsum(dim=1), target - before)


def _first_above(running: Tensor, target: Tensor) -> Tensor:
    """[n] int64: index of the first running sum above the target, and never behind the last one that rises."""
    first = (running <= target[:, None]).sum(dim=1)
    last = (running < running[:, -1:]).sum(dim=1)
    return torch.minimum(first, last)
