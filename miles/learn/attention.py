"""What a token of a batch may see, as the masks that a model's layers take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from miles.errors import ConfigError
from miles.types import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FULL, SLIDING = "full_attention", "sliding_attention"
Mask = Tensor | dict[str, Tensor] | None


@dataclass(frozen=True)
class Attention:
    """How the layers of a model attend."""

    kinds: tuple[str, ...] = (FULL,)  # of its layers, each once, sorted
    window: int | None = None  # tokens that a sliding layer sees, itself included
    explicit: bool = False  # a mask for every batch: compiled blocks come in two kinds otherwise, with one and without

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Attention:
        """From a text config. One without `layer_types` slides in all layers where it has a `sliding_window`."""
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            kinds = [FULL if window is None else SLIDING]
        return cls(tuple(sorted(set(kinds))), window)

    def mask(self, batch: Batch) -> Mask:
        """[R, 1, L, L] bool, True where row token q sees k; one for each kind where there are two.

        None where every row is one sequence, unless `explicit`: the model's own causal mask says the same and costs less.
        """
        if is_separate(batch) and not self.explicit:
            return None
        seen, distance = visible(batch)
        masks = {FULL: seen}
        if self.window is not None:
            masks[SLIDING] = seen & (distance < self.window)
        chosen = {kind: masks[kind].unsqueeze(1) for kind in self.kinds}
        return chosen if len(chosen) > 1 else chosen[self.kinds[0]]


@dataclass(frozen=True)
class FlexAttention(Attention):
    """The same attention as block masks for `flex_attention`, which never makes an [L, L] tensor and skips empty blocks.

    Blocks are found from nodes and positions, as `visible` finds single places.
    """

    def mask(self, batch: Batch) -> Any:
        """A BlockMask of R rows and L places; one for each kind where there are two. None as in `Attention`."""
        if is_separate(batch) and not self.explicit:
            return None
        windows = {FULL: None, SLIDING: self.window}
        chosen = {kind: _block_mask(batch, windows[kind]) for kind in self.kinds}
        return chosen if len(chosen) > 1 else chosen[self.kinds[0]]


ATTENTIONS = {"sdpa": Attention, "flex": FlexAttention}
"""By `learner.attention`."""


def use_flex(model: PreTrainedModel, device: torch.device) -> None:
    """Makes the model attend by `flex_attention`. Raises ConfigError on a CPU, where it has no backward."""
    if device.type == "cpu":
        raise ConfigError(
            "learner.attention = 'flex', but the learner is on a CPU, where flex attention has no backward: set it to 'sdpa'"
        )
    model.set_attn_implementation("flex_attention")


def _block_mask(batch: Batch, window: int | None) -> BlockMask:
    nodes, positions = rows_of(batch, batch.node_ids), rows_of(batch, batch.position_ids)
    related = ancestors(batch.parents).to(nodes.device)
    reach = nodes.shape[1] + int(positions.max()) + 1 if window is None else window

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = positions[row, query] - positions[row, key]
        seen = related[nodes[row, query], nodes[row, key]] & (distance >= 0) & (distance < reach)
        return seen | (query == key)

    rows, width = nodes.shape
    return create_block_mask(sees, B=rows, H=None, Q_LEN=width, KV_LEN=width, device=nodes.device)


def is_separate(batch: Batch) -> bool:
    """Whether each row holds one sequence and nothing else."""
    return len(batch.parents) == batch.rows and bool((batch.parents < 0).all())


def visible(batch: Batch) -> tuple[Tensor, Tensor]:
    """[R, L, L] bool, token q sees k in its own or an ancestor's node; and [R, L, L] int64, position q - position k.

    Windows count positions, not places in the row. Padding sees itself alone, because a softmax over nothing is NaN.
    """
    nodes, positions = rows_of(batch, batch.node_ids), rows_of(batch, batch.position_ids)
    related = ancestors(batch.parents).to(nodes.device)
    distance = positions[:, :, None] - positions[:, None, :]
    seen = related[nodes[:, :, None], nodes[:, None, :]] & (distance >= 0)
    return seen | torch.eye(nodes.shape[1], dtype=torch.bool, device=nodes.device), distance


def ancestors(parents: Tensor) -> Tensor:
    """[K + 1, K + 1] bool, True where node k is node q or above it; the last row and column, index -1, are padding."""
    above = parents.cpu().numpy()
    related = np.zeros((len(above) + 1, len(above) + 1), dtype=bool)
    for node, parent in enumerate(above):
        if parent >= 0:
            related[node] = related[parent]
        related[node, node] = True
    return torch.from_numpy(related)


def rows_of(batch: Batch, column: Tensor) -> Tensor:
    """[T] -> [R, L], the tokens that the model reads."""
    width = len(column) // batch.rows if batch.width is None else batch.width
    return column[: batch.rows * width].view(batch.rows, width)
