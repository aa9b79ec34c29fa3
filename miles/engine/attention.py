"""The attention of live decoding: prompts are stored once for all of their samples, samples beside them.

Registered with transformers under `NAME`; a forward says what it attends to through the keyword `miles_plan`. A plan is
made for one forward, holds which sequence each row belongs to, and computes masks once for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

from miles.engine.kvcache import PromptStore, SampleStore, round_up

NAME = "miles_live"


def live_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    miles_plan: PrefillPlan | DecodePlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, heads, L, d], key and value [B, kv heads, L, d] of this forward's tokens -> [B, L, heads, d].

    Masks come from the plan. Refinements that a family asks for by keyword (soft caps, sinks) are not known here; the
    policy compares its logits with the model's own before it relies on this function.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    miles_plan.windows_seen[module.layer_idx] = sliding_window
    return miles_plan.attend(module.layer_idx, query, key, value, scale, sliding_window), None


AttentionInterface.register(NAME, live_attention)


class PrefillPlan:
    """Prompts side by side in one row of tokens, each seeing itself only; keys and values go to the prompts' slots."""

    def __init__(self, cache: PromptStore, lengths: Sequence[int], slots: Sequence[int]) -> None:
        """`lengths` ascending, so that prompts of one length stand together and are attended in one product."""
        self._cache = cache
        self._runs: list[tuple[int, int, list[int]]] = []  # first token, length, slots
        start = 0
        for length, slot in zip(lengths, slots, strict=True):
            if self._runs and self._runs[-1][1] == length:
                self._runs[-1][2].append(slot)
            else:
                self._runs.append((start, length, [slot]))
            start += length
        self._masks: dict[tuple[int, int], Tensor] = {}
        self.windows_seen: dict[int, int | None] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        """q [1, heads, T, d] -> [1, T, heads, d]; tokens behind the last prompt are padding and stay zero."""
        keys, values = self._cache.layer(layer, k)
        out = q.new_zeros(1, q.shape[2], q.shape[1], v.shape[-1])
        for start, length, slots in self._runs:
            stop = start + len(slots) * length
            # [prompts, heads, length, d]
            qs, ks, vs = (x[0, :, start:stop].unflatten(1, (-1, length)).transpose(0, 1) for x in (q, k, v))
            mask = self._mask(length, window, q)
            attended = F.scaled_dot_product_attention(
                qs, ks, vs, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
            out[0, start:stop] = attended.transpose(1, 2).flatten(0, 1)
            keys[slots, :, :, :length] = ks.transpose(2, 3)
            values[slots, :, :length] = vs
        return out

    def _mask(self, length: int, window: int | None, like: Tensor) -> Tensor | None:
        if window is None or window >= length:
            return None
        if (length, window) not in self._masks:
            place = torch.arange(length, device=like.device)
            behind = place[:, None] - place[None]
            self._masks[length, window] = (behind >= 0) & (behind < window)
        return self._masks[length, window]


class DecodePlan:
    """One new token for each of R rows: row r is sample slot r, and sees the prompt in `prompts[r]` and itself."""

    def __init__(
        self,
        prompt_cache: PromptStore,
        sample_cache: SampleStore,
        prompts: Sequence[int],
        prompt_lengths: Sequence[int],
        steps: Sequence[int],
        device: torch.device,
        fewest_rows: int = 2,
    ) -> None:
        """All [R]: the prompt's slot, -1 where the row is padding; the prompt's length; the tokens already stored.

        fewest_rows: of a product with a prompt; one of fewer takes another path, with other bits.
        """
        self._prompt_cache, self._sample_cache = prompt_cache, sample_cache
        self.windows_seen: dict[int, int | None] = {}
        self._prompt_lengths = torch.tensor(prompt_lengths, device=device)[:, None]
        self._steps = torch.tensor(steps, device=device)[:, None]
        self._all = torch.arange(len(steps), device=device)
        self._prefix = round_up(max(prompt_lengths))
        self._suffix = round_up(max(steps) + 1)
        self._masks: dict[int | None, Tensor] = {}
        members: dict[int, list[int]] = {}
        for row, slot in enumerate(prompts):
            if slot >= 0:
                members.setdefault(slot, []).append(row)
        self._share = max(fewest_rows, *(len(rows) for rows in members.values()))
        self._prompt_slots = list(members)
        filled = [(rows + rows[:1] * self._share)[: self._share] for rows in members.values()]
        self._rows = torch.tensor(filled, device=device).view(-1)
        places = {row: g * self._share + i for g, rows in enumerate(members.values()) for i, row in enumerate(rows)}
        # Where every prompt has as many samples, side by side, as a fresh batch of groups has, nothing need be gathered.
        self._in_order = [row for rows in filled for row in rows] == list(range(len(prompts)))
        self._places = torch.tensor([places.get(row, 0) for row in range(len(prompts))], device=device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        """q [R, heads, 1, d] -> [R, 1, heads, d]. Prompt and own tokens share one softmax, in float32."""
        rows, heads, _, width = q.shape
        kv_heads = k.shape[1]
        share = heads // kv_heads  # queries of one key head
        own_keys, own_values = self._store(layer, k, v)
        slots = self._prompt_slots
        if slots == list(range(len(slots))):
            slots = slice(0, len(slots))
        cached_keys, cached_values = self._prompt_cache.layer(layer, k)
        prompt_keys = cached_keys[slots, :, :, : self._prefix].flatten(0, 1)  # [prompts * kv heads, d, P]
        prompt_values = cached_values[slots, :, : self._prefix].flatten(0, 1)

        q = (q * scaling).reshape(rows, kv_heads, share, width)
        scores = torch.cat(
            [
                self._by_row(torch.bmm(self._by_prompt(q), prompt_keys), kv_heads, share),
                _pair_bmm(q.view(-1, share, width), own_keys.transpose(1, 2)).view(rows, kv_heads, share, -1),
            ],
            dim=-1,
        )
        scores = scores + self._mask(window, scores)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
        shared = torch.bmm(self._by_prompt(weights[..., : self._prefix]), prompt_values)
        own = _pair_bmm(weights[..., self._prefix :].reshape(rows * kv_heads, share, -1), own_values)
        out = self._by_row(shared, kv_heads, share) + own.view(rows, kv_heads, share, -1)
        return out.reshape(rows, 1, heads, -1)

    def _store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write this token's keys and values; all of the rows' own, both [R * kv heads, S, d]."""
        keys, values = self._sample_cache.layer(layer, k)
        rows, steps = len(k), self._steps[:, 0]
        keys[steps, self._all] = k[:, :, 0]
        values[steps, self._all] = v[:, :, 0]
        own_keys, own_values = keys[: self._suffix, :rows], values[: self._suffix, :rows]
        return own_keys.flatten(1, 2).transpose(0, 1), own_values.flatten(1, 2).transpose(0, 1)

    def _by_prompt(self, x: Tensor) -> Tensor:
        """[R, kv heads, share, n] -> [prompts * kv heads, rows of a prompt * share, n]."""
        share, n = x.shape[2:]
        if not self._in_order:
            x = x.index_select(0, self._rows)
        x = x.unflatten(0, (-1, self._share))
        return x.transpose(1, 2).reshape(-1, self._share * share, n)

    def _by_row(self, x: Tensor, heads: int, share: int) -> Tensor:
        """The way back: [prompts * kv heads, rows of a prompt * share, n] -> [R, kv heads, share, n]."""
        x = x.view(-1, heads, self._share, share, x.shape[-1]).transpose(1, 2)
        x = x.reshape(-1, heads, share, x.shape[-1])
        return x if self._in_order else x.index_select(0, self._places)

    def _mask(self, window: int | None, like: Tensor) -> Tensor:
        """[R, 1, 1, P + S] added to the scores: 0 on what the row sees, -inf elsewhere."""
        if window not in self._masks:
            prefix = torch.arange(self._prefix, device=like.device)[None]
            suffix = torch.arange(self._suffix, device=like.device)[None]
            seen_prefix, seen_suffix = prefix < self._prompt_lengths, suffix <= self._steps
            if window is not None:
                position = self._prompt_lengths + self._steps
                seen_prefix = seen_prefix & (position - prefix < window)
                seen_suffix = seen_suffix & (self._steps - suffix < window)
            seen = torch.cat([seen_prefix, seen_suffix], dim=1)
            mask = like.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))
            self._masks[window] = mask[:, None, None]
        return self._masks[window]


def _pair_bmm(left: Tensor, right: Tensor) -> Tensor:
    """`torch.bmm` that never multiplies a single row, which takes another path, with bits that depend on the width."""
    if left.shape[1] > 1:
        return torch.bmm(left, right)
    return torch.bmm(left.expand(-1, 2, -1), right)[:, :1]
