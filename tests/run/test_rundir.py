"""A run directory is new, or holds the run that goes on; what a killed process left half-made is in nobody's way."""

from __future__ import annotations

import re
import tomllib

import pytest

from miles.buffer.place import RunLock
from miles.errors import RunDirError
from miles.run.recipes import resolve
from miles.run.rundir import begin_run_dir, check_run_dir, default_run_dir, fixed_hash, stored_recipe, write_config

BASE = {"model.name": "tiny-random:llama", "data.source": "task:addition", "algorithm.steps": 4}


def recipe(**changes):
    return resolve([], {**BASE, **{key.replace("__", "."): value for key, value in changes.items()}}, {})


def test_a_new_directory_holds_its_recipe(tmp_path):
    folder = tmp_path / "runs" / "new"
    check_run_dir(folder, recipe(), resume=False)
    assert not folder.parent.exists()
    begin_run_dir(folder, recipe())
    assert stored_recipe(folder) == recipe()
    with pytest.raises(RunDirError, match="is not empty"):
        check_run_dir(folder, recipe(), resume=False)
    check_run_dir(folder, recipe(algorithm__steps=9, run__threads=1, eval__samples=2), resume=True)


def test_half_a_recipe_of_a_killed_process_is_no_run(tmp_path):
    (tmp_path / "config.toml.part").write_text("[mod")
    (tmp_path / "ledger.lock").touch()
    check_run_dir(tmp_path, recipe(), resume=False)
    begin_run_dir(tmp_path, recipe())
    assert stored_recipe(tmp_path) == recipe()
    assert not (tmp_path / "config.toml.part").exists()


def test_who_comes_second_is_refused(tmp_path):
    begin_run_dir(tmp_path, recipe())
    with pytest.raises(RunDirError, match="is not empty"):
        begin_run_dir(tmp_path, recipe(algorithm__steps=5))
    lock = RunLock(tmp_path)
    with pytest.raises(RunDirError, match="is in use by process"):
        begin_run_dir(tmp_path, recipe())
    lock.release()
    assert stored_recipe(tmp_path).algorithm.steps == 4


def test_a_recipe_is_replaced_as_a_whole(tmp_path):
    write_config(tmp_path, recipe())
    write_config(tmp_path, recipe(algorithm__steps=5))
    assert tomllib.loads((tmp_path / "config.toml").read_text())["algorithm"]["steps"] == 5
    with pytest.raises(
        RunDirError, match=r"cannot write .*none/config.toml: No such file or directory; choose another"
    ):
        write_config(tmp_path / "none", recipe())


def test_every_key_outside_of_the_free_ones_is_fixed():
    free = {
        "algorithm__steps": 9,
        "learner__tokens_per_microbatch": 8,
        "run__threads": 7,
        "log__project": "x",
        "eval__every": 1,
    }
    assert fixed_hash(recipe(**free)) == fixed_hash(recipe())
    for change in (
        {"run__seed": 1},
        {"learner__eps": 1e-7},
        {"rollout__stop": ["x"]},
        {"algorithm__correction__mode": "bypass"},
    ):
        assert fixed_hash(recipe(**change)) != fixed_hash(recipe()), change


def test_a_run_started_from_python_has_no_source(tmp_path):
    given = ["data.source", "reward.functions"]
    changes = {"model.name": "tiny-random:llama", "algorithm.steps": 1, "reward.weights": [1.0, 2.0]}
    write_config(tmp_path, resolve([], changes, {}, given=given))
    assert stored_recipe(tmp_path).data.source == ""


def test_runs_of_one_second_have_names_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(3):
        folder = default_run_dir("quick")
        folder.mkdir(parents=True)
        names.append(folder.name)
    assert len(set(names)) == 3
    assert all(re.fullmatch(r"quick-\d{8}-\d{6}(-\d)?", name) for name in names)
