"""Commands in the surroundings that users have: pipes that close, proxies that are dead, odd paths, other folders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEAD = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9")


def miles(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "miles", *arguments]
    return subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False, **options)


@pytest.mark.parametrize("arguments", [["check", "recipes/quickstart.toml"], ["--help"]])
def test_a_reader_that_has_gone_is_no_error(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    ended = miles(*arguments, stdout=writer)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_full_output_is_an_error():
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    with open("/dev/full", "w") as full:
        ended = miles("check", "recipes/quickstart.toml", stdout=full)
    assert ended.returncode == 1
    assert "No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_closed_streams(processes, runs, tmp_path):
    """What the run writes must not end up in the files that took the streams' numbers."""
    ended = processes.run(runs.arguments("run", {}), tmp_path / "log", closed=[1, 2])
    assert ended.code == 0
    for name in ("metrics.jsonl", "samples.jsonl", "config.toml"):
        assert "prompt 1" not in (runs["run"] / name).read_text(encoding="utf-8")
    assert (runs["run"] / "final" / "model.safetensors").exists()


def test_a_dead_proxy_another_folder_and_a_path_with_spaces_and_accents(processes, runs, tmp_path):
    elsewhere = tmp_path / "élsewhere und anders"
    elsewhere.mkdir()
    runs.recipe = runs.recipe.rename(tmp_path / "mein rezept ü.toml")
    arguments = [*runs.arguments("ignored", {"eval.rows": 2, "data.source": "task:addition"})[:-1], "läufe/1 2/日本"]
    ended = processes.run(arguments, tmp_path / "log", cwd=str(elsewhere), environ=DEAD)
    assert ended.code == 0, ended.out
    final = elsewhere / "läufe" / "1 2" / "日本" / "final"
    assert (final / "model.safetensors").exists()
    assert f"model:  {final.relative_to(elsewhere)}" in ended.out


def test_the_default_folder_is_named_by_recipe_and_time(processes, runs, tmp_path):
    ended = processes.run(runs.arguments("x", {"algorithm.steps": 1})[:-2], tmp_path / "log", cwd=str(tmp_path))
    assert ended.code == 0, ended.out
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("tiny-20")


def test_a_hub_that_cannot_be_reached(processes, runs, tmp_path):
    environ = {**DEAD, "HF_HOME": str(tmp_path / "hub")}
    arguments = runs.arguments("run", {"model.name": "some-one/some-model"})
    ended = processes.run(arguments, tmp_path / "log", environ=environ)
    assert ended.code == 2
    assert "Traceback" not in ended.out
    assert "model.name = 'some-one/some-model' is no folder here, the hub cannot be reached" in ended.err
    assert not runs["run"].exists()


@pytest.mark.slow
def test_a_hub_that_is_switched_off(runs, tmp_path):
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    ended = miles(*runs.arguments("run", {"model.name": "some-one/some-model"}), env=environ)
    assert ended.returncode == 2
    assert "the hub is switched off (HF_HUB_OFFLINE)" in ended.stderr
