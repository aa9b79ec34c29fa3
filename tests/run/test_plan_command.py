"""`miles plan` from the command line, and the look at memory before a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles.__main__ import main
from miles.config.headers import read_headers
from miles.config.schema import Model, Recipe
from miles.errors import DoesNotFit, ModelError
from miles.learn.load import load_model
from miles.run.plan import GIB, check_fits
from miles.run.recipes import resolve

RECIPES = Path(__file__).parents[2] / "recipes"
LARGE = ("llama70b_grpo_lora", "llama70b_ppo_lora", "llama70b_ppo_full", "qwen3_8b_grpo")
TINY = ["--model.name", "tiny-random:llama", "--data.source", "task:addition", "--data.max_prompt_tokens", "24",
        "--rollout.max_new_tokens", "16", "--learner.tokens_per_microbatch", "128"]  # fmt: skip


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large recipes name their configs from the folder that holds recipes/."""
    monkeypatch.chdir(RECIPES.parent)


def shallow(name: str, folder: Path) -> str:
    """The config of a large recipe with one block, so that a plan takes seconds."""
    config = json.loads((RECIPES / "configs" / name).read_text())
    path = folder / name
    path.write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return str(path)


@pytest.mark.parametrize("recipe", LARGE)
def test_large_recipes_pass_the_check(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"recipes/{recipe}.toml"]) == 0
    assert "can be planned, not trained" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", LARGE)
def test_large_recipes_are_planned(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = "qwen3_8b.json" if recipe.startswith("qwen") else "llama_70b.json"
    arguments = ["--model.name", shallow(config, tmp_path), "--gpus", "8", "--gpu-memory", "80", "--json"]
    assert main(["plan", f"recipes/{recipe}.toml", *arguments]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"]
    assert plan["simulated_blocks"] == [1, 1]
    assert plan["microbatch"]["tokens"] <= plan["tokens_per_microbatch"] <= plan["largest_tokens_per_microbatch"]
    assert plan["peak"] == pytest.approx(plan["analytic"]["peak"], rel=0.25)
    assert sum(plan["resting"].values()) == pytest.approx(plan["analytic"]["resting"], rel=0.01)


def test_a_plan_shows_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(RECIPES / "ppo_arithmetic.toml"), *TINY, "--gpus", "2", "--gpu-memory", "4"]) == 0
    out = capsys.readouterr().out
    for text in (
        "parameters",
        "optimizer",
        "critic",
        "update actor",
        "collect",
        "It fits",
        "tokens/s",
        "Assumed of a GPU",
    ):
        assert text in out


def test_what_does_not_fit_ends_with_1_and_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    memory = str((1.5 + 8 / 1024) / 0.95)  # 8 MiB for tensors
    more = ["--learner.tokens_per_microbatch", "2048", "--engine.max_batch", "1", "--json"]
    assert main(["plan", str(RECIPES / "quickstart.toml"), *TINY, "--gpus", "1", "--gpu-memory", memory, *more]) == 1
    plan = json.loads(capsys.readouterr().out)
    assert not plan["fits"]
    assert plan["peak"] > plan["usable"]
    changes = {change["what"]: change for change in plan["changes"]}
    tokens = plan["largest_tokens_per_microbatch"]
    assert changes[f"learner.tokens_per_microbatch = {tokens}"]["fits"]
    assert changes["learner.gradient_checkpointing = true"]["peak"] < plan["peak"]
    assert changes["lora.rank = 16"]["peak"] != plan["peak"]
    assert not any(what.startswith("engine") for what in changes)


def test_where_sampling_does_not_fit_the_engine_is_what_changes(capsys: pytest.CaptureFixture[str]) -> None:
    memory = str((1.5 + 8 / 1024) / 0.95)
    arguments = [*TINY, "--gpus", "1", "--gpu-memory", memory, "--json"]
    assert main(["plan", str(RECIPES / "quickstart.toml"), *arguments]) == 1
    plan = json.loads(capsys.readouterr().out)
    assert plan["collecting"] > plan["usable"] >= max(plan["phases"].values())
    assert {change["what"]: change["fits"] for change in plan["changes"]}["engine.max_batch = 32"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpus", "0", "--gpu-memory", "80"], "0 is not above 0"),
        (["--gpus", "two", "--gpu-memory", "80"], "invalid int value"),
        (["--gpus", "8"], "--gpu-memory"),
        (["--gpus", "3", "--gpu-memory", "8", "--parallel.replicate", "2"], "parallel.replicate = 2"),
    ],
)
def test_bad_arguments(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(RECIPES / "quickstart.toml"), *TINY, *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_run_that_cannot_fit_is_refused_with_what_would() -> None:
    keys = dict(zip((name.removeprefix("--") for name in TINY[::2]), TINY[1::2], strict=True))
    recipe = resolve([RECIPES / "quickstart.toml"], keys, {})
    check_fits(recipe, GIB)
    with pytest.raises(
        DoesNotFit, match=r"^this does not fit: at the fullest moment \(.*\) the tensors of a GPU have 0\.0"
    ):
        check_fits(recipe, GIB / 1024)


def test_an_offloaded_reference_waits_in_the_machines_memory(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(RECIPES / "ppo_arithmetic.toml"), *TINY, "--gpus", "2", "--gpu-memory", "8", "--json"]
    plans = []
    for offload in ("false", "true"):
        assert main(["plan", *arguments, "--parallel.offload_reference", offload]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    kept, moved = plans
    assert kept["host"] == 0
    assert moved["host"] == kept["resting"]["parameters/frozen"]
    assert "parameters/frozen" not in moved["resting"]
    assert moved["peak"] < kept["peak"]


def test_a_config_alone_can_be_planned_and_not_loaded(tmp_path: Path) -> None:
    path = shallow("qwen3_8b.json", tmp_path)
    headers = read_headers(Recipe(model=Model(name=path)))
    assert headers.problems == []
    assert headers.facts["model.name"].startswith("config without weights: can be planned, not trained, qwen3")
    with pytest.raises(ModelError, match="a config without weights: it can be planned"):
        load_model(Model(name=path), seed=0)


def test_a_file_that_is_no_config_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text('{"a": 1}')
    (tmp_path / "c.json").write_text('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}')
    for name, sentence in (("a", "not valid JSON"), ("b", "has no model_type"), ("c", "is a BertForMaskedLM")):
        (problem,) = read_headers(Recipe(model=Model(name=str(tmp_path / f"{name}.json")))).problems
        assert sentence in problem
