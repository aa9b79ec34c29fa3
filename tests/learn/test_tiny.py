from __future__ import annotations

import random

import pytest
import torch

from miles.errors import ModelError
from miles.learn import tiny
from miles.learn.load import is_tied, weights_hash

VARIANTS = [(family, tied) for family in tiny.FAMILIES for tied in (True, False)]


@pytest.mark.parametrize(("family", "tied"), VARIANTS)
def test_a_model_has_the_promised_shape_and_is_equal_to_the_bit_for_equal_seeds(family, tied):
    model = tiny.tiny_model(family, tied, seed=7)
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (2, 64, 4)
    assert getattr(config, "num_key_value_heads", 2) == 2
    assert config.vocab_size == len(tiny.tiny_tokenizer()) <= 32
    assert is_tied(model) is tied
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert weights_hash(model) == weights_hash(tiny.tiny_model(family, tied, seed=7))
    assert weights_hash(model) != weights_hash(tiny.tiny_model(family, tied, seed=8))
    assert config.name_or_path == f"tiny-random:{family}{'' if tied else '-untied'}"


def test_making_a_model_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    tiny.tiny_model("llama", seed=5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_sliding_families_forget_what_lies_outside_of_the_window(family):
    """With every layer sliding, a token sees at most layers * (window - 1) tokens back; with a wide window it sees all."""
    overrides = {"layer_types": ["sliding_attention"] * 2} if family == "gemma3" else {}
    far = 2 * (tiny.WINDOW - 1) + 1
    ids = torch.randint(4, 32, (1, far + 1), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, 0] = 4 + (ids[0, 0] - 3) % 28
    for window, reaches in ((tiny.WINDOW, False), (tiny.WINDOW + 1, True)):
        model = tiny.tiny_model(family, seed=0, sliding_window=window, **overrides)
        with torch.no_grad():
            difference = (model(ids).logits - model(changed).logits)[0, -1].abs().max().item()
        assert (difference > 0) is reaches


def test_gemma3_has_one_layer_of_each_kind():
    assert tiny.tiny_config("gemma3").layer_types == ["sliding_attention", "full_attention"]


def test_overrides_reach_the_config():
    assert tiny.tiny_config("mistral", sliding_window=None).sliding_window is None
    assert tiny.tiny_model("qwen3", num_hidden_layers=1).config.num_hidden_layers == 1


def test_every_symbol_is_one_token_and_text_comes_back_as_it_was():
    tokenizer = tiny.tiny_tokenizer(add_bos=False)
    assert len(set(tiny.SYMBOLS)) == len(tiny.SYMBOLS)
    assert tokenizer.encode(tiny.SYMBOLS) == list(range(4, 4 + len(tiny.SYMBOLS)))
    generator = random.Random(0)
    for _ in range(50):
        text = "".join(generator.choices(tiny.SYMBOLS, k=generator.randrange(20)))
        ids = tokenizer.encode(text)
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
    for text in ("  3 +  4 = ", " ", "\n\n", "higher, lower? 12.5", "a ?. ,"):
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("a", tiny.UNK)


def test_special_tokens_have_their_ids_and_are_never_split():
    tokenizer = tiny.tiny_tokenizer()
    ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    assert ids == (0, 1, 2, 3)
    assert tokenizer.encode("1<eos>", add_special_tokens=False) == [tokenizer.convert_tokens_to_ids("1"), tiny.EOS_ID]
    assert tokenizer.decode([1, 5, 2, 0], skip_special_tokens=True) == "1"
    assert tokenizer.encode("é") == [tiny.BOS_ID, tiny.UNK_ID]


def test_bos_stands_once_where_the_tokenizer_has_it():
    assert tiny.tiny_tokenizer().encode("1 =").count(tiny.BOS_ID) == 1
    assert tiny.tiny_tokenizer(add_bos=False).encode("1 =").count(tiny.BOS_ID) == 0


def test_a_chat_template_is_there_only_when_it_is_given():
    assert tiny.tiny_tokenizer().chat_template is None
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    tokenizer = tiny.tiny_tokenizer(template)
    messages = [{"role": "user", "content": "1 + 2 ="}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "<bos>1 + 2 =\n>"


def test_names():
    assert tiny.parse("tiny-random:qwen3") == ("qwen3", True)
    assert tiny.parse("tiny-random:gpt_neox-untied") == ("gpt_neox", False)
    with pytest.raises(ModelError, match=r"model.name = 'tiny-random:lama'.*did you mean tiny-random:llama.*gpt_neox"):
        tiny.parse("tiny-random:lama")
