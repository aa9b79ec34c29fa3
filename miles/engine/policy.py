"""Runs the learner's own model for the engine: its weights as they are now, with our attention."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from miles.engine import attention
from miles.engine.attention import DecodePlan, PrefillPlan
from miles.engine.kvcache import PromptStore
from miles.engine.linear import STEP, Tiles, fewest_rows, tiled_linear
from miles.kernels.products import Linear
from miles.kernels.quantized import QuantizedLinear


class LivePolicy:
    """Prefill and decode of a Hugging Face causal LM whose attention goes through transformers' attention interface.

    Nothing of the model is copied. During a forward the attention implementation in its config and, with tiles, the
    forward of its plain linear layers are ours; before and after, model, config and training flags are as the caller
    left them.
    """

    def __init__(self, model: Any, tiles: Tiles | None) -> None:
        """`tiles`: how products are cut, so that a row's bits do not depend on the other rows. None: not at all."""
        self._model = model
        self._tiles = tiles
        self._modules = list(model.modules())
        self._forwards = (
            {m: functools.partial(tiled_linear, m, tiles.widths(m)) for m in plain_linears(model)} if tiles else {}
        )
        configs = [m.config for m in self._modules if hasattr(getattr(m, "config", None), "_attn_implementation")]
        self._configs = list({id(config): config for config in configs}.values())
        first = next(model.parameters())
        self.device = first.device
        self.fewest_rows = fewest_rows(first.device, first.dtype) if tiles else 2
        # Threads share elementwise work in equal parts, and the end of an uneven part may take another path.
        self._step = math.lcm(STEP, torch.get_num_threads()) if tiles else 1

    def padded_rows(self, rows: int) -> int:
        """How many rows a decode of `rows` samples, or a prefill of `rows` tokens, has."""
        return max(2, -(-rows // self._step) * self._step)

    @torch.inference_mode()
    def prefill(self, cache: PromptStore, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """Logits [len(prompts), V] behind the last token of each prompt; keys and values go to the cache's `slots`."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        lengths = [len(prompts[i]) for i in order]
        padding = [0] * (self.padded_rows(sum(lengths)) - sum(lengths))
        tokens = [token for i in order for token in prompts[i]] + padding
        positions = [place for length in lengths for place in range(length)] + padding
        last = [sum(lengths[: i + 1]) - 1 for i in range(len(order))]
        logits = self._forward(
            PrefillPlan(cache, lengths, [slots[i] for i in order]),
            torch.tensor([tokens], device=self.device),
            torch.tensor([positions], device=self.device),
            torch.tensor(last, device=self.device),
        )[0]
        places = sorted(range(len(order)), key=order.__getitem__)
        return logits[torch.tensor(places, device=self.device)]

    @torch.inference_mode()
    def decode(self, plan: DecodePlan, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Logits [R, V] behind one new token of each row; `tokens` and `positions` [R]."""
        ids = torch.tensor(tokens, device=self.device)[:, None]
        return self._forward(plan, ids, torch.tensor(positions, device=self.device)[:, None], 0)[:, 0]

    def _forward(self, plan: PrefillPlan | DecodePlan, ids: Tensor, positions: Tensor, keep: int | Tensor) -> Tensor:
        with self._ours():
            out = self._model(
                input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep, miles_plan=plan
            )
        return out.logits

    @contextmanager
    def _ours(self) -> Iterator[None]:
        implementations = [config._attn_implementation for config in self._configs]
        with evaluating(self._modules):
            try:
                for config in self._configs:
                    config._attn_implementation = attention.NAME
                for module, forward in self._forwards.items():
                    module.__dict__["forward"] = forward
                yield
            finally:
                for module in self._forwards:
                    module.__dict__.pop("forward", None)
                for config, implementation in zip(self._configs, implementations, strict=True):
                    config._attn_implementation = implementation


def plain_linears(model: Any) -> list[nn.Linear]:
    """The linear layers whose forward is torch's own or ours; one that someone has wrapped is left alone."""
    return [
        m for m in model.modules() if type(m) in (nn.Linear, Linear, QuantizedLinear) and "forward" not in m.__dict__
    ]


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """The modules without dropout and outside compiled code, with their training flags put back afterwards."""
    training = [module for module in modules if module.training]
    compiled = any(getattr(module, "_compiled_call_impl", None) is not None for module in modules)
    with ExitStack() as stack:
        if compiled:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True
