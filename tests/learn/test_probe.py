from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    MptConfig,
    Qwen3NextConfig,
)

from miles.errors import ModelError
from miles.learn.attention import Attention
from miles.learn.forward import head_of
from miles.learn.probe import check_head, probe_packing
from miles.learn.tiny import FAMILIES, tiny_model

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def made(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_plain_and_sliding_attention_may_be_packed(family):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert probe_packing(tiny_model(family)).exact
    assert torch.equal(torch.get_rng_state(), before)


def test_linear_attention_is_refused_by_its_config():
    config = Qwen3NextConfig(**SMALL, head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)
    with torch.device("meta"):
        packing = probe_packing(AutoModelForCausalLM.from_config(config))
    assert not packing.exact
    assert "linear_attention" in packing.reason


@pytest.mark.parametrize("config", [BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=40)])
def test_a_model_that_cannot_take_the_masks_is_refused_with_its_own_words(config):
    packing = probe_packing(made(config))
    assert not packing.exact
    assert "does not take these masks" in packing.reason


def test_positions_that_follow_the_row_are_noticed():
    """MPT's alibi slopes count places in the row, so packed rows give other numbers."""
    packing = probe_packing(made(MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=40, max_seq_len=64)))
    assert not packing.exact


def test_a_window_that_the_layers_keep_and_the_mask_does_not_is_noticed():
    """The gate itself: the right class with masks that forget the window, or the boundaries."""
    model = tiny_model("gemma3")
    model.config.layer_types = ["full_attention", "full_attention"]
    assert Attention.of(model.config).kinds == ("full_attention",)

    class Deaf(type(model.base_model)):
        def forward(self, *args, attention_mask=None, **kwargs):
            return super().forward(*args, attention_mask=None, **kwargs)

    class DeafForCausalLM(type(model)):
        def __init__(self, config):
            super().__init__(config)
            self.model = Deaf(config)
            self.post_init()

    packing = probe_packing(DeafForCausalLM(tiny_model("gemma3").config))
    assert not packing.exact
    assert "packed and separate rows differ by" in packing.reason


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_our_logits_are_the_models(family, tied):
    check_head(tiny_model(family, tied))


@pytest.mark.parametrize(
    ("config", "scale", "softcap"),
    [
        (CohereConfig(**SMALL, logit_scale=0.25), 0.25, None),
        (GraniteConfig(**SMALL, logits_scaling=8.0), 0.125, None),
        (Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=3.0), 1.0, 3.0),
    ],
)
def test_scales_and_soft_caps_are_known(config, scale, softcap):
    model = made(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(50)
    head = head_of(model, 1.0, 16)
    assert (head.scale, head.softcap) == (scale, softcap)
    check_head(model)


def test_weights_that_hold_nan_are_refused():
    model = tiny_model("llama")
    with torch.no_grad():
        next(model.parameters())[3] = float("nan")
    with pytest.raises(ModelError, match="the weights of LlamaForCausalLM give logits that are NaN or infinite"):
        check_head(model)


def test_a_head_that_does_more_is_refused():
    model = tiny_model("llama")

    class Head(torch.nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden) ** 3 + 1

    head = Head(64, model.config.vocab_size, bias=False)
    model.set_output_embeddings(head)
    with pytest.raises(ModelError, match="the output head of LlamaForCausalLM does more"):
        check_head(model)
