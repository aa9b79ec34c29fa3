from __future__ import annotations

import errno
import json
import logging
import os
import stat
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    MixtralConfig,
    MixtralForCausalLM,
)

from miles.config.schema import Model
from miles.errors import BadInput, CheckpointError
from miles.learn import export as export_module
from miles.learn import tiny
from miles.learn.export import MARKER, check_target, export, read_marker
from miles.learn.load import is_tied, load_model, load_tokenizer, weights_hash

VARIANTS = [(family, tied) for family in tiny.FAMILIES for tied in (True, False)]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


@pytest.mark.parametrize(("family", "tied"), VARIANTS)
def test_an_export_loads_in_transformers_with_no_missing_and_no_unexpected_key(family, tied, tmp_path):
    model = tiny.tiny_model(family, tied, seed=1)
    export(model, tiny.tiny_tokenizer(), tmp_path / "out")
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert {key: len(found) for key, found in report.items()} == dict.fromkeys(report, 0)
    assert type(again) is type(model)
    assert again.dtype == torch.float32
    assert is_tied(again) is tied
    assert weights_hash(again) == weights_hash(model)
    ids = torch.arange(4, 30)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    heads = [name for name in stored(tmp_path / "out") if "lm_head" in name or "embed_out" in name]
    assert len(heads) == (0 if tied else 1)
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


def test_tokenizer_template_and_configs_come_back_as_they_were(tmp_path):
    source, target = tmp_path / "source", tmp_path / "out"
    tiny.tiny_model("qwen3", seed=0).save_pretrained(source)
    tiny.tiny_tokenizer(TEMPLATE).save_pretrained(source)
    GenerationConfig(eos_token_id=[2, 7], bos_token_id=1, top_k=20, do_sample=True).save_pretrained(source)
    section = Model(name=str(source))
    export(load_model(section, seed=0), load_tokenizer(section), target)

    assert GenerationConfig.from_pretrained(target) == GenerationConfig.from_pretrained(source)
    assert (target / "chat_template.jinja").read_text() == TEMPLATE
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    before, after = AutoConfig.from_pretrained(source).to_dict(), AutoConfig.from_pretrained(target).to_dict()
    assert {**after, "_name_or_path": None} == {**before, "_name_or_path": None}
    assert str(source) not in (target / "config.json").read_text()
    one, other = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(target)
    assert one.get_vocab() == other.get_vocab()
    assert one.special_tokens_map == other.special_tokens_map
    assert one.encode("1 + 2 = higher") == other.encode("1 + 2 = higher")


def test_a_generation_config_that_transformers_would_not_save_is_exported_as_it_was(tmp_path):
    """Temperature without do_sample stands in the generation configs of real models."""
    source, target = tmp_path / "source", tmp_path / "out"
    tiny.tiny_model("llama", seed=0).save_pretrained(source)
    tiny.tiny_tokenizer().save_pretrained(source)
    (source / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 0.6, "do_sample": false}')
    section = Model(name=str(source))
    model = load_model(section, seed=0)
    with pytest.raises(ValueError, match="temperature"):
        model.generation_config.save_pretrained(tmp_path / "refused")
    export(model, load_tokenizer(section), target)
    assert json.loads((target / "generation_config.json").read_text())["temperature"] == 0.6


def test_the_live_model_and_tokenizer_do_not_change(tmp_path):
    model, tokenizer = tiny.tiny_model("llama", seed=0).train(), tiny.tiny_tokenizer()
    tokenizer(["1", "12"], padding=True, truncation=True, max_length=2)
    kept = tokenizer.backend_tokenizer.padding, tokenizer.backend_tokenizer.truncation
    config, generation = model.config.to_dict(), model.generation_config
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    digest = weights_hash(model)

    export(model, tokenizer, tmp_path / "half", dtype=torch.bfloat16)

    assert model.config.to_dict() == config
    assert model.generation_config is generation
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert weights_hash(model) == digest
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert (tokenizer.backend_tokenizer.padding, tokenizer.backend_tokenizer.truncation) == kept
    assert kept[0] is not None
    exported = json.loads((tmp_path / "half" / "tokenizer.json").read_text())
    assert exported["padding"] is exported["truncation"] is None


@pytest.mark.parametrize("tied", [True, False])
def test_another_dtype_is_written_when_it_is_asked_for(tmp_path, tied):
    model = tiny.tiny_model("llama", tied, seed=0)
    export(model, tiny.tiny_tokenizer(), tmp_path / "half", dtype=torch.bfloat16)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert again.dtype == torch.bfloat16
    assert is_tied(again) is tied
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).to(torch.bfloat16))


@pytest.mark.parametrize("tied", [True, False])
def test_masters_that_live_elsewhere_replace_the_models_own_weights(tmp_path, tied):
    model = tiny.tiny_model("qwen3", tied, seed=0)
    masters = {name: parameter.detach() + 1 for name, parameter in model.named_parameters()}
    export(model, tiny.tiny_tokenizer(), tmp_path / "out", weights=masters)
    again = load_model(Model(name=str(tmp_path / "out")), seed=0)
    assert is_tied(again) is tied
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, masters[name])
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=r"weights lacks 'model.layers.0.mlp.up_proj.weight'"):
        export(model, tiny.tiny_tokenizer(), tmp_path / "less", weights={k: v for k, v in masters.items() if k != name})
    with pytest.raises(ValueError, match="weights has 'wrong'"):
        export(model, tiny.tiny_tokenizer(), tmp_path / "more", weights={**masters, "wrong": masters[name]})
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("tied", [True, False])
def test_a_large_model_is_split_into_shards_with_an_index(tmp_path, tied):
    model = tiny.tiny_model("gpt_neox", tied, seed=0)
    export(model, tiny.tiny_tokenizer(), tmp_path / "out", max_shard_size="60KB")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    assert weights_hash(load_model(Model(name=str(tmp_path / "out")), seed=0)) == weights_hash(model)


def counted(tensors, live):
    """The pairs, each tensor a copy; `live` holds the bytes of those that somebody still holds, at each of them."""
    now = 0

    def gone(size):
        nonlocal now
        now -= size

    for name, tensor in tensors:
        copy = tensor.detach().clone()
        now += copy.nbytes
        weakref.finalize(copy, gone, copy.nbytes)
        live.append(now)
        yield name, copy
        del copy


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_weights_that_come_one_by_one_are_held_for_one_file_at_most(tmp_path, family):
    model, live = tiny.tiny_model(family, False, seed=0, num_hidden_layers=6), []
    sizes = [p.nbytes for p in model.parameters()]
    limit = 2 * max(sizes)
    export(
        model,
        tiny.tiny_tokenizer(),
        tmp_path / "out",
        weights=counted(model.named_parameters(), live),
        max_shard_size=f"{limit / 1000}KB",
    )
    assert len(live) == len(sizes)
    assert max(live) <= limit + max(sizes)
    assert limit + max(sizes) < 0.4 * sum(sizes)
    assert weights_hash(load_model(Model(name=str(tmp_path / "out")), seed=0)) == weights_hash(model)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert {key: len(found) for key, found in report.items()} == dict.fromkeys(report, 0)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)


def test_weights_that_files_hold_in_other_shapes_are_written_as_transformers_does(tmp_path):
    """Fused experts: their files hold a matrix for each expert."""
    model = MixtralForCausalLM(MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )).eval()  # fmt: skip
    export(model, tiny.tiny_tokenizer(), tmp_path / "out", weights=iter(list(model.named_parameters())))
    assert not stored(tmp_path / "out").keys() <= model.state_dict().keys()
    assert weights_hash(AutoModelForCausalLM.from_pretrained(tmp_path / "out")) == weights_hash(model)


def test_the_other_ranks_come_to_the_end_where_writing_fails(tmp_path):
    model, taken = tiny.tiny_model("llama"), []

    def weights(model):
        for name, tensor in model.named_parameters():
            taken.append(name)
            yield name, tensor

    (tmp_path / "mine").write_text("not an export")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_module, "whole_weights", weights)
        with pytest.raises(BadInput):
            export_module.save_trained(model, tiny.tiny_tokenizer(), tmp_path / "mine", {})
    assert taken == [name for name, _ in model.named_parameters()]


def test_files_can_be_read_by_whom_the_umask_allows(tmp_path):
    export(tiny.tiny_model("llama"), tiny.tiny_tokenizer(), tmp_path / "out")
    probe = tmp_path / "probe"
    probe.write_text("")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert modes == {stat.S_IMODE(probe.stat().st_mode)}


def test_the_marker_holds_facts(tmp_path):
    export(tiny.tiny_model("llama"), tiny.tiny_tokenizer(), tmp_path / "out", facts={"version": 16})
    assert read_marker(tmp_path / "out") == {"version": 16}
    assert read_marker(tmp_path) is None


def test_an_earlier_export_is_replaced_and_nothing_is_left_over(tmp_path):
    target = tmp_path / "out"
    target.mkdir()  # an empty folder loses nothing
    export(tiny.tiny_model("llama", seed=1), tiny.tiny_tokenizer(TEMPLATE), target)
    (tmp_path / ".partial-out-0123abcd").mkdir()
    newer = tiny.tiny_model("llama", seed=2)
    export(newer, tiny.tiny_tokenizer(), target)
    assert weights_hash(load_model(Model(name=str(target)), seed=0)) == weights_hash(newer)
    assert not (target / "chat_template.jinja").exists()
    assert os.listdir(tmp_path) == ["out"]


def test_nothing_of_the_users_is_ever_replaced(tmp_path):
    model, tokenizer = tiny.tiny_model("llama"), tiny.tiny_tokenizer()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(BadInput, match=r"cannot export to .*mine: it is there already and is not an export of Miles"):
        export(model, tokenizer, mine)
    with pytest.raises(BadInput, match="is not an export of Miles"):
        export(model, tokenizer, mine / "thesis.txt")
    assert (mine / "thesis.txt").read_text() == "years of work"

    out = tmp_path / "out"
    export(model, tokenizer, out)
    (out / "README.md").write_text("notes")
    with pytest.raises(BadInput, match=r"it holds README.md, which Miles did not write"):
        export(model, tokenizer, out)
    (out / "README.md").unlink()
    check_target(out)
    config = out / "generation_config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(BadInput, match=r"it was changed since Miles wrote it \(.*generation_config.json"):
        export(model, tokenizer, out)
    assert sorted(os.listdir(tmp_path)) == ["mine", "out"]
    assert (out / MARKER).is_file()


class FullDisk:
    """A tokenizer whose files no longer fit."""

    def save_pretrained(self, folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "tokenizer.json"))


def test_a_failed_export_leaves_the_old_one_and_no_half_of_the_new(tmp_path):
    model = tiny.tiny_model("llama", seed=1)
    export(model, tiny.tiny_tokenizer(), tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"could not be exported to .*out: .*No space left.*Free some space"):
        export(tiny.tiny_model("llama", seed=2), FullDisk(), tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]
    assert weights_hash(load_model(Model(name=str(tmp_path / "out")), seed=0)) == weights_hash(model)


def test_export_is_quiet(tmp_path, capfd, caplog):
    with caplog.at_level(logging.WARNING), warnings.catch_warnings(record=True) as caught:
        export(tiny.tiny_model("llama"), tiny.tiny_tokenizer(), tmp_path / "out")
    captured = capfd.readouterr()
    assert captured.out == captured.err == caplog.text == ""
    assert caught == []


def test_a_name_that_is_no_utf8_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"cannot export to '.*half.udcff': the name is not UTF-8"):
        check_target(tmp_path / "half\udcff")
