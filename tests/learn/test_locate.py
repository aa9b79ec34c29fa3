from __future__ import annotations

import pytest

from miles.config.schema import Model
from miles.errors import ModelError
from miles.learn import tiny
from miles.learn.locate import Source, check_code, locate


def refused(**section: object) -> str:
    with pytest.raises(ModelError) as caught:
        locate(Model(**section))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_that_is_not_there_is_never_looked_for_on_the_hub(tmp_path):
    for name in (str(tmp_path / "none"), "./none", "~/no-such-folder", "a/b/c", ""):
        message = refused(name=name)
        assert f"model.name = {name!r}: there is no such folder" in message
        assert "smollm2-135m-instruct-q4" in message


def test_a_folder_without_config_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "the folder has no config.json" in refused(name=str(tmp_path))


def test_a_name_that_cannot_be_a_hub_id_is_refused():
    assert "is neither a folder nor a hub id" in refused(name="my model")


@pytest.mark.parametrize("revision", [None, "main", "v1.0", "0123abc"])
def test_code_from_the_hub_runs_only_from_a_pinned_commit(revision):
    message = refused(name="some/model", trust_remote_code=True, revision=revision)
    assert f"model.revision = {revision or 'none'} does not pin it: set model.revision to a commit" in message


def test_all_calls_of_one_load_read_the_same_commit():
    pinned = Model(name="some/model", trust_remote_code=True, revision="a" * 40)
    assert Source("some/model", "a" * 40).arguments(pinned) == {
        "revision": "a" * 40, "code_revision": "a" * 40, "local_files_only": False, "trust_remote_code": True,
    }  # fmt: skip
    assert Source("some/model", "b" * 40, offline=True).arguments(Model(name="some/model")) == {
        "revision": "b" * 40, "local_files_only": True, "trust_remote_code": False,
    }  # fmt: skip


def test_a_single_file_of_a_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert Source(str(tmp_path)).file("config.json") == tmp_path / "config.json"
    assert Source(str(tmp_path)).file("generation_config.json") is None


def test_code_of_another_repository_is_refused_before_it_runs(tmp_path):
    tiny.tiny_config("llama").save_pretrained(tmp_path)
    section = Model(name=str(tmp_path), trust_remote_code=True, revision="0" * 40)
    check_code(section, Source(str(tmp_path)))
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil/code--tok.Tok", null]}}')
    with pytest.raises(ModelError, match="runs code of another repository, 'evil/code'"):
        check_code(section, Source(str(tmp_path)))
    check_code(Model(name=str(tmp_path)), Source(str(tmp_path)))  # none of it would run
