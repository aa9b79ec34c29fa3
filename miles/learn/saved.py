"""Adapters, heads and critics that stand in folders, read into the models of a run; each rank reads its part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch import nn

from miles.config.adapters import ADAPTER_WEIGHTS, HEAD, HEAD_BIAS, PEFT_PREFIX, adapter_folder
from miles.errors import ModelError
from miles.learn.adapters import adapter_parameters, layers_of, target_paths
from miles.learn.critic import Critic, weights_of, zero
from miles.learn.folders import file_hash
from miles.learn.shards import Stored
from miles.learn.stream import stored_in, weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from miles.config.schema import Recipe
    from miles.learn.model import Role


@dataclass(frozen=True)
class Saved:
    """A folder, and the key of the recipe that names it."""

    key: str
    folder: str

    @property
    def place(self) -> str:
        return f"{self.key} = {self.folder}"

    @property
    def files(self) -> list[Path]:
        """Of an adapter."""
        return [adapter_folder(self.folder) / ADAPTER_WEIGHTS]


def saved_adapters(recipe: Recipe) -> dict[Role, Saved]:
    """What the adapters of a run start from, by role; roles that are not there start anew."""
    lora, reward = recipe.lora, recipe.reward
    found: dict[Role, Saved] = {}
    if lora.path is not None:
        found["actor"] = Saved("lora.path", lora.path)
    if recipe.learner.critic_model is not None and lora.critic == "adapter":
        found["critic"] = Saved("learner.critic_model", recipe.learner.critic_model)
    if reward.model is not None and reward.model_place == "learner":
        found["reward_model"] = Saved("reward.model", reward.model)
    return found


def saved_critic(recipe: Recipe) -> Saved | None:
    """What critics with full weights start from; None: the policy's own weights and a head of zeros."""
    folder = recipe.learner.critic_model
    return None if folder is None else Saved("learner.critic_model", folder)


def saved_files(recipe: Recipe) -> dict[str, list[Path]]:
    """The files with weights that a run starts from beside its model's, by the key that names them."""
    found = {}
    if recipe.lora.rank is not None:
        for saved in saved_adapters(recipe).values():
            found[saved.key] = saved.files
    critic = saved_critic(recipe)
    if critic is not None and critic.key not in found:
        found[critic.key] = _classifier_files(critic)
    return found


def files_hash(files: Iterable[Path]) -> str:
    """SHA-256 over the hashes of files, in their order."""
    return hashlib.sha256("".join(file_hash(file) for file in files).encode()).hexdigest()


def check_saved(model: PreTrainedModel, recipe: Recipe) -> None:
    """Whether the adapters that the run starts from fit the model's layers, by their headers. Raises ModelError."""
    paths = target_paths(model, recipe.lora.targets)
    sizes = {path: model.get_submodule(path) for path in paths}
    for saved in saved_adapters(recipe).values():
        found = _stored(saved.files, saved)
        wanted = {_in_file(path, side) for path in paths for side in "AB"}
        lost = sorted(wanted - found.keys())
        more = sorted(key for key in found.keys() - wanted if ".lora_" in key)
        if lost or more:
            said = (
                f"has no {lost[0]}, which lora.targets asks for"
                if lost
                else f"has {more[0]}, which lora.targets leaves out"
            )
            raise ModelError(
                f"{saved.place} {said}: set lora.targets to the layers that the adapter was trained on, on the same base."
            )
        for path, layer in sizes.items():
            _fitting(found, _in_file(path, "A"), (recipe.lora.rank, layer.in_features), saved)
            _fitting(found, _in_file(path, "B"), (layer.out_features, recipe.lora.rank), saved)


def load_adapter(model: nn.Module, name: str, head: nn.Linear | None, saved: Saved) -> None:
    """Copies a saved adapter, and its head where there is one, into the adapter of that name. Raises ModelError."""
    found = _stored(saved.files, saved)
    parameters = adapter_parameters(model, name)
    for path in layers_of(model):
        for side in "AB":
            _copy(parameters[f"{path}.{side}.{name}.weight"], found, _in_file(path, side), saved)
    if head is not None:
        _load_head(head, found, HEAD, HEAD_BIAS, saved)


def load_critic(critic: Critic, prefix: str, saved: Saved) -> None:
    """Copies a saved sequence classifier into trunk and head; `prefix`: of the trunk's names in it. Raises ModelError."""
    found = _stored(_classifier_files(saved), saved)
    for name, tensor in weights_of(critic.trunk).items():
        _copy(tensor, found, f"{prefix}.{name}", saved)
    _load_head(critic.value_head, found, "score.weight", "score.bias", saved)


def _load_head(head: nn.Linear, found: Mapping[str, Stored], weight: str, bias: str, saved: Saved) -> None:
    """A score without a bias is a value whose bias is 0."""
    zero(head)
    _copy(head.weight, found, weight, saved)
    if bias in found and head.bias is not None:
        _copy(head.bias, found, bias, saved)


def _copy(tensor: torch.Tensor, found: Mapping[str, Stored], name: str, saved: Saved) -> None:
    _fitting(found, name, tensor.shape, saved)
    with torch.no_grad():
        tensor.copy_(found[name].like(tensor))


def _fitting(found: Mapping[str, Stored], name: str, shape: Sequence[int | None], saved: Saved) -> None:
    if name not in found:
        raise ModelError(f"{saved.place} has no tensor {name}: it was made of another model than model.name.")
    if tuple(found[name].shape) != tuple(shape):
        raise ModelError(
            f"{saved.place} has {name} of shape {tuple(found[name].shape)}, and the model of this run {tuple(shape)}: it was made "
            "of another model than model.name."
        )


def _in_file(path: str, side: str) -> str:
    return f"{PEFT_PREFIX}{path}.lora_{side}.weight"


def _stored(files: Iterable[Path], saved: Saved) -> dict[str, Stored]:
    try:
        return {stored.name: stored for file in files for stored in stored_in(file)}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{saved.place} cannot be read: {error}") from error


def _classifier_files(saved: Saved) -> list[Path]:
    folder = Path(saved.folder).expanduser()
    return weight_files(lambda name: path if (path := folder / name).is_file() else None, saved.place)
