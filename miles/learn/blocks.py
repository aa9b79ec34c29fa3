"""The repeated blocks of a trunk, compiled or recomputed in the learner's own forward and backward, and only there.

An engine that samples with the same weights calls the same blocks with a cache, which neither of the two can take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from miles.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from miles.config.schema import Learner


_ATEN = torch.ops.aten
KEPT = [
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    *([torch.ops.mkldnn._linear_pointwise.default] if hasattr(torch.ops.mkldnn, "_linear_pointwise") else []),
]
"""Operations whose results "selective" keeps: what takes the time of a block."""


VARIANTS = 32
"""Forms of one block's code that may be compiled: for each role, with and without gradient, for one row and for several."""


class Blocks:
    """`learner.gradient_checkpointing` and `learner.compile` of some trunks."""

    def __init__(self, trunks: Sequence[PreTrainedModel], settings: Learner, backend: str = "inductor") -> None:
        """backend: of torch.compile. Raises ConfigError for a model that does not know gradient checkpointing."""
        self._blocks = [block for trunk in trunks for block in blocks_of(trunk)]
        self._recompute = settings.gradient_checkpointing is not False
        if self._recompute:
            for trunk in trunks:
                _enable_checkpointing(trunk, selective=settings.gradient_checkpointing == "selective")
        self._compiled = []
        if settings.compile:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
            for block in self._blocks:
                block.compile(dynamic=True, backend=backend)
                self._compiled.append(block._compiled_call_impl)
        self._leave()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Around forwards and their backwards."""
        for block, compiled in zip(self._blocks, self._compiled, strict=False):
            block._compiled_call_impl = compiled
        for block in self._blocks:
            block.training = self._recompute  # of the block alone: what is inside of it stays in eval mode, dropout too
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        for block in self._blocks:
            block.training = False
            block._compiled_call_impl = None


def blocks_of(trunk: nn.Module) -> list[nn.Module]:
    """The longest list of modules that the trunk holds."""
    lists = [child for child in trunk.children() if isinstance(child, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []


def _enable_checkpointing(trunk: PreTrainedModel, *, selective: bool) -> None:
    kept = {"context_fn": partial(create_selective_checkpoint_contexts, KEPT)} if selective else {}
    try:
        trunk.gradient_checkpointing_enable({"use_reentrant": False, **kept})
    except ValueError as error:
        raise ConfigError(
            f"learner.gradient_checkpointing is set, but {type(trunk).__name__} cannot recompute its blocks: set it to false."
        ) from error
