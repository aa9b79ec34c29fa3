"""The adapters, reward model and critic that a recipe starts from: whether their files fit it, without reading a weight."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from miles.config.schema import Recipe

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INSIDE = "adapter"
"""Folder, inside of a whole scorer, with the adapter and head that it was made of."""
MARKER = "miles_export.json"
PEFT_PREFIX = "base_model.model."
HEAD = f"{PEFT_PREFIX}score.weight"
HEAD_BIAS = f"{PEFT_PREFIX}score.bias"
UNUSUAL = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "layers_to_transform", "lora_bias")


def adapter_folder(name: str) -> Path:
    """Where the adapter of this folder stands: in it, or beside the whole scorer that it was made into."""
    folder = Path(name).expanduser()
    inside = folder / INSIDE
    return inside if not (folder / ADAPTER_CONFIG).is_file() and inside.is_dir() else folder


def alpha_of(recipe: Recipe) -> float:
    """`lora.alpha`, or what stands for it where it is left out."""
    return 2.0 * (recipe.lora.rank or 0) if recipe.lora.alpha is None else recipe.lora.alpha


def adapter_problems(recipe: Recipe) -> Iterator[str]:
    """One sentence for each thing in the folders that does not fit."""
    lora, critic = recipe.lora, recipe.learner.critic_model
    if lora.path is not None and lora.rank is not None:
        yield from _adapter("lora.path", lora.path, recipe, head=False)
    if recipe.reward.model is not None and recipe.reward.model_place == "learner" and lora.rank is not None:
        yield from _adapter("reward.model", recipe.reward.model, recipe, head=True)
    if critic is not None and lora.rank is not None and lora.critic == "adapter":
        yield from _adapter("learner.critic_model", critic, recipe, head=True)


def whole_scorers(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(key, folder) of what must be a sequence classifier with weights of its own."""
    if recipe.reward.model is not None and recipe.reward.model_place == "collecting":
        yield "reward.model", recipe.reward.model
    if recipe.learner.critic_model is not None and (recipe.lora.rank is None or recipe.lora.critic == "full"):
        yield "learner.critic_model", recipe.learner.critic_model


def _adapter(key: str, name: str, recipe: Recipe, *, head: bool) -> Iterator[str]:
    where, folder = f"{key} = {name}", adapter_folder(name)
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        names = _tensors(folder / ADAPTER_WEIGHTS)
    except (OSError, ValueError, AttributeError) as error:
        wanted = (
            'an adapter and its head, as a run with algorithm.name = "reward_model" and lora.rank leaves them in final/'
            if head
            else "an adapter in peft's format, such as final/ of a run with lora.rank"
        )
        why = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)
        yield f"{where} cannot be read ({why}): give the folder of {wanted}."
        return
    yield from (f"{where} {problem}" for problem in _unlike(config, folder, recipe))
    yield from (f"{where} {problem}" for problem in _incomplete(names, recipe, head=head))


def _unlike(config: Mapping[str, Any], folder: Path, recipe: Recipe) -> Iterator[str]:
    """What the adapter's own settings say otherwise than the recipe."""
    if config.get("peft_type") != "LORA":
        yield f"is a {config.get('peft_type')} adapter: only LORA can be trained on."
        return
    if unusual := [key for key in UNUSUAL if config.get(key)]:
        yield f"has {unusual[0]} = {config[unusual[0]]}, which Miles does not train: give a plain LoRA adapter."
    if config.get("bias", "none") != "none":
        yield f"has bias = {config['bias']!r}: only adapters without trained biases can be read."
    if config.get("r") != recipe.lora.rank:
        yield f"has rank {config.get('r')}, and lora.rank = {recipe.lora.rank}: set lora.rank to {config.get('r')}."
    elif config.get("lora_alpha") != alpha_of(recipe):
        alpha = config.get("lora_alpha")
        yield f"has alpha {alpha}, and the recipe {alpha_of(recipe):g}: set lora.alpha to {alpha}."
    bases = _bases(config, folder)
    if bases and not any(_same(base, recipe.model.name) for base in bases):
        yield (
            f"stands on the base {bases[0]}, and model.name = {recipe.model.name}: set model.name to its base (where both are one "
            f"model under two names, write this one into {ADAPTER_CONFIG})."
        )


def _incomplete(names: Mapping[str, list[int]], recipe: Recipe, *, head: bool) -> Iterator[str]:
    """What its tensors lack or have too much."""
    layers = {name.rpartition(".lora_")[0] for name in names if ".lora_" in name}
    lost = [f"{layer}.lora_{side}.weight" for layer in sorted(layers) for side in "AB"]
    lost = [name for name in lost if name not in names]
    if lost or not layers:
        yield f"lacks {lost[0] if lost else 'every tensor of an adapter'}: the file is not whole; copy it again."
    wrong = [n for n, shape in names.items() if n.endswith(".lora_A.weight") and shape[0] != recipe.lora.rank]
    if wrong and not lost:
        yield f"has {wrong[0]} of rank {names[wrong[0]][0]}, not lora.rank = {recipe.lora.rank}."
    if head and HEAD not in names:
        yield (
            "has no head that gives a score (score.weight): give the adapter of a reward model or a critic, not that of a policy."
        )
    beside = [name for name in names if ".lora_" not in name and not (head and name in (HEAD, HEAD_BIAS))]
    if beside:
        yield f"holds {beside[0]}, which is no part of a LoRA adapter{'' if head else ' of a policy'}."


def _bases(config: Mapping[str, Any], folder: Path) -> list[str]:
    """Names under which the adapter knows its base: that of the recipe it was trained with, where it is known, first."""
    found = [config.get("base_model_name_or_path")]
    for place in (folder.parent, folder):
        try:
            facts = json.loads((place / MARKER).read_text(encoding="utf-8"))["facts"]
            found.insert(0, facts["recipe"]["model"]["name"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return [str(name) for name in found if name]


def _same(base: str, name: str) -> bool:
    places = [Path(each).expanduser() for each in (base, name)]
    return base == name or (all(place.exists() for place in places) and places[0].resolve() == places[1].resolve())


def _tensors(file: Path) -> dict[str, list[int]]:
    """Names and shapes in a safetensors file, from its header. Raises OSError and ValueError."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if not 0 < size <= file.stat().st_size:
            raise ValueError(f"{file} is no safetensors file")
        header = json.loads(stream.read(size))
    return {name: list(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
