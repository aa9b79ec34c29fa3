from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from miles.config.schema import Lora
from miles.errors import CheckpointError, ConfigError
from miles.learn.adapters import (
    adapter_parameters,
    attach,
    copy_adapter,
    detach,
    layers_of,
    load_parameters,
    merge,
    merged_weights,
    target_paths,
)
from miles.learn.export import export, export_adapter
from miles.learn.load import weights_hash
from miles.learn.tiny import FAMILIES, tiny_model, tiny_tokenizer

IDS = torch.arange(4, 30)[None]


def logits(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def filled(family="llama", names=("actor", "critic"), tied=True, **lora):
    """A model whose adapters all do something."""
    model = tiny_model(family, tied)
    switch = attach(model, names, Lora(rank=4, **lora), seed=3)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for layer in layers_of(model).values():
            for up in layer.B.values():
                up.weight.normal_(std=0.3, generator=generator)
    return model, switch


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_adapter_changes_nothing_and_none_is_the_base_bit_for_bit(family):
    expected = logits(tiny_model(family))
    model = tiny_model(family)
    switch = attach(model, ["actor", "critic"], Lora(rank=4), seed=0)
    assert torch.equal(logits(model), expected)
    model, switch = filled(family)
    seen = {}
    for name in ("actor", "critic", None):
        switch.adapter = name
        seen[name] = logits(model)
    assert torch.equal(seen[None], expected)
    assert (seen["actor"] - expected).abs().max() > 0.01
    assert (seen["critic"] - seen["actor"]).abs().max() > 0.01


def test_the_product_is_added_in_float32_and_cast_back():
    """A bf16 base of width 64: W x rounds once, the adapter's share is exact before the sum is rounded."""
    base = torch.nn.Linear(64, 8, bias=False, dtype=torch.bfloat16)
    model = tiny_model("llama")
    attach(model, ["actor"], Lora(rank=2, alpha=6.0), seed=0)
    layer = next(iter(layers_of(model).values()))
    layer.base = base
    layer.A["actor"].weight.data.normal_()
    layer.B["actor"].weight = torch.nn.Parameter(torch.randn(8, 2))
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    a, b = layer.A["actor"].weight, layer.B["actor"].weight
    expected = (base(x).float() + 3.0 * (x.float() @ a.T @ b.T)).to(torch.bfloat16)
    assert torch.equal(layer(x), expected)


def test_an_adapter_starts_from_the_seed_its_name_and_its_place():
    def started(seed, name="actor"):
        model = tiny_model("llama")
        attach(model, [name], Lora(rank=4), seed=seed)
        return [p.detach() for p in adapter_parameters(model, name).values()]

    first, same = started(1), started(1)
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not torch.equal(first[0], started(2)[0])
    assert not torch.equal(first[0], started(1, "critic")[0])
    assert first[0].abs().max() <= 64**-0.5
    assert all(not b.any() for b in first[1::2])


@pytest.mark.parametrize(
    ("family", "targets", "count"),
    [
        ("llama", ("all-linear",), 14),
        ("llama", ("q_proj", "down_proj"), 4),
        ("gpt_neox", ("all-linear",), 8),
        ("llama", ("model.layers.1.mlp.up_proj",), 1),
    ],
)
def test_targets_name_layers_of_the_blocks(family, targets, count):
    assert len(target_paths(tiny_model(family), targets)) == count


def test_a_target_that_is_nowhere_is_named_with_those_that_are():
    for wrong in ("qproj", "lm_head", "proj"):
        with pytest.raises(ConfigError, match=rf'lora\.targets holds "{wrong}".*it has down_proj, gate_proj, k_proj'):
            target_paths(tiny_model("llama", tied=False), ("q_proj", wrong))


def test_what_is_trained_is_the_adapter_alone():
    model, _ = filled()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {*adapter_parameters(model, "actor"), *adapter_parameters(model, "critic")}
    assert len(adapter_parameters(model, "actor")) == 28


def test_attaching_again_replaces_and_detaching_gives_the_model_back():
    model, _ = filled()
    attach(model, ["actor"], Lora(rank=2), seed=0)
    assert {layer.A["actor"].out_features for layer in layers_of(model).values()} == {2}
    detach(model)
    assert weights_hash(model) == weights_hash(tiny_model("llama"))
    assert torch.equal(logits(model), logits(tiny_model("llama")))


def test_an_adapter_is_copied_and_loaded_whole():
    model, switch = filled()
    copy_adapter(model, "actor", "critic")
    actor = logits(model)
    switch.adapter = "critic"
    assert torch.equal(logits(model), actor)
    held = {name: p.detach().clone() for name, p in adapter_parameters(model, "actor").items()}
    fresh = tiny_model("llama")
    attach(fresh, ["actor"], Lora(rank=4), seed=0)
    load_parameters(adapter_parameters(fresh, "actor"), held)
    assert torch.equal(logits(fresh), actor)
    with pytest.raises(CheckpointError, match="another model or recipe"):
        load_parameters(adapter_parameters(fresh, "actor"), {})
    attach(fresh, ["actor"], Lora(rank=8), seed=0)
    with pytest.raises(CheckpointError, match="shape"):
        load_parameters(adapter_parameters(fresh, "actor"), held)


@pytest.mark.parametrize(("family", "tied"), [(family, tied) for family in FAMILIES for tied in (True, False)])
def test_peft_loads_an_exported_adapter_with_equal_bits(family, tied, tmp_path):
    model, _ = filled(family, tied=tied)
    export_adapter(model, tiny_tokenizer(), tmp_path / "adapter")
    base = tiny_model(family, tied)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    assert torch.equal(logits(loaded), logits(model))
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(stored) == 2 * len(layers_of(model))
    assert not any("head" in name or "critic" in name for name in stored)


def test_peft_gets_whole_paths_where_a_name_alone_would_match_too_much(tmp_path):
    model, _ = filled(targets=("model.layers.1.mlp.up_proj",))
    export_adapter(model, tiny_tokenizer(), tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.1.mlp.up_proj"]
    loaded = PeftModel.from_pretrained(tiny_model("llama"), str(tmp_path / "adapter")).eval()
    assert torch.equal(logits(loaded), logits(model))


def test_rank_and_alpha_are_in_the_exported_config(tmp_path):
    model, _ = filled(alpha=32.0)
    export_adapter(model, tiny_tokenizer(), tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 32, False)
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_model_is_base_plus_scale_b_a(family, tmp_path):
    model, _ = filled(family, alpha=12.0)
    plain = dict(tiny_model(family).named_parameters())
    streamed = dict(merged_weights(model, "actor"))
    assert streamed.keys() >= plain.keys()
    for path, layer in layers_of(model).items():
        product = layer.B["actor"].weight @ layer.A["actor"].weight
        torch.testing.assert_close(streamed[f"{path}.weight"], plain[f"{path}.weight"] + 3 * product, atol=1e-6, rtol=0)
    unmerged = logits(model)
    merge(model, "actor")
    assert not layers_of(model)
    export(model, tiny_tokenizer(), tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert all(torch.equal(p, streamed[name]) for name, p in again.named_parameters())
    torch.testing.assert_close(logits(again), unmerged, atol=1e-4, rtol=1e-4)
