"""The same memory from a formula: rough, independent of the simulation, and printed beside it as a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from miles.learn.blocks import blocks_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from miles.config.schema import Recipe

MASTER, MOMENTS = 4, 8  # bytes of a trained number, and of AdamW's two moments of it


@dataclass(frozen=True)
class Counts:
    """Numbers of a model, from its shapes."""

    total: int
    block: int  # of the largest block
    blocks: int
    head: int  # of the output head
    outside: int  # of embedding, head and what else stands beside the blocks
    vocabulary: int
    hidden: int
    linears: int  # sum over the block's linear layers of inputs + outputs: what a token leaves in a block
    adapter: int  # numbers of one adapter of rank 1, over all blocks

    @classmethod
    def of(cls, model: PreTrainedModel) -> Counts:
        blocks = blocks_of(model.base_model)
        sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
        total = sum(p.numel() for p in model.parameters())
        head = model.get_output_embeddings().weight
        linears = [m for m in blocks[0].modules() if isinstance(m, nn.Linear)]
        width = sum(layer.in_features + layer.out_features for layer in linears)
        return cls(
            total=total,
            block=max(sizes),
            blocks=len(blocks),
            head=head.numel(),
            outside=total - sum(sizes),
            vocabulary=head.shape[0],
            hidden=head.shape[1],
            linears=width,
            adapter=len(blocks) * width,
        )


@dataclass(frozen=True)
class Analytic:
    """Bytes of one rank."""

    resting: float  # weights and moments
    peak: float


def analytic(recipe: Recipe, counts: Counts, roles: tuple[str, ...], ranks: int, tokens: int) -> Analytic:
    """Weights and moments are exact; the peak is the larger of the optimizer's step and the start of the backward.

    Backward: gathered weights of the root and of two blocks, the inputs of all blocks (all activations without
    recomputation), the activations of one block and its gradients, or the head in fp32 with its gradient.
    """
    trained = [role for role in roles if role in ("actor", "critic")]
    rank = recipe.lora.rank
    width = 2 if recipe.learner.param_dtype == "bf16" else 4
    if rank is None:
        of_role = {role: counts.total - (counts.head if "critic" in role else 0) for role in roles}
        moving = [of_role[role] for role in trained]
        resting = sum(MASTER * size for size in of_role.values()) + MOMENTS * sum(moving)
        full = 1
    else:
        moving = [rank * counts.adapter for _ in trained]
        resting = width * counts.total + (MASTER + MOMENTS) * sum(moving)
        full = 0
    resting, gradients = resting / ranks, MASTER * max(moving) / ranks
    per_token = (4 if rank else width) * counts.linears + 5 * MASTER * counts.hidden
    inputs = width * counts.blocks * counts.hidden * tokens
    kept = inputs if recipe.learner.gradient_checkpointing else counts.blocks * per_token * tokens
    sharded = ranks > 1
    gathered = sharded * width * (counts.outside + 2 * counts.block)
    block = per_token * tokens + full * sharded * (width + MASTER) * counts.block
    head = MASTER * counts.head * (1 + full) + 3 * MASTER * min(tokens, recipe.learner.head_chunk) * counts.vocabulary
    return Analytic(resting, resting + gradients + max(0.0, gathered + kept + max(block, head)))
