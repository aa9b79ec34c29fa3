from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from miles.engine import vllm_flags
from miles.publish import vllm_plugin


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    path = tmp_path / "root" / "policy-v1.safetensors"
    save_file({"a": torch.arange(3.0), "b": torch.ones(2, 2)}, path)
    return path


def test_a_whole_file_below_the_root_is_taken(file: Path) -> None:
    size = file.stat().st_size
    assert vllm_plugin.checked_path(str(file), 2, size, str(file.parent)) == file.resolve()
    tensors = dict(vllm_plugin.tensors_of(file))
    assert torch.equal(tensors["a"], torch.arange(3.0))
    assert sorted(tensors) == ["a", "b"]


def test_files_that_are_cut_or_hold_something_else_are_refused(file: Path) -> None:
    size = file.stat().st_size
    with pytest.raises(ValueError, match=rf"has {size} bytes instead of {size + 1}"):
        vllm_plugin.checked_path(str(file), 2, size + 1, str(file.parent))
    with pytest.raises(ValueError, match="holds 2 tensors instead of 3"):
        vllm_plugin.checked_path(str(file), 3, size, str(file.parent))


def test_files_from_elsewhere_are_refused(file: Path, tmp_path: Path) -> None:
    size = file.stat().st_size
    outside = tmp_path / "x.safetensors"
    outside.write_bytes(file.read_bytes())
    link = file.with_name("link.safetensors")
    link.symlink_to(outside)
    for path in (outside, link, file.parent / ".." / "x.safetensors", Path("/etc/passwd")):
        with pytest.raises(ValueError, match=r"no \.safetensors file below"):
            vllm_plugin.checked_path(str(path), 2, size, str(file.parent))
    with pytest.raises(ValueError, match=vllm_plugin.ROOT_VARIABLE):
        vllm_plugin.checked_path(str(file), 2, size, None)


def test_server_and_plugin_speak_of_the_same_things() -> None:
    assert vllm_plugin.BACKEND == vllm_flags.BACKEND
    assert vllm_plugin.ROOT_VARIABLE == vllm_flags.ROOT_VARIABLE


def test_vllm_finds_the_plugin() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="miles")
    assert found.value == "miles.publish.vllm_plugin:register"
