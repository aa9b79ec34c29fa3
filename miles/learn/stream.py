"""Models that no rank holds whole: built without memory, spread over ranks, then filled from the files, each rank its part."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor, nn

from miles.errors import ModelError
from miles.learn.critic import Critic, weights_of, zero
from miles.learn.foreign import FileNames
from miles.learn.optim import matching
from miles.learn.shards import Box, Joined, Stored

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def stored_weights(model: PreTrainedModel, file: Callable[[str], Path | None], name: str) -> dict[str, Stored]:
    """Where each weight of the model stands in its safetensors files; nothing but their headers is read.

    file: path of one of the model's files, None where it has none of that name. name: of the model, for messages. Raises
    ModelError where a weight is missing, or stored in a way that cannot be read in parts.
    """
    found = {stored.name: stored for path in weight_files(file, f"model.name = {name!r}") for stored in stored_in(path)}
    names, out = FileNames(model), {}
    for key, tensor in weights_of(model).items():
        same = found.get(key)
        there = (
            same
            if same is not None and same.shape == tensor.shape
            else _joined(names.boxes(key, tensor), found, key, tensor)
        )
        if there is None:
            stored = f"in the shape {tuple(same.shape)}" if same is not None else "under no such name"
            raise ModelError(
                f"model.name = {name!r} cannot be read part by part: {type(model).__name__} has {key} of shape "
                f"{tuple(tensor.shape)}, which its files hold {stored}. Load it with transformers and write it with "
                "save_pretrained into a folder, or train it on one rank."
            )
        out[key] = there
    return out


def _joined(boxes: Mapping[str, Box], found: Mapping[str, Stored], key: str, tensor: Tensor) -> Stored | None:
    """A weight that the files hold under another name, or in several tensors; None where one of them is not there."""
    if any(name not in found or tuple(found[name].shape) != box.shape for name, box in boxes.items()):
        return None
    if sum(math.prod(box.extent) for box in boxes.values()) != tensor.numel() or not boxes:
        return None
    parts = tuple((found[name], box) for name, box in boxes.items())
    return Joined(key, tensor.shape, parts[0][0].dtype, (), parts)


def fill(model: PreTrainedModel, weights: Mapping[str, Stored], rename: Callable[[str], str | None] = str) -> None:
    """Reads this rank's part of each weight into a model that has memory without values, and computes its other buffers.

    rename: from a name in the model to one of the weights; None for what is not among them.
    """
    _fill_buffers(model)
    with torch.no_grad():
        for key, tensor in weights_of(model).items():
            if (name := rename(key)) is not None:
                tensor.copy_(matching(weights, name, tensor))


def fill_critic(critic: Critic, actor: PreTrainedModel, weights: Mapping[str, Stored], device: torch.device) -> None:
    """Memory, the weights of the actor's trunk, and a head of zeros."""
    prefix = actor.base_model_prefix
    with_memory(critic, critic.trunk, device)
    fill(critic.trunk, weights, lambda key: f"{prefix}.{key}")
    zero(critic.value_head)


def with_memory(root: nn.Module, model: PreTrainedModel, device: torch.device) -> None:
    """Memory without values for a root that was built without, its tied weights still one."""
    root.to_empty(device=device)
    model.tie_weights()


def _fill_buffers(model: PreTrainedModel) -> None:
    """Buffers that no file holds (rotary frequencies, scales) by the model's own code. Raises ModelError where it has none."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # what that code is told to leave alone
    for path, module in model.named_modules():
        names = module._non_persistent_buffers_set
        buffers = {name: module.get_buffer(name) for name in names if module._buffers.get(name) is not None}
        for buffer in buffers.values():
            if buffer.is_floating_point():
                buffer.fill_(math.nan)
        if buffers:
            model._init_weights(module)
        if bad := [name for name, buffer in buffers.items() if buffer.is_floating_point() and buffer.isnan().any()]:
            raise ModelError(
                f"{type(model).__name__} does not say how its buffer {path}.{bad[0]} is computed, so it cannot be built part "
                "by part: train it on one rank."
            )


def weight_files(file: Callable[[str], Path | None], place: str) -> list[Path]:
    """The safetensors files of a folder; file: as in `stored_weights`, place: the key and its value. Raises ModelError."""
    index = file(INDEX)
    names = [SINGLE] if index is None else sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    paths = {each: file(each) for each in names}
    if missing := [each for each, path in paths.items() if path is None]:
        raise ModelError(f"{place} has no file {missing[0]}: complete the folder, or name another one.")
    return [path for path in paths.values() if path is not None]


def stored_in(path: Path) -> Iterator[Stored]:
    """What a safetensors file holds, from its header."""
    with safe_open(path, "pt") as file:
        for key in file.keys():  # noqa: SIM118
            part = file.get_slice(key)
            shape = torch.Size(part.get_shape())
            if (dtype := _TYPES.get(part.get_dtype())) is not None:
                yield Stored(key, shape, dtype, ((path, (0,) * len(shape), tuple(shape)),))
