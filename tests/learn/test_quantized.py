"""A frozen base in 8 or 4 bits: what is stored, what comes back, and what is trained on it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from miles.engine.policy import plain_linears
from miles.errors import ConfigError
from miles.kernels.quantized import BLOCK, QuantizedLinear
from miles.learn.adapters import layers_of
from miles.learn.learner import Learner
from miles.learn.tiny import tiny_model

pytest.importorskip("bitsandbytes", reason="the extra `quantized` is not installed")

WORST = {8: 0.02, 4: 0.16}
"""Of the largest weight of a block: half of the widest step of the code."""
PPO = {
    "algorithm__name": "ppo", "algorithm__beta": 0.1, "algorithm__kl_place": "reward", "algorithm__groups_per_step": 4,
    "lora__rank": 4, "learner__learning_rate": 1e-2, "learner__eps": 1e-3,
}  # fmt: skip


def groups_module():
    spec = importlib.util.spec_from_file_location("miles_learn_groups", Path(__file__).with_name("groups.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["miles_learn_groups"] = module
    spec.loader.exec_module(module)
    return module


def steps(groups, keys: dict[str, Any], count=2):
    one = Learner(tiny_model("llama"), groups.recipe(**PPO, **keys))
    made, rows = groups.draw(count=4, size=4), []
    for _ in range(count):
        step = one.pack(made)
        rows.append(one.update(step, one.score(step)))
    return one, [{key: value for key, value in row.items() if key != "memory/peak_bytes"} for row in rows]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_layer_holds_its_weights_in_few_bits_and_multiplies_by_what_they_stand_for(bits):
    torch.manual_seed(0)
    plain = nn.Linear(128, 96)
    layer = QuantizedLinear(plain, bits)
    assert layer.codes.nbytes == 128 * 96 * bits // 8
    assert layer.scales.shape == (96, 128 // BLOCK)
    largest = plain.weight.detach().view(96, -1, BLOCK).abs().amax(2).repeat_interleave(BLOCK, 1)
    assert ((layer.weight - plain.weight).abs() <= WORST[bits] * largest).all()
    assert not torch.equal(layer.weight, plain.weight)
    x = torch.randn(5, 128, requires_grad=True)
    layer(x).square().sum().backward()
    other = x.detach().clone().requires_grad_()
    nn.functional.linear(other, layer.weight, plain.bias).square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad, atol=1e-5, rtol=1e-5)
    assert [name for name, _ in layer.named_parameters()] == ["codes", "scales", "bias"]
    assert not layer.codes.requires_grad


def test_the_rows_of_a_layer_are_its_own():
    """So that a shard of rows, put beside another, is the whole."""
    torch.manual_seed(0)
    layer = QuantizedLinear(nn.Linear(128, 6, bias=False), 4)
    parts = [layer.weight_of(layer.codes[a:b], layer.scales[a:b]) for a, b in ((0, 2), (2, 6))]
    assert torch.equal(torch.cat(parts), layer.weight)


@pytest.mark.parametrize("bits", [8, 4])
def test_adapters_learn_on_it_and_the_reference_is_that_base(groups, bits):
    one, rows = steps(groups, {"lora__base_bits": bits}, 3)
    _, plain = steps(groups, {}, 3)
    assert all(type(layer.base) is QuantizedLinear for layer in layers_of(one.model).values())
    assert rows[0]["kl/ref"] == 0.0
    assert rows[-1]["kl/ref"] != 0.0
    assert rows[0]["grad_norm"] == pytest.approx(plain[0]["grad_norm"], rel=0.1)
    assert rows[0]["grad_norm"] != plain[0]["grad_norm"]
    held = {name for tensors in one.roles.tensors().values() for name in tensors}
    assert not any("codes" in name or "scales" in name for name in held)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_policy_that_leaves_is_the_base_that_comes_back_plus_the_adapter(groups, bits):
    one, _ = steps(groups, {"lora__base_bits": bits}, 1)
    merged = tiny_model("llama", seed=4)
    merged.load_state_dict(dict(one.policy_update().weights()), strict=False)
    made = groups.draw(count=2, size=2)
    expected, _ = groups.plain_table(merged, made)
    torch.testing.assert_close(one.logprobs(one.pack(made)), expected, atol=1e-5, rtol=1e-5)


def test_engines_take_its_products_in_tiles_too(groups):
    one, _ = steps(groups, {"lora__base_bits": 4}, 1)
    bases = {id(layer.base) for layer in layers_of(one.model).values()}
    assert bases <= {id(layer) for layer in plain_linears(one.model)}


def test_a_width_that_does_not_divide_is_refused(groups):
    with pytest.raises(ConfigError, match=r"lora.base_bits = 4: .*q_proj has 32 inputs, which is no multiple of 64"):
        Learner(tiny_model("llama", hidden_size=32), groups.recipe(**PPO, lora__base_bits=4))


def job_steps(keys: dict[str, Any]) -> Any:
    return steps(groups_module(), keys)[1]


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_two_ranks_hold_half_of_it_each_and_train_as_one(gang, groups, bits):
    _, expected = steps(groups, {"lora__base_bits": bits})
    for rows in gang.run(2, job_steps, {"lora__base_bits": bits, "parallel__shard": 2}):
        for a, b in zip(rows, expected, strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
