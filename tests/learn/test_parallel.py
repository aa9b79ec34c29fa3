"""What cannot be sharded block by block is refused before anything is sharded."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from miles.config.schema import Lora
from miles.errors import ConfigError, ModelError
from miles.learn.adapters import target_paths
from miles.learn.parallel import parallelize
from miles.learn.tiny import tiny_model


def without_blocks():
    """A model whose layers stand side by side under names of their own."""
    model = tiny_model("llama")
    layers = list(model.model.layers)
    del model.model.layers
    for number, layer in enumerate(layers):
        model.model.add_module(f"layer_{number}", layer)
    return model


def test_a_model_without_a_list_of_blocks_is_named_with_the_way_out():
    model = without_blocks()
    parameters = list(model.parameters())
    with pytest.raises(
        ModelError, match=r"LlamaModel has no list of blocks .*: train it on one rank \(parallel.shard = 1\)"
    ):
        parallelize(model, model.model, DeviceMesh.__new__(DeviceMesh))
    assert list(model.parameters()) == parameters
    assert not any(isinstance(module, nn.ModuleList) for module in model.model.children())


def test_adapters_find_no_place_in_it():
    with pytest.raises(
        ConfigError, match=r"lora.rank is set, but LlamaForCausalLM has no blocks .*: train full weights"
    ):
        target_paths(without_blocks(), Lora(rank=4).targets)
