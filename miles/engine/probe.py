"""Finds out, once for each engine, whether the fast path is right for this model and whether its bits stay put."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles.engine.attention import DecodePlan
from miles.engine.kvcache import PromptStore, SampleStore
from miles.engine.linear import Tiles
from miles.engine.policy import LivePolicy, evaluating
from miles.errors import EngineError

_LENGTH, _LONGER, _OTHER_STEPS = 20, 70, 40  # tokens: the sequence, its neighbour, what other rows have sampled
_EXACT = {torch.float32: 1e-3, torch.float64: 1e-3}  # of the logits' spread; a wrong mask is off by the spread itself
_EXACT_HALF = 0.1


@dataclass(frozen=True, slots=True)
class Findings:
    """Whether the fast path may be used, and with which tiles."""

    refusal: str | None  # why not, in words; None: it may
    tiles: Tiles | None = None  # None: products are not cut


def probe(model: Any, deterministic: bool) -> Findings:
    """Compare fast prefill and decode with the model's own forward, and with themselves among other neighbours.

    Two sequences, a handful of forwards. Raises EngineError where the model's own logits
    are not finite, for then nothing can be said.
    """
    wrong_kind = _unknown_layers(model)
    if wrong_kind:
        return Findings(wrong_kind)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or _LONGER + 1
    length, longer = min(_LENGTH, limit - 1), min(_LONGER, limit - 1)
    sequence = torch.randint(0, vocabulary, (length + 1,), generator=generator).tolist()
    neighbour = torch.randint(0, vocabulary, (longer,), generator=generator).tolist()
    tiles = Tiles() if deterministic else None
    policy = LivePolicy(model, tiles)
    reference = _reference(model, sequence)
    try:
        alone, windows = _run(policy, [sequence[:-1]], sequence[-1], rows=3, row=1)
    except Exception as error:  # whatever a foreign family does with our attention, it is not for the fast path
        return Findings(f"its forward does not work with another attention function ({type(error).__name__}: {error})")
    if not windows:
        return Findings("its attention does not go through transformers' attention interface")
    if not _windows_known(model, windows):
        return Findings("it does not tell its attention function the sliding window")
    spread = reference.std(dim=-1, keepdim=True)
    if not bool(((alone - reference).abs() <= _EXACT.get(alone.dtype, _EXACT_HALF) * spread).all()):
        return Findings("its attention differs from plain causal attention")
    if deterministic:
        crowded, _ = _run(policy, [sequence[:-1], neighbour], sequence[-1], rows=70, row=50)
        if not torch.equal(alone, crowded):
            return Findings("matrix products on this machine change a row's bits with its neighbours")
    return Findings(None, tiles)


def _unknown_layers(model: Any) -> str | None:
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    return f"it has layers of kind {', '.join(sorted(kinds))}" if kinds else None


def _windows_known(model: Any, seen: dict[int, int | None]) -> bool:
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is None:
        return not window or not getattr(config, "use_sliding_window", True) or None not in seen.values()
    return all(seen.get(i) is not None for i, kind in enumerate(kinds) if kind == "sliding_attention")


@torch.inference_mode()
def _reference(model: Any, sequence: list[int]) -> Tensor:
    """[2, V]: the model's own logits behind the last two tokens."""
    with evaluating(list(model.modules())):
        ids = torch.tensor([sequence], device=next(model.parameters()).device)
        logits = model(input_ids=ids, use_cache=False).logits[0, -2:]
    if not bool(torch.isfinite(logits).all()):
        raise EngineError("the model's logits are not finite: its weights hold NaN or infinity; nothing was sampled")
    return logits


@torch.inference_mode()
def _run(
    policy: LivePolicy, prompts: list[list[int]], token: int, rows: int, row: int
) -> tuple[Tensor, dict[int, int | None]]:
    """[2, V]: logits behind the first prompt and behind `token` after it, decoded at place `row` of `rows`.

    The other rows continue the second prompt; where there is none, they are padding.
    """
    prompt_cache, sample_cache = PromptStore(), SampleStore()
    prompt_cache.reserve(len(prompts), max(map(len, prompts)))
    first = policy.prefill(prompt_cache, prompts, range(len(prompts)))[0]
    padded = policy.padded_rows(rows)
    others = _OTHER_STEPS if len(prompts) > 1 else 0
    sample_cache.reserve(padded, others + 1)
    neighbour = 1 if len(prompts) > 1 else -1
    owners = [0 if other == row else neighbour for other in range(padded)]
    lengths = [len(prompts[max(0, owner)]) for owner in owners]
    steps = [0 if other == row else others for other in range(padded)]
    plan = DecodePlan(prompt_cache, sample_cache, owners, lengths, steps, policy.device, policy.fewest_rows)
    second = policy.decode(plan, [token if other == row else other % 16 for other in range(padded)], lengths)[row]
    return torch.stack([first, second]), plan.windows_seen
