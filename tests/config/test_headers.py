"""What a look at folders and files tells before anything is loaded or run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from miles.config.headers import read_headers, reference_problems
from miles.config.names import is_hub_id, split_reference
from miles.config.schema import Data, Model, Recipe, Reward, Rollout

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512}


def folder(path: Path, config: Any = LLAMA, weights: bool = True) -> Path:
    path.mkdir()
    if config is not None:
        (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    if weights:
        (path / "model.safetensors").touch()
    return path


def look(name: str, rollout: Rollout | None = None, data: Data | None = None) -> tuple[list[str], dict[str, str]]:
    recipe = Recipe(model=Model(name=name), rollout=rollout or Rollout(), data=data or Data())
    headers = read_headers(recipe)
    return headers.problems, headers.facts


def test_a_whole_folder_is_fine_and_described(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    assert look(str(path)) == ([], {"model.name": "folder, llama, context 512 tokens"})


@pytest.mark.parametrize(
    ("config", "weights", "sentence"),
    [
        (None, True, "holds no config.json: give the folder of a Hugging Face causal language model."),
        ("{", True, "its config.json is not valid JSON (Expecting property name"),
        ([1], True, "its config.json has no model_type, so nothing says what the weights are."),
        ({"architectures": ["X"]}, True, "its config.json has no model_type, so nothing says what the weights are."),
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            True,
            "is a BertForMaskedLM: give a causal language model.",
        ),
        (LLAMA, False, "holds no .safetensors weights: convert them first, other formats are not read."),
    ],
)
def test_folders_that_cannot_be_trained(tmp_path: Path, config: Any, weights: bool, sentence: str) -> None:
    path = folder(tmp_path / "model", config, weights)
    (problem,) = look(str(path))[0]
    assert problem.startswith(f"model.name = {path}")
    assert sentence in problem


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").touch()
    (problem,) = look(str(tmp_path / "weights.gguf"))[0]
    assert "holds no config.json" in problem


@pytest.mark.parametrize(
    ("config", "tokens", "prompt", "fits"),
    [
        (LLAMA, 511, None, True),
        (LLAMA, 512, None, False),
        (LLAMA, 256, 256, True),
        (LLAMA, 256, 257, False),
        ({"model_type": "gpt2", "n_positions": 16}, 16, None, False),
        ({"model_type": "gemma3", "text_config": {"max_position_embeddings": 16}}, 16, None, False),
        ({"model_type": "mamba"}, 10**6, None, True),
    ],
)
def test_lengths_must_fit_the_context(
    tmp_path: Path, config: dict[str, Any], tokens: int, prompt: int | None, fits: bool
) -> None:
    path = folder(tmp_path / "model", config)
    problems, _ = look(str(path), Rollout(max_new_tokens=tokens), Data(max_prompt_tokens=prompt))
    assert (problems == []) is fits
    assert fits or problems[0].startswith(f"rollout.max_new_tokens = {tokens} and ")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("org/model", None),
        ("gpt2", None),
        ("smollm2-135m-instruct-q4", None),
        ("tiny-random:llama", None),
        ("tiny-random:qwen3-untied", None),
        ("tiny-random:bert", "names no family: give tiny-random:FAMILY with FAMILY one of llama, qwen3"),
        ("no/such/folder", "does not exist here, or may not be read: give a hub id or a folder with a config.json."),
        ("./folder", "does not exist here, or may not be read: give a hub id or a folder with a config.json."),
    ],
)
def test_names_of_models(name: str, problem: str | None) -> None:
    problems, _ = look(name)
    assert len(problems) == (problem is not None)
    assert problem is None or problem in problems[0]


def test_objects_from_python_are_not_looked_for(tmp_path: Path) -> None:
    recipe = Recipe(model=Model(name="no/such/folder"), reward=Reward(functions=("no.py:f",)))
    assert read_headers(recipe, given=["model.name", "reward.functions"]).problems == []


CODE = """
import math as m
from os import path, sep as separator
import collections.abc
ROW: int = 3
a, (b, c) = 1, (2, 3)
if True:
    async def inner(): ...
else:
    try:
        class Other: ...
    except ImportError:
        pass
def score(prompts, completions): local = 1
"""


@pytest.mark.parametrize(
    ("name", "found"),
    [(n, True) for n in ("m", "path", "separator", "collections", "ROW", "a", "c", "inner", "Other", "score")]
    + [("local", False), ("os", False)],
)
def test_a_reference_is_found_without_running_the_file(tmp_path: Path, name: str, found: bool) -> None:
    path = tmp_path / "mine.py"
    path.write_text(CODE + "raise SystemExit('was run')\n", encoding="utf-8")
    problems = list(reference_problems("reward.functions", f"{path}:{name}"))
    assert (problems == []) is found
    assert found or problems[0].startswith(
        f"reward.functions = {path}:{name}: {path} does not define {name}; it defines"
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "does not exist."),
        ("def f(:\n", "is not valid Python, line 1 ("),
        ("\0", "is not valid Python"),
        ("", "does not define f; it defines nothing."),
        ("folder", "cannot be read (Is a directory)."),
    ],
)
def test_files_that_bring_no_name(tmp_path: Path, content: str | None, sentence: str) -> None:
    path = tmp_path / "mine.py"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_text(content, encoding="utf-8")
    (problem,) = reference_problems("algorithm.name", f"{path}:f")
    assert sentence in problem


def test_a_star_import_may_bring_any_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("from os.path import *", encoding="utf-8")
    assert list(reference_problems("algorithm.name", f"{path}:join")) == []


def test_names_of_rewards_and_environments() -> None:
    recipe = Recipe(reward=Reward(functions=("exact", "exact_number")), rollout=Rollout(environment="Guess"))
    assert read_headers(recipe, known_rewards=["exact_number"]).problems == [
        "reward.functions = exact is not known: give one of exact_number, or path/to/file.py:NAME.",
        "rollout.environment = Guess is not known: give path/to/file.py:NAME.",
    ]


@pytest.mark.parametrize(
    ("name", "hub"),
    [
        ("org/name", True),
        ("name", True),
        ("org/name.with-dots_1", True),
        ("org/data:subset", True),
        ("rows.jsonl", False),
        ("folder/rows.parquet", False),
        ("task:addition", False),
        ("tiny-random:llama", False),
        ("smollm2-135m-instruct-q4", False),
        ("a/b/c", False),
        ("/etc", False),
        (".", False),
        ("", False),
    ],
)
def test_hub_ids(name: str, hub: bool) -> None:
    assert is_hub_id(name) is hub


def test_references_are_split_at_the_last_colon() -> None:
    assert split_reference("a/b.py:f") == (Path("a/b.py"), "f")
    assert split_reference("a:b.py:f") == (Path("a:b.py"), "f")
    assert [split_reference(text) for text in ("a.py", "a.txt:f", "a.py:", "a.py:1f", "grpo")] == [None] * 5
