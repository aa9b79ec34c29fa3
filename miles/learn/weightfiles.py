"""Writes a model's weights and config into a folder, one file after the other, so that no more than one file's weights are held."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from miles.learn import folders
from miles.learn.critic import weights_of
from miles.learn.stream import INDEX, SINGLE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Weights = Iterable[tuple[str, Tensor]]
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def write_model(
    model: PreTrainedModel,
    weights: Mapping[str, Tensor] | Weights | None,
    dtype: torch.dtype | None,
    max_shard_size: str,
    folder: Path,
) -> None:
    """Config and weights; the arguments as of `export.export`. Raises ValueError where weights lack or exceed the model's."""
    given = weights_of(model) if weights is None else weights
    pairs = _named(model, given.items() if isinstance(given, Mapping) else given, dtype)
    shell = _shell(model)
    if _stored_otherwise(model):
        # transformers undoes its own renamings and fusions of weights while it saves, and needs all of them for it.
        state = dict(pairs)
        shell.save_pretrained(folder, state_dict=state, max_shard_size=max_shard_size)
    else:
        shell.save_pretrained(folder, state_dict={}, max_shard_size=max_shard_size)
        left_out = set(model._keys_to_ignore_on_save or ())
        _write_files((pair for pair in pairs if pair[0] not in left_out), size_of(max_shard_size), folder)
    if dtype is not None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        folders.write_json(folder / "config.json", {**config, "dtype": str(dtype).removeprefix("torch.")})


def size_of(text: str) -> int:
    """Bytes of "5GB", "60KB"."""
    return int(float(text[:-2]) * UNITS[text[-2:].upper()])


def _shell(model: PreTrainedModel) -> PreTrainedModel:
    """The same parameters under a config of its own: saving writes into the config, and refuses generation configs that loading takes."""
    shell = copy.copy(model)
    shell.config = copy.deepcopy(model.config)
    if model.can_generate():
        shell.generation_config = type(model.generation_config)()
    return shell


def _stored_otherwise(model: PreTrainedModel) -> bool:
    """Whether files hold the model's weights under other names or in other shapes than the model itself (fused experts)."""
    own = {name: torch.empty(tensor.shape, device="meta") for name, tensor in weights_of(model).items()}
    found = revert_weight_conversion(model, dict(own))
    return {name: tensor.shape for name, tensor in found.items()} != {
        name: tensor.shape for name, tensor in own.items()
    }


def _named(model: PreTrainedModel, weights: Weights, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """The weights on the CPU under the names that files give them, a tied one once; all of them, and no other."""
    own = model.state_dict(keep_vars=True)
    first = {id(own[name]): name for name in reversed(own)}
    waiting = dict.fromkeys(first.values())
    for name, tensor in weights:
        if name not in own:
            raise ValueError(f"weights has {name!r}, which {type(model).__name__} does not have")
        known = first[id(own[name])]
        if known in waiting:
            del waiting[known]
            tensor = tensor.detach().cpu()
            yield known, tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
    if waiting:
        raise ValueError(f"weights lacks {next(iter(waiting))!r} of {type(model).__name__}")


def _write_files(weights: Weights, limit: int, folder: Path) -> None:
    """Files of at most `limit` bytes, or of one weight that is larger; an index where there are several."""
    files: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = 0

    def part(number: int) -> Path:
        return folder / f"part-{number:05d}.safetensors"

    def let_go() -> None:
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, part(len(files)), {"format": "pt"})
        files.append(list(held))
        held.clear()

    for name, tensor in weights:
        if held and sum(each.nbytes for each in held.values()) + tensor.nbytes > limit:
            let_go()
        held[name] = tensor
        total += tensor.nbytes
    let_go()
    names = (
        [SINGLE]
        if len(files) == 1
        else [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    )
    for number, name in enumerate(names):
        part(number).rename(folder / name)
    if len(files) > 1:
        places = {weight: name for name, inside in zip(names, files, strict=True) for weight in inside}
        folders.write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
