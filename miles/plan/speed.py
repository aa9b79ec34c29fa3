"""How long a step takes, as an estimate from counts of operations and bytes, with everything that it assumes said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles.plan.analytic import Counts
from miles.plan.engine import samples_here
from miles.plan.shape import Lengths

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from miles.config.schema import Recipe

GIGA, TERA = 1e9, 1e12


@dataclass(frozen=True)
class Machine:
    """One GPU and its links, as assumed: nothing of it is measured."""

    tflops: float = 989.0  # dense products a second in bf16, as the maker gives it
    mfu: float = 0.4  # part of it that training reaches
    memory_gbps: float = 3350.0  # bytes a second between a GPU and its memory
    link_gbps: float = 45.0  # bytes a second of one GPU to the others, in collectives


@dataclass(frozen=True)
class Speed:
    """One step of the whole job. Seconds."""

    tokens: int  # that the learner reads: prompts once for each group, completions
    sampled: int  # completions' tokens
    score: float
    update: float
    exchange: (
        float  # part of score and update in which ranks wait for weights or gradients, beyond what computing hides
    )
    collect: float | None  # None: nothing is sampled here

    @property
    def step(self) -> float:
        return self.score + self.update + self.exchange + (self.collect or 0.0)

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens, as the metrics' throughput counts them."""
        return self.sampled / self.step


def estimate(
    recipe: Recipe,
    config: PreTrainedConfig,
    counts: Counts,
    roles: Sequence[str],
    old_scored: bool,
    ranks: int,
    tokens_per_batch: int,
    machine: Machine,
) -> Speed:
    """All samples as long as they may be. Products: 2 operations a weight and token forward, twice that backward."""
    lengths = Lengths.of(recipe, config)
    groups, size = recipe.algorithm.groups_per_step, recipe.rollout.group_size
    tokens, sampled = groups * (lengths.prompt + size * lengths.completion), groups * size * lengths.completion
    lora, recompute = recipe.lora.rank is not None, recipe.learner.gradient_checkpointing
    trained = sum(role in ("actor", "critic") for role in roles)
    scorings = len(roles) - 1 + old_scored
    updates = trained * recipe.learner.epochs * (2 if lora else 3) + trained * recipe.learner.epochs * recompute
    forward = tokens * (2 * counts.total + attention_operations(config, lengths))
    rate = ranks * machine.tflops * TERA * machine.mfu
    score, update = scorings * forward / rate, updates * forward / rate
    width = 2 if recipe.learner.param_dtype == "bf16" else 4
    batches = -(-tokens // (ranks * tokens_per_batch))
    passes = scorings + trained * recipe.learner.epochs * (2 if lora else 4)  # gathers; of gradients fp32 counts as 2
    traffic = 0.0 if ranks == 1 else batches * passes * width * counts.total / (machine.link_gbps * GIGA)
    return Speed(
        tokens, sampled, score, update, max(0.0, traffic - score - update), _collect(recipe, counts, ranks, machine)
    )


def attention_operations(config: PreTrainedConfig, lengths: Lengths) -> float:
    """Of one token forward: scores and sums over what it sees, half of the longest sample on average."""
    text = config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 4.0 * text.num_hidden_layers * text.num_attention_heads * head * lengths.total / 2


def _collect(recipe: Recipe, counts: Counts, ranks: int, machine: Machine) -> float | None:
    """Every sampled token reads all weights once for the samples that run together; the cache is not counted."""
    if not samples_here(recipe):
        return None
    width = 2 if recipe.lora.rank is not None and recipe.learner.param_dtype == "bf16" else 4
    samples = -(-recipe.algorithm.groups_per_step * recipe.rollout.group_size // ranks)
    rounds = -(-samples // recipe.engine.max_batch)
    return rounds * recipe.rollout.max_new_tokens * width * counts.total / (machine.memory_gbps * GIGA)
