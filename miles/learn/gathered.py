"""Whole parameters for a while: an engine in this process samples with a sharded model without one collective."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from miles.learn.parallel import sharded_modules


@contextmanager
def gathered(root: nn.Module) -> Iterator[None]:
    """Inside, every part of `root` that is sharded holds its whole parameters; entering is collective, leaving is not.

    Its modules run as if nobody had sharded them, so that each rank may make as many forwards as it likes. The memory of
    the whole model is needed, in the type that it computes in. Without shards nothing happens.
    """
    with ExitStack() as stack:
        for module in sharded_modules(root):
            module.unshard()
            stack.callback(module.reshard)
            stack.enter_context(_without_hooks(module))
        yield


@contextmanager
def _without_hooks(module: Any) -> Iterator[None]:
    """FSDP's own hooks would gather and free parameters around every forward; hooks of others stay."""
    state = module._get_fsdp_state()
    names = ("_forward_pre_hooks", "_forward_hooks")
    kept = {name: getattr(module, name) for name in names}
    for name, hooks in kept.items():
        others = ((key, hook) for key, hook in hooks.items() if getattr(hook, "__self__", None) is not state)
        setattr(module, name, OrderedDict(others))
    try:
        yield
    finally:
        for name, hooks in kept.items():
            setattr(module, name, hooks)
