from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from miles.config.schema import Learner
from miles.errors import ConfigError
from miles.learn.blocks import Blocks, blocks_of
from miles.learn.forward import Compute, policy_logprobs
from miles.learn.pack import pack
from miles.learn.tiny import FAMILIES, tiny_model


def run(groups, model, blocks=None):
    """Gradients, and how often each block's own code ran."""
    calls = [0]

    def count(*_):
        calls[0] += 1

    handles = [block.register_forward_pre_hook(count) for block in blocks_of(model.base_model)] if blocks else []
    step = groups.step(groups.draw(count=2))
    compute = Compute.of(groups.recipe(), model)

    def passes():
        for batch in pack(step, step.samples, groups.TREE):
            policy_logprobs(model, batch, compute)[0].sum().backward()

    if blocks is None:
        passes()
    else:
        with blocks.active():
            passes()
    for handle in handles:
        handle.remove()
    return groups.gradients(model), calls[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_blocks_give_the_same_gradients(groups, family):
    expected, _ = run(groups, tiny_model(family))
    model = tiny_model(family)
    blocks = Blocks([model.base_model], Learner(gradient_checkpointing=True))
    found, calls = run(groups, model, blocks)
    assert groups.largest_difference(found, expected) < 1e-6
    assert calls == 2 * 2, "each of two blocks runs in the forward and again in the backward"


def test_outside_of_the_learner_blocks_take_a_cache(groups):
    model = tiny_model("llama")
    ids = torch.arange(3, 9)[None]
    expected = model(input_ids=ids).logits
    Blocks([model.base_model], Learner(gradient_checkpointing=True, compile=True), backend="eager")
    cached = model(input_ids=ids[:, :4], use_cache=True)
    rest = model(input_ids=ids[:, 4:], past_key_values=cached.past_key_values, use_cache=True).logits
    torch.testing.assert_close(torch.cat([cached.logits, rest], 1), expected, atol=1e-5, rtol=1e-5)
    assert not any(module.training for module in model.modules())


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler itself looks at it
def test_compiled_blocks_give_the_same_gradients_and_are_left_behind(groups):
    expected, _ = run(groups, tiny_model("llama"))
    model = tiny_model("llama")
    blocks = Blocks([model.base_model], Learner(compile=True), backend="eager")
    assert all(block._compiled_call_impl is None for block in blocks_of(model.base_model))
    with blocks.active():
        assert all(block._compiled_call_impl is not None for block in blocks_of(model.base_model))
    found, _ = run(groups, model, blocks)
    assert groups.largest_difference(found, expected) < 1e-5


def test_a_model_that_cannot_recompute_says_so(groups):
    model = tiny_model("llama")
    model.base_model.supports_gradient_checkpointing = False
    with pytest.raises(ConfigError, match=r"learner\.gradient_checkpointing is set, but LlamaModel"):
        Blocks([model.base_model], Learner(gradient_checkpointing=True))


class _Count(TorchDispatchMode):
    """How often each operation was called."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_selective_recomputing_makes_no_product_again(groups, family):
    expected, _ = run(groups, tiny_model(family))
    products = {}
    for kind in (False, "selective", True):
        model = tiny_model(family)
        blocks = Blocks([model.base_model], Learner(gradient_checkpointing=kind))
        with _Count() as count:
            found, _ = run(groups, model, blocks)
        assert groups.largest_difference(found, expected) < 1e-6
        products[kind] = count.calls[torch.ops.aten.mm] + count.calls[torch.ops.aten.addmm]
    assert products["selective"] == products[False] < products[True]
