from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from miles.learn import folders


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    folder = tmp_path / "sealed"
    (folder / "part").mkdir(parents=True)
    (folder / "a.txt").write_text("alpha")
    (folder / "part" / "b.txt").write_text("beta")
    folders.seal(folder, "manifest.json", version=3)
    return folder


def test_a_sealed_folder_verifies_and_gives_back_its_facts(sealed):
    content = folders.verify(sealed, "manifest.json")
    assert content["version"] == 3
    assert content["files"]["part/b.txt"]["bytes"] == 4
    assert content["files"]["a.txt"]["sha256"] == "8ed3f6ad685b959ead7022518e1af76cd816f8e8ec7ccdda1ed4018e8f2223f8"


def test_every_byte_of_every_file_is_guarded_the_manifest_included(sealed):
    for path in (sealed / "a.txt", sealed / "part" / "b.txt", sealed / "manifest.json"):
        intact = path.read_bytes()
        for position in range(len(intact)):
            for bit in range(position % 3, 8, 3):
                path.write_bytes(intact[:position] + bytes([intact[position] ^ (1 << bit)]) + intact[position + 1 :])
                with pytest.raises(folders.Damaged, match=path.name):
                    folders.verify(sealed, "manifest.json")
        path.write_bytes(intact)
    folders.verify(sealed, "manifest.json")


def test_missing_and_shortened_files_are_named(sealed):
    (sealed / "a.txt").write_text("alph")
    with pytest.raises(folders.Damaged, match=r"a.txt has 4 bytes where manifest.json says 5"):
        folders.verify(sealed, "manifest.json", hashes=lambda name: False)
    (sealed / "a.txt").unlink()
    with pytest.raises(folders.Damaged, match=r"a.txt is missing"):
        folders.verify(sealed, "manifest.json", hashes=lambda name: False)
    with pytest.raises(folders.Damaged, match=r"none.json is missing"):
        folders.verify(sealed, "none.json")


def test_a_manifest_that_is_no_mapping_is_damage(sealed):
    for text in ("[]", "null", "{", '{"sha256": 1}', "\udcff"):
        (sealed / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(folders.Damaged, match="altered"):
            folders.verify(sealed, "manifest.json")


def test_a_manifest_cannot_name_files_outside_of_its_folder(sealed):
    outside = sealed.parent / "outside.txt"
    outside.write_text("secret")
    (sealed / "link").symlink_to(outside)
    folders.seal(sealed, "manifest.json")
    with pytest.raises(folders.Damaged, match="lies outside"):
        folders.verify(sealed, "manifest.json")


def test_strangers_are_files_that_the_manifest_does_not_list(sealed):
    assert folders.strangers(sealed, "manifest.json") == []
    (sealed / "part" / "mine.txt").write_text("")
    (sealed / "gone").symlink_to("nowhere")
    assert folders.strangers(sealed, "manifest.json") == ["gone", "part/mine.txt"]


def test_a_staged_folder_is_gone_when_its_block_fails(tmp_path):
    target = tmp_path / "deep" / "target"

    def interrupted() -> None:
        with folders.staged(target) as partial:
            (partial / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(target.parent.iterdir()) == []
    with folders.staged(target) as partial:
        (partial / "whole").write_text("whole")
        assert not target.exists()
        folders.publish(partial, target)
    assert [path.name for path in target.parent.iterdir()] == ["target"]
    assert (target / "whole").read_text() == "whole"


def test_replace_puts_the_old_folder_back_when_the_new_one_cannot_be_moved(tmp_path):
    target, gone = tmp_path / "target", tmp_path / "new"
    target.mkdir()
    (target / "old").write_text("old")
    with pytest.raises(FileNotFoundError):
        folders.replace(gone, target)
    gone.mkdir()
    folders.replace(gone, target)
    assert os.listdir(tmp_path) == ["target"]
    assert os.listdir(target) == []


def test_leftovers_are_partial_folders_of_the_given_name_only(tmp_path):
    names = [".partial-step_1-0123abcd", ".partial-other-0123abcd", "step_1", ".partial-step_1-mine", ".partial-step_1"]
    for name in names:
        (tmp_path / name).mkdir()
    assert [path.name for path in folders.leftovers(tmp_path, r"step_\d+")] == [".partial-step_1-0123abcd"]


def test_write_text_replaces_whole_files(tmp_path):
    path = tmp_path / "LATEST"
    folders.write_text(path, "one\n")
    folders.write_text(path, "two\n")
    assert path.read_text() == "two\n"
    assert os.listdir(tmp_path) == ["LATEST"]


def test_disk_full_is_told_apart():
    assert folders.is_disk_full(OSError(errno.ENOSPC, "full"))
    assert folders.is_disk_full(OSError(errno.EDQUOT, "quota"))
    assert not folders.is_disk_full(OSError(errno.EACCES, "no"))
    assert folders.is_disk_full(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert not folders.is_disk_full(RuntimeError("I/O error: Permission denied (os error 13)"))


def test_json_is_written_sorted_and_ends_with_a_newline(tmp_path):
    folders.write_json(tmp_path / "x.json", {"b": 1, "a": [0.1]})
    text = (tmp_path / "x.json").read_text()
    assert text.endswith("}\n")
    assert list(json.loads(text)) == ["a", "b"]
