"""The forward of a batch: hidden states of its rows, and from them log-probabilities and entropies of its trained tokens."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from miles.learn.attention import ATTENTIONS, Attention, rows_of
from miles.learn.logprobs import Head, token_logprobs
from miles.types import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from miles.config.schema import Recipe


@dataclass(frozen=True)
class Compute:
    """How forwards are made, the same for every role."""

    attention: Attention
    temperature: float = 1.0  # of the policy's logits; never of values
    head_chunk: int = 1024
    dtype: torch.dtype = torch.float32  # of the trunk; head, log-probabilities and values are float32

    @classmethod
    def of(cls, recipe: Recipe, model: PreTrainedModel) -> Compute:
        return cls(
            attention=replace(
                ATTENTIONS[recipe.learner.attention].of(model.config.get_text_config()), explicit=recipe.learner.compile
            ),
            temperature=recipe.rollout.temperature,
            head_chunk=recipe.learner.head_chunk,
            dtype=torch.bfloat16 if recipe.learner.param_dtype == "bf16" else torch.float32,
        )

    def at(self, temperature: float | None) -> Compute:
        """The same at another temperature; None: as it is."""
        return self if temperature is None else replace(self, temperature=temperature)

    def cast(self, device: torch.device) -> AbstractContextManager[object]:
        """bf16 copies of the float32 weights inside of it, where that is the dtype."""
        return nullcontext() if self.dtype is torch.float32 else torch.autocast(device.type, self.dtype)


@dataclass(frozen=True)
class Reads:
    """From which hidden states the trained tokens of a batch are predicted; several tokens may share one."""

    tokens: Tensor  # [n] int64, index in T of each trained token, ordered by its state
    rows: Tensor  # [n] int64, index in `states`
    states: Tensor  # [M] int64, index in R * L, ascending

    @classmethod
    def of(cls, batch: Batch) -> Reads:
        tokens = batch.loss_mask.nonzero().squeeze(1)
        states, rows = batch.source[tokens].unique(return_inverse=True)
        order = rows.argsort(stable=True)
        return cls(tokens[order], rows[order], states)

    def spread(self, values: Tensor, batch: Batch) -> Tensor:
        """[n] -> [T] float32, 0 on tokens that are not trained."""
        return values.new_zeros(len(batch.slots)).index_put((self.tokens,), values)


def hidden_states(trunk: nn.Module, batch: Batch, compute: Compute) -> Tensor:
    """[R * L, H], the trunk's last hidden states."""
    ids, mask = rows_of(batch, batch.token_ids), compute.attention.mask(batch)
    shown = {} if mask is None else {"attention_mask": mask, "position_ids": rows_of(batch, batch.position_ids)}
    with compute.cast(ids.device):
        return trunk(input_ids=ids, use_cache=False, **shown).last_hidden_state.flatten(0, 1)


def head_of(model: PreTrainedModel, temperature: float, chunk: int) -> Head:
    """The output head of a causal language model as plain numbers; `probe.check_head` proves that nothing is missing."""
    config, output = model.config.get_text_config(), model.get_output_embeddings()
    return Head(
        weight=output.weight,
        bias=getattr(output, "bias", None),
        scale=(getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0),
        softcap=getattr(config, "final_logit_softcapping", None),
        temperature=temperature,
        chunk=chunk,
    )


def policy_logprobs(
    model: PreTrainedModel, batch: Batch, compute: Compute, with_entropy: bool = True
) -> tuple[Tensor, Tensor | None]:
    """[T] float32 log-probabilities at the sampling temperature, and entropies of the distributions they come from.

    Both are 0 on tokens that are not trained. Gradients reach every weight of the model.
    """
    reads = Reads.of(batch)
    hidden = hidden_states(model.base_model, batch, compute)[reads.states]
    head = head_of(model, compute.temperature, compute.head_chunk)
    logprobs, entropy = token_logprobs(hidden, head, batch.token_ids[reads.tokens], reads.rows, with_entropy)
    entropies = None if entropy is None else reads.spread(entropy[reads.rows], batch)
    return reads.spread(logprobs, batch), entropies
