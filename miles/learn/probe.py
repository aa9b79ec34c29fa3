"""Proves, once at start-up, that a model may be trained on packed rows and that its output head is understood.

A config can only say that a model should work: a state that has no mask (linear attention, convolutions) or a mask that a
layer reads otherwise gives wrong numbers without an error. So a small model of the actual class is run both ways.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from miles.errors import ModelError
from miles.learn.attention import FULL, SLIDING, Attention
from miles.learn.forward import Compute, head_of, hidden_states
from miles.learn.pack import build_batch
from miles.learn.step import TrainedSegment
from miles.types import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

TOLERANCE = 1e-4  # of hidden states of size 1
WRONG = 1e-2  # what a wrong mask must at least cost, or the test proves nothing
WINDOW = 4  # below the length of the test's sequences
VOCABULARY = 32


@dataclass(frozen=True)
class Packing:
    """Whether rows may hold several sequences, and why not."""

    exact: bool
    reason: str = ""


def probe_packing(model: PreTrainedModel) -> Packing:
    """Compares packed with separate rows on a small random copy of the model's class, one layer of each kind.

    Leaves the model and the random generators alone.
    """
    attention = Attention.of(model.config.get_text_config())
    if foreign := set(attention.kinds) - {FULL, SLIDING}:
        return Packing(False, f"layers of kind {', '.join(sorted(foreign))} keep a state that no mask can divide")
    reason = ""
    for shrink in (True, False):
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                return _compare(_small_copy(model, attention, shrink))
        except Exception as error:  # whatever a model's code raises here means: not this way
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return Packing(False, f"the model does not take these masks ({reason})")


def check_head(model: PreTrainedModel) -> None:
    """Compares our logits with the model's own on a few tokens; those of a small copy where the model has no memory yet.

    Raises ModelError where they differ.
    """
    if next(model.parameters()).is_meta:
        model = _small_copy(model, Attention.of(model.config.get_text_config()), shrink=True)
    device = next(model.parameters()).device
    size = model.get_output_embeddings().weight.shape[0]
    ids = torch.arange(min(8, size), device=device)[None]
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[0].float()
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        found = head_of(model, 1.0, len(ids[0])).logits(hidden)
    if not expected.isfinite().all():
        raise ModelError(
            f"the weights of {type(model).__name__} give logits that are NaN or infinite, so nothing can be sampled or learnt: "
            "the files are damaged, or the run that wrote them went wrong; take an older model."
        )
    difference = (found - expected).abs().max().item() / max(1.0, expected.abs().max().item())
    if not difference <= TOLERANCE:
        raise ModelError(
            f"the output head of {type(model).__name__} does more to the logits than a product, a bias, a scale and a "
            f"soft cap (they differ by {difference:.1e} of their size), so its log-probabilities would be wrong: choose a "
            "model with a plain head."
        )


def _compare(model: PreTrainedModel) -> Packing:
    attention = Attention.of(model.config.get_text_config())
    compute = Compute(attention)
    sequences = _sequences()
    packed = build_batch([sequences], share=True)
    apart = build_batch([(sequence,) for sequence in sequences], share=False)
    expected = _read_states(model, apart, compute)
    found = _read_states(model, packed, compute)
    if not (difference := _distance(found, expected)) <= TOLERANCE:
        return Packing(False, f"packed and separate rows differ by {difference:.1e}")
    for name, wrong in _wrong(attention, packed):
        if not (cost := _distance(_read_states(model, packed, replace(compute, attention=wrong)), expected)) >= WRONG:
            return Packing(False, f"{name} makes a difference of only {cost:.1e}, so the layers may not read the mask")
    return Packing(True)


@dataclass(frozen=True)
class _Given(Attention):
    """Shows the model these masks, right or wrong."""

    masks: Any = None

    def mask(self, batch: Batch) -> Any:
        return self.masks


def _wrong(attention: Attention, batch: Batch) -> Iterator[tuple[str, Attention]]:
    """Masks that must be noticed: sequences that see each other, and a window that is not kept."""
    width = batch.width or 0
    causal = torch.ones(1, 1, width, width, dtype=torch.bool).tril()
    mixed = len(attention.kinds) > 1
    yield "a mask without boundaries", _Given(masks=dict.fromkeys(attention.kinds, causal) if mixed else causal)
    if SLIDING in attention.kinds:
        wide = replace(attention, window=10**6).mask(batch)
        yield "a mask without the window", _Given(masks=wide)


def _sequences() -> tuple[TrainedSegment, ...]:
    """A prompt and three completions, two of which begin alike."""
    prompt = [3, 7, 1, 9, 4, 12, 5, 8, 2]
    completions = [[6, 11, 13, 5, 1, 2], [6, 11, 4, 9, 2], [10, 3, 2, 8, 7, 2]]
    out = []
    for i, completion in enumerate(completions):
        tokens = np.array(prompt + completion)
        places = np.arange(len(prompt), len(tokens))
        out.append(TrainedSegment(i, tokens, places, places + 100 * i))
    return tuple(out)


def _read_states(model: PreTrainedModel, batch: Batch, compute: Compute) -> Tensor:
    """Hidden states from which trained tokens are predicted, in the order of their slots."""
    order = batch.slots[batch.loss_mask].argsort()
    return hidden_states(model.base_model, batch, compute)[batch.source[batch.loss_mask][order]].float()


def _distance(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().mean()).item()


def _small_copy(model: PreTrainedModel, attention: Attention, shrink: bool) -> PreTrainedModel:
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    _set(text, num_hidden_layers=len(attention.kinds), layer_types=list(attention.kinds), vocab_size=VOCABULARY)
    _set(text, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    if attention.window is not None:
        text.sliding_window = WINDOW
    if shrink:
        _shrink(text)
    small = (
        type(model)
        ._from_config(config, attn_implementation=model.config._attn_implementation, dtype=torch.float32)
        .eval()
    )
    generator = torch.Generator().manual_seed(0)
    embedding = small.get_input_embeddings()
    for parameter in small.parameters():
        if parameter.dim() >= 2:  # large enough that what a token sees shows in its state
            scale = 1.0 if parameter is embedding.weight else parameter.shape[-1] ** -0.5
            nn.init.normal_(parameter, std=scale, generator=generator)
    return small


def _shrink(text: PreTrainedConfig) -> None:
    heads, shared = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
    _set(text, hidden_size=64, intermediate_size=64, num_attention_heads=4, head_dim=16, query_pre_attn_scalar=16)
    if shared is not None:
        text.num_key_value_heads = {heads: 4, 1: 1}.get(shared, 2)
    _set(text, num_local_experts=4, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32)


def _set(config: PreTrainedConfig, **values: Any) -> None:
    """Only keys that the config has, and has a value for."""
    for key, value in values.items():
        if getattr(config, key, None) is not None:
            setattr(config, key, value)
