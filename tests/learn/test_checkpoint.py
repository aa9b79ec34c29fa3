from __future__ import annotations

import json
import logging
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from miles.errors import CheckpointError
from miles.learn import checkpoint
from miles.learn.randomness import random_state, set_random_state


def content(version: int) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(version)
    return {
        "model": {"w": torch.randn(7, 3, generator=generator), "half": torch.randn(5, generator=generator).bfloat16()},
        "optimizer": {"w.exp_avg": torch.randn(7, 3, generator=generator), "w.step": torch.tensor(float(version))},
    }


def put(root: Path, *versions: int) -> None:
    for version in versions:
        checkpoint.save(root, version, content(version), {"version": version})


def assert_holds(path: Path | None, version: int) -> None:
    assert path is not None
    tensors, state = checkpoint.load(path)
    assert state == {"version": version}
    expected = content(version)
    assert tensors.keys() == expected.keys()
    for name, group in expected.items():
        assert tensors[name].keys() == group.keys()
        for key, tensor in group.items():
            assert torch.equal(tensors[name][key], tensor)
            assert tensors[name][key].dtype == tensor.dtype
            assert tensors[name][key].shape == tensor.shape


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))


# --- what goes in comes out --------------------------------------------------------------------------------------


def test_tensors_of_every_kind_come_back_to_the_bit(tmp_path):
    special = torch.tensor([math.nan, math.inf, -0.0, 5e-324, 1 / 3], dtype=torch.float64)
    tensors = {
        "model": {
            "special": special,
            "columns": torch.arange(6).reshape(2, 3).T,
            "zero_d": torch.tensor(3, dtype=torch.int64),
            "empty": torch.empty(0, 4),
            "mask": torch.tensor([True, False]),
            "bytes": torch.arange(256, dtype=torch.uint8),
        },
        "nothing": {},
    }
    path = checkpoint.save(tmp_path, 0, tensors, {})
    assert path == tmp_path / "step_000000"
    assert names(path) == [
        "index.json", "manifest.json", "model.safetensors", "nothing.safetensors", "rank-00000.json", "state.json",
    ]  # fmt: skip
    loaded, state = checkpoint.load(path)
    assert state == {}
    assert loaded["nothing"] == {}
    for key, tensor in tensors["model"].items():
        again = loaded["model"][key]
        assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
        assert again.contiguous().numpy().tobytes() == tensor.contiguous().numpy().tobytes()


def test_parameters_are_saved_without_their_gradients_history(tmp_path):
    weight = torch.nn.Parameter(torch.ones(3))
    loaded, _ = checkpoint.load(checkpoint.save(tmp_path, 1, {"model": {"w": weight}}, {}))
    assert torch.equal(loaded["model"]["w"], torch.ones(3))
    assert not loaded["model"]["w"].requires_grad


def test_state_comes_back_equal(tmp_path):
    generator = random.Random(0)
    floats = [generator.uniform(-1, 1) * 10.0 ** generator.randrange(-300, 300) for _ in range(200)]
    state = {
        "big": 2**63 + 1,
        "odd": 2**53 + 1,
        "huge": 3**400,
        "floats": [*floats, 0.1, -0.0, math.inf, -math.inf, 5e-324, sys.float_info.max],
        "text": "é \ud800 \n \U0001f600",
        "nested": {"none": None, "yes": True, "list": [[], {}]},
    }
    _, again = checkpoint.load(checkpoint.save(tmp_path, 1, {}, state))
    assert again == state
    assert [value.hex() for value in again["floats"]] == [value.hex() for value in state["floats"]]
    assert type(again["nested"]["yes"]) is bool
    _, again = checkpoint.load(checkpoint.save(tmp_path, 2, {}, {"nan": math.nan, "pair": (1, 2)}))
    assert math.isnan(again["nan"])
    assert again["pair"] == [1, 2]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"rows": {3: 1}}, r"state.rows has the key 3"),
        ({"a": [1, np.float64(0.5)]}, r"state.a\[1\] is a float64"),
        ({"a": {"b": torch.zeros(2)}}, r"state.a.b is a Tensor.*put tensors among the tensors"),
        ({"a": {1, 2}}, "state.a is a set"),
    ],
)
def test_state_that_json_would_change_is_refused_before_anything_is_written(tmp_path, state, message):
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(tmp_path / "root", 1, {}, state)
    assert not (tmp_path / "root").exists()


def test_file_names_cannot_leave_the_folder_or_hide_another_file(tmp_path):
    for name in ("../evil", "a/b", "", "Model", "model.x"):
        with pytest.raises(CheckpointError, match="checkpoint file name"):
            checkpoint.save(tmp_path, 1, {name: {}}, {})


def test_random_states_continue_where_they_stopped(tmp_path):
    def draw() -> list[object]:
        return [
            random.random(),
            random.gauss(0, 1),
            np.random.rand(3).tolist(),
            np.random.standard_normal(),
            torch.randn(3).tolist(),
            torch.randint(0, 1000, (2,)).tolist(),
        ]

    keep = random_state()
    try:
        for seed in range(3):
            random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
            random.gauss(0, 1), np.random.standard_normal()  # leave half of a pair behind
            _, state = checkpoint.load(checkpoint.save(tmp_path, seed, {}, {"random": random_state()}))
            expected = draw()
            draw()
            set_random_state(state["random"])
            assert draw() == expected
    finally:
        set_random_state(keep)


def test_nothing_in_a_checkpoint_is_pickled(tmp_path):
    put(tmp_path, 1)
    for path in (tmp_path / "step_000001").iterdir():
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            assert path.suffix == ".safetensors"
            length = int.from_bytes(path.read_bytes()[:8], "little")
            json.loads(path.read_bytes()[8 : 8 + length])


# --- what is damaged is found ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file",
    ["model.safetensors", "optimizer.safetensors", "index.json", "state.json", "rank-00000.json", "manifest.json"],
)
@pytest.mark.parametrize("damage", ["flip", "truncate", "missing", "empty"])
def test_damage_to_any_file_is_found_and_the_one_before_is_used(tmp_path, caplog, file, damage):
    put(tmp_path, 9, 10)
    path = tmp_path / "step_000010" / file
    raw = path.read_bytes()
    if damage == "flip":
        path.write_bytes(raw[: len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 1]) + raw[len(raw) // 2 + 1 :])
    elif damage == "truncate":
        os.truncate(path, len(raw) - 1)
    elif damage == "missing":
        path.unlink()
    else:
        os.truncate(path, 0)
    with pytest.raises(CheckpointError, match=rf"step_000010 cannot be used: .*{file}.*Resume from an older one"):
        checkpoint.load(path.parent)
    with caplog.at_level(logging.WARNING):
        assert_holds(checkpoint.newest(tmp_path), 9)
    assert "step_000010" in caplog.text


def test_a_folder_that_was_renamed_is_not_taken_for_another_version(tmp_path):
    put(tmp_path, 10)
    (tmp_path / "step_000010").rename(tmp_path / "step_000020")
    with pytest.raises(CheckpointError, match="is of version 10: the folder was renamed"):
        checkpoint.load(tmp_path / "step_000020")
    (tmp_path / "step_000020").rename(tmp_path / "backup")
    assert_holds(tmp_path / "backup", 10)


def test_a_checkpoint_of_another_format_says_so(tmp_path):
    put(tmp_path, 1)
    path = tmp_path / "step_000001"
    (path / "manifest.json").unlink()
    checkpoint.folders.seal(path, "manifest.json", format=99, version=1)
    with pytest.raises(CheckpointError, match="has format 99, this Miles reads 2"):
        checkpoint.load(path)


def test_a_sealed_folder_of_something_else_is_no_checkpoint(tmp_path):
    path = tmp_path / "step_000001"
    path.mkdir()
    checkpoint.folders.seal(path, "manifest.json", format=2, version=1)
    with pytest.raises(CheckpointError, match=r"state.json is missing"):
        checkpoint.load(path)


def test_a_missing_checkpoint_is_one_sentence(tmp_path):
    with pytest.raises(CheckpointError, match=r"manifest.json is missing"):
        checkpoint.load(tmp_path / "step_000001")


# --- which one is newest -----------------------------------------------------------------------------------------


def test_no_checkpoint_is_none(tmp_path):
    assert checkpoint.newest(tmp_path / "none") is None
    assert checkpoint.newest(tmp_path) is None


def test_newest_goes_by_number_not_by_name_and_not_by_latest(tmp_path):
    put(tmp_path, 10, 9, 1_000_000)
    assert (tmp_path / "LATEST").read_text() == "step_1000000\n"
    for version in (9, 10):
        (tmp_path / f"step_{version:06d}").rename(tmp_path / f"step_{version}")
    assert_holds(checkpoint.newest(tmp_path), 1_000_000)
    (tmp_path / "LATEST").write_text("step_9\n")
    checkpoint.folders.discard(tmp_path / "step_1000000")
    newest = checkpoint.newest(tmp_path)
    assert newest == tmp_path / "step_10"
    assert checkpoint.version_of(newest) == 10
    (tmp_path / "LATEST").unlink()
    assert checkpoint.newest(tmp_path) == newest


def test_a_folder_without_manifest_is_ignored_with_a_warning(tmp_path, caplog):
    put(tmp_path, 10)
    (tmp_path / "step_000020").mkdir()
    (tmp_path / "step_000020" / "model.safetensors").write_bytes(b"half")
    with caplog.at_level(logging.WARNING):
        assert_holds(checkpoint.newest(tmp_path), 10)
    assert "step_000020 has no manifest.json, so it was never complete: ignored" in caplog.text


def test_when_all_are_damaged_training_does_not_start_afresh_on_its_own(tmp_path):
    put(tmp_path, 1, 2)
    for version in (1, 2):
        (tmp_path / f"step_{version:06d}" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used: .*step_000002.*step_000001"):
        checkpoint.newest(tmp_path)


def test_other_names_are_no_versions(tmp_path):
    with pytest.raises(CheckpointError, match="is not named like a checkpoint"):
        checkpoint.version_of(tmp_path / "best")


# --- pruning -----------------------------------------------------------------------------------------------------


def test_prune_keeps_the_newest_by_number(tmp_path):
    put(tmp_path, 8, 9, 10, 11)
    assert checkpoint.prune(tmp_path, keep=2) == [8, 9]
    assert names(tmp_path) == ["LATEST", "step_000010", "step_000011"]
    assert checkpoint.prune(tmp_path, keep=2) == []
    with pytest.raises(CheckpointError, match="keep must be >= 1, got 0"):
        checkpoint.prune(tmp_path, keep=0)


def test_prune_keeps_every_tenth_and_the_last(tmp_path):
    """Interval 10, keep 1, steps 5, 10, 15, 20, 25: kept are 10, 20 and the last, nothing else."""
    for version in (5, 10, 15, 20, 25):
        put(tmp_path, version)
        checkpoint.prune(tmp_path, keep=1, protect=range(0, 30, 10))
    assert names(tmp_path) == ["LATEST", "step_000010", "step_000020", "step_000025"]


def test_a_damaged_one_does_not_push_out_a_good_one(tmp_path):
    put(tmp_path, 9, 10)
    os.truncate(tmp_path / "step_000010" / "model.safetensors", 3)
    assert checkpoint.prune(tmp_path, keep=1) == []
    assert_holds(checkpoint.newest(tmp_path), 9)


def test_the_one_just_saved_survives_a_newer_one_whose_content_is_damaged(tmp_path):
    put(tmp_path, 20)
    weights = tmp_path / "step_000020" / "model.safetensors"
    raw = weights.read_bytes()
    weights.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    put(tmp_path, 15)  # training went on from an older one
    assert checkpoint.prune(tmp_path, keep=1) == []
    assert_holds(checkpoint.newest(tmp_path), 15)


def test_nothing_that_miles_did_not_write_is_deleted(tmp_path, caplog):
    foreign = ["notes", "step_final", "step_000002", ".partial-mine", ".partial-best-0123abcd"]
    for name in foreign:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "step_7").write_text("a file")
    put(tmp_path, 1, 3, 4)
    (tmp_path / "step_000003" / "notes.txt").write_text("good one")
    with caplog.at_level(logging.WARNING):
        assert checkpoint.prune(tmp_path, keep=1) == [1]
    assert "step_000003 is kept: it holds notes.txt, which is not part of the checkpoint" in caplog.text
    assert names(tmp_path) == sorted([*foreign, "step_7", "LATEST", "step_000003", "step_000004"])
    for name in foreign:
        assert (tmp_path / name / "file").read_text() == name


# --- saving over what is there -----------------------------------------------------------------------------------


def test_saving_a_version_again_replaces_it(tmp_path):
    put(tmp_path, 10)
    checkpoint.save(tmp_path, 10, {"model": {"w": torch.zeros(2)}}, {"second": True})
    tensors, state = checkpoint.load(tmp_path / "step_000010")
    assert state == {"second": True}
    assert list(tensors) == ["model"]
    assert names(tmp_path) == ["LATEST", "step_000010"]


def test_what_is_damaged_or_foreign_is_moved_aside_and_kept(tmp_path, caplog):
    put(tmp_path, 10)
    (tmp_path / "step_000010" / "state.json").unlink()
    with caplog.at_level(logging.WARNING):
        put(tmp_path, 10)
        (tmp_path / "step_000010" / "mine.txt").write_text("mine")
        put(tmp_path, 10)
    assert names(tmp_path) == ["LATEST", "aside-step_000010-1", "aside-step_000010-2", "step_000010"]
    assert (tmp_path / "aside-step_000010-2" / "mine.txt").read_text() == "mine"
    assert "moved to" in caplog.text
    assert_holds(checkpoint.newest(tmp_path), 10)


def test_what_was_being_replaced_when_the_process_died_still_counts(tmp_path):
    put(tmp_path, 9, 10)
    (tmp_path / "step_000010").rename(tmp_path / "step_000010.old")
    newest = checkpoint.newest(tmp_path)
    assert newest == tmp_path / "step_000010.old"
    assert checkpoint.version_of(newest) == 10
    assert_holds(newest, 10)
    put(tmp_path, 10)
    assert names(tmp_path) == ["LATEST", "step_000009", "step_000010"]
    put(tmp_path, 10)
    assert checkpoint.prune(tmp_path, keep=1) == [9]


# --- failures in the middle --------------------------------------------------------------------------------------


def in_a_process(script: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FULL = """
import resource, sys
from pathlib import Path
import torch
from miles.errors import CheckpointError
from miles.learn import checkpoint
root = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for tensors, state in (
    ({"small": {"w": torch.zeros(10)}, "model": {"w": torch.zeros(1_000_000)}}, {}),
    ({"small": {"w": torch.zeros(10)}}, {"long": "x" * 1_000_000}),
):
    try:
        checkpoint.save(root, 20, tensors, state)
    except CheckpointError as error:
        print(error)
"""


def test_a_write_that_fails_leaves_the_old_ones_and_no_half(tmp_path):
    """keep = 1 and a second save that fails: the first one still loads. The limit on file sizes is a real failed write."""
    put(tmp_path, 10)
    out = in_a_process(FULL, tmp_path)
    assert out.count(f"checkpoint 20 could not be written to {tmp_path}") == 2
    assert out.count("Checkpoints that were there before are untouched.") == 2
    assert names(tmp_path) == ["LATEST", "step_000010"]
    assert (tmp_path / "LATEST").read_text() == "step_000010\n"
    assert_holds(checkpoint.newest(tmp_path), 10)


def test_a_full_disk_says_how_much_is_missing_and_leaves_the_old_ones(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    try:
        put(disk, 10)
        with pytest.raises(CheckpointError, match=r"disk full while writing checkpoint 20 to .*: it takes 11 MiB"):
            checkpoint.save(disk, 20, {"model": {"w": torch.zeros(3_000_000)}}, {})
        with pytest.raises(CheckpointError, match=r"disk full .* lower run.keep_checkpoints .* --resume"):
            checkpoint.save(disk, 20, {}, {"long": "x" * 3_000_000})
        assert names(disk) == ["LATEST", "step_000010"]
        assert_holds(checkpoint.newest(disk), 10)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_root_that_cannot_be_a_folder_is_an_error_with_a_way_out(tmp_path):
    (tmp_path / "root").write_text("a file")
    with pytest.raises(CheckpointError, match=r"could not be written to .*Make the folder writable"):
        put(tmp_path / "root", 1)


# Forks, so that torch is imported once. In a child an audit hook sees each call to the file system that Python makes
# (safetensors' own writes are reached by the timed kills) and kill -9 comes at the chosen one.
KILLS = """
import os, shutil, signal, sys, time
from pathlib import Path
import torch
from miles.learn import checkpoint

root, template, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
SIZE = 10_000 if mode == "moments" else 1_000_000
WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.scandir", "os.listdir")


def tensors(version):
    return {name: {"w": torch.full((size,), float(version))} for name, size in (("model", SIZE), ("optimizer", 5))}


def save(version, kill_at):
    seen = 0
    def hook(event, arguments):
        nonlocal seen
        if event in WATCHED:
            seen += 1
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    if mode == "moments":
        sys.addaudithook(hook)
    checkpoint.save(root, version, tensors(version), {"version": version})
    checkpoint.prune(root, keep=1)


def check(versions):
    path = checkpoint.newest(root)
    found, state = checkpoint.load(path)
    assert state["version"] in versions, (path, state)
    assert found["model"]["w"].eq(float(state["version"])).all()
    return state["version"]


start = time.perf_counter()
checkpoint.save(template, 10, tensors(10), {"version": 10})
duration = time.perf_counter() - start
killed, results = 0, set()
for moment in range(1, 1000):
    version = (10, 20)[moment % 2] if mode == "moments" else 20
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(template, root)
    child = os.fork()
    if child == 0:
        save(version, moment)
        os._exit(0)
    if mode == "times":
        time.sleep(moment * duration / 12)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    result = check({10, version})
    results.add(result)
    killed += os.WIFSIGNALED(status)
    # The next run clears up: nothing of the killed one is left over.
    checkpoint.save(root, 30, {"model": {"w": torch.full((3,), 30.0)}}, {"version": 30})
    checkpoint.prune(root, keep=1)
    assert check({30}) == 30
    assert sorted(os.listdir(root)) == ["LATEST", "step_000030"], sorted(os.listdir(root))
    if not os.WIFSIGNALED(status) and (mode == "moments" or result == 20):
        break
print(killed, sorted(results))
"""


@pytest.mark.parametrize("mode", ["moments", "times"])
def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(tmp_path, mode):
    killed, results = in_a_process(KILLS, tmp_path / "root", tmp_path / "template", mode).split(maxsplit=1)
    assert int(killed) >= (30 if mode == "moments" else 3)
    assert results.strip() == "[10, 20]"
