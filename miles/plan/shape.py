"""The model of a recipe as its config alone, at any depth, and the fullest micro-batch that its rows can make."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM

from miles.errors import ModelError
from miles.learn.attention import FULL, SLIDING, Attention
from miles.learn.blocks import blocks_of
from miles.learn.hub import one_line
from miles.learn.learner import attention_half
from miles.learn.load import context_length
from miles.learn.pack import pack
from miles.learn.quiet import quiet
from miles.learn.rows import Layout
from miles.learn.step import Step, build_step
from miles.types import Batch, Group, Sample, Segment

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from miles.config.schema import Recipe

USUAL_PROMPT = 512  # tokens, where the recipe does not say


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest sample."""

    prompt: int
    completion: int

    @classmethod
    def of(cls, recipe: Recipe, config: PreTrainedConfig) -> Lengths:
        """Prompts as long as `data.max_prompt_tokens` allows; where it is not set, as the context leaves, 512 at most."""
        completion, prompt = recipe.rollout.max_new_tokens, recipe.data.max_prompt_tokens
        if prompt is None:
            context = context_length(config)
            prompt = USUAL_PROMPT if context is None else max(1, min(USUAL_PROMPT, context - completion))
        return cls(prompt, completion)

    @property
    def total(self) -> int:
        return self.prompt + self.completion


def new_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A causal language model as its class initialises it, fp32, in eval mode. Raises ModelError."""
    try:
        with quiet():
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise ModelError(f"this config makes no causal language model: {one_line(error)}") from error


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The same on the meta device: shapes alone."""
    with torch.device("meta"):
        return new_model(config)


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """The same model with its first `layers` blocks."""
    short = copy.deepcopy(config)
    text = short.get_text_config()
    depth = text.num_hidden_layers
    for key, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == depth:
            setattr(text, key, value[:layers])
    text.num_hidden_layers = layers
    return short


def depths(config: PreTrainedConfig) -> tuple[int, int]:
    """Two numbers of blocks from which the whole depth follows, or the depth twice where it is small.

    Four blocks have a first, a second, one in the middle and a last one; the second number adds whole periods of the
    kinds of layers.
    """
    text = config.get_text_config()
    depth, period = text.num_hidden_layers, period_of(getattr(text, "layer_types", None) or [])
    low = -(-4 // period) * period
    high = low + period
    return (low, high) if high < depth else (depth, depth)


def period_of(kinds: list[str]) -> int:
    """After how many layers their kinds repeat."""
    return next((n for n in range(1, len(kinds)) if all(a == b for a, b in zip(kinds, kinds[n:], strict=False))), 1)


def microbatches(recipe: Recipe, model: PreTrainedModel, lengths: Lengths, tokens: int) -> tuple[Step, list[Batch]]:
    """One rank's share of an update, all samples as long as they may be, and its batches of `tokens`, the fullest first.

    Of a share that fills many batches only so many samples are made as fill a few.
    """
    few = min(_samples(recipe), 3 * max(1, tokens // lengths.completion))
    groups = longest_groups(lengths, few, recipe.rollout.group_size, model.config.get_text_config().vocab_size)
    step = build_step(groups, 0, recipe.reward, recipe.rollout.max_new_tokens)
    attention = Attention.of(model.config.get_text_config())
    exact = set(attention.kinds) <= {FULL, SLIDING}
    block = blocks_of(model.base_model)[:1]
    layout = Layout(
        share=exact and recipe.learner.prefix_sharing == "auto",
        pack=exact,
        tokens_per_batch=tokens,
        attention_half=attention_half(model, sum(p.numel() for b in block for p in b.parameters())),
    )
    batches = pack(step, step.samples, layout)
    return step, sorted(batches, key=_fullness, reverse=True)


def share_tokens(recipe: Recipe, lengths: Lengths) -> int:
    """Most tokens that one rank can read in an update, prompts stored once for each group: more in a micro-batch is nothing."""
    samples = _samples(recipe)
    return samples * lengths.completion + -(-samples // min(recipe.rollout.group_size, samples)) * lengths.prompt


def ranks_of(recipe: Recipe) -> int:
    """Ranks that the recipe spreads its models over."""
    return recipe.parallel.shard * recipe.parallel.replicate


def _samples(recipe: Recipe) -> int:
    """Of an update, the most that one rank trains."""
    samples = recipe.algorithm.groups_per_step * recipe.rollout.group_size
    return -(-samples // (recipe.learner.minibatches * ranks_of(recipe)))


def longest_groups(lengths: Lengths, samples: int, group_size: int, vocabulary: int) -> list[Group]:
    """At least `samples` samples in groups of at most `group_size`. Of one group only the prompt is shared."""
    size = min(group_size, samples)
    return [
        Group(ordinal, ordinal, tuple(_sample(ordinal, number, lengths, vocabulary) for number in range(size)))
        for ordinal in range(-(-samples // size))
    ]


def _fullness(batch: Batch) -> tuple[int, int]:
    return batch.rows * (batch.width or 0), batch.width or 0


def _sample(ordinal: int, number: int, lengths: Lengths, vocabulary: int) -> Sample:
    prompt, completion = range(ordinal, ordinal + lengths.prompt), range(number, number + lengths.completion)
    tokens = tuple(token % vocabulary for token in (*prompt, *completion))
    segment = Segment(
        token_ids=tokens,
        loss_mask=(False,) * lengths.prompt + (True,) * lengths.completion,
        behavior_logprobs=(-1.0,) * len(tokens),
        versions=(0,) * len(tokens),
    )
    return Sample((segment,), "length", "", reward=float(number % 2))
