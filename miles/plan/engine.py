"""What sampling holds on a learner's rank while it collects: a whole copy of the weights, keys and values, logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles.algo import find
from miles.plan.shape import Lengths

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from miles.config.schema import Recipe

ROOM = 256  # tokens of room that a cache may make beyond what it holds


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on each rank of the learner; all 0 where the engine has machines of its own."""

    weights: float  # gathered from all ranks while collecting; 0 on one rank, which samples with the learner's own
    cache: float  # keys and values
    logits: float

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.logits

    def smaller(self, part: float) -> EngineMemory:
        """With `part` of the samples at the same time."""
        return EngineMemory(self.weights, part * self.cache, part * self.logits)


def samples_here(recipe: Recipe) -> bool:
    """Whether completions are sampled in the learner's own processes: not by servers, nor read as recorded answers."""
    return recipe.engine.kind != "vllm" and find(recipe.algorithm.name).data == "prompts"


def engine_memory(recipe: Recipe, config: PreTrainedConfig, parameters: int, width: int, ranks: int) -> EngineMemory:
    """parameters: of the model; width: bytes of one number of the weights that sample, and of keys and values."""
    if not samples_here(recipe):
        return EngineMemory(0.0, 0.0, 0.0)
    samples = recipe.algorithm.groups_per_step * recipe.rollout.group_size
    running = min(recipe.engine.max_batch, -(-samples // ranks))
    vocabulary = config.get_text_config().vocab_size
    return EngineMemory(
        weights=float(parameters * width) if ranks > 1 else 0.0,
        cache=float(running * cache_bytes(config, Lengths.of(recipe, config), recipe.rollout.group_size, width)),
        logits=3.0 * 4 * running * vocabulary,  # logits, noise and probabilities, fp32
    )


def cache_bytes(config: PreTrainedConfig, lengths: Lengths, group_size: int, width: int) -> int:
    """Keys and values of one sample: those of its answer, and its part of those of the prompt, which a group shares."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    tokens = lengths.completion + ROOM + -(-(lengths.prompt + ROOM) // group_size)
    return 2 * text.num_hidden_layers * heads * size * width * tokens
