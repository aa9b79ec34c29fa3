"""LoRA adapters on the linear layers of a frozen model, several of them side by side, of which one is on at a time.

y = W x + (alpha / rank) * B A x.  LoRA, arXiv:2106.09685, section 4.1: A starts random, B at 0. Adapters are float32 whatever
the base is stored in; their product is added in float32 and the sum is cast back, as peft does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from miles.errors import ConfigError
from miles.kernels.quantized import BLOCK, QuantizedLinear
from miles.learn.blocks import blocks_of
from miles.learn.critic import weights_of
from miles.learn.optim import matching
from miles.learn.parallel import put, whole
from miles.learn.shards import Stored

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from miles.config.schema import Lora

ALL = "all-linear"
BASE = ".base."


class Switch:
    """Which adapter of a model is on: one attribute for all of its layers. None: the base alone."""

    adapter: str | None = None


class LoRALinear(nn.Module):
    """A linear layer with adapters by name."""

    def __init__(self, base: nn.Linear, switch: Switch, scale: float) -> None:
        super().__init__()
        self.base, self.switch, self.scale = base, switch, scale
        self.A, self.B = nn.ModuleDict(), nn.ModuleDict()

    def add(self, name: str, rank: int) -> None:
        """An adapter without values on a meta device, else zeros; see `start`."""
        device = self.base.weight.device
        self.A[name] = nn.Linear(self.base.in_features, rank, False, device, torch.float32)
        self.B[name] = nn.Linear(rank, self.base.out_features, False, device, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        name = self.switch.adapter
        if name is None:
            return y
        down, up = self.A[name], self.B[name]
        return (y + up(down(x.to(down.weight.dtype))) * self.scale).to(y.dtype)


def attach(model: PreTrainedModel, names: Sequence[str], lora: Lora, seed: int) -> Switch:
    """Freezes the model and puts adapters of these names on its layers, in place of any that are there; the first is on.

    Raises ConfigError where a target names no linear layer.
    """
    assert lora.rank is not None
    detach(model)
    model.requires_grad_(False)
    switch = Switch()
    switch.adapter = names[0]
    for path in target_paths(model, lora.targets):
        layer = LoRALinear(model.get_submodule(path), switch, scale_of(lora))
        for name in names:
            layer.add(name, lora.rank)
        model.set_submodule(path, layer)
    for name in names:
        start(model, name, seed)
    return switch


def detach(model: nn.Module) -> None:
    """Puts the plain layers back."""
    for path, layer in layers_of(model).items():
        model.set_submodule(path, layer.base)


def layers_of(model: nn.Module) -> dict[str, LoRALinear]:
    """By their paths."""
    return {path: module for path, module in model.named_modules() if isinstance(module, LoRALinear)}


def scale_of(lora: Lora) -> float:
    """alpha / rank; alpha is 2 * rank where the recipe names none."""
    return 2.0 if lora.alpha is None or lora.rank is None else lora.alpha / lora.rank


def target_paths(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """Paths of the linear layers that the targets name, in the order of the model. Raises ConfigError."""
    inside = {id(module) for block in blocks_of(model.base_model) for module in block.modules()}
    linear = [path for path, m in model.named_modules() if isinstance(m, nn.Linear) and id(m) in inside]
    known = sorted({path.rpartition(".")[2] for path in linear})
    if not known:
        raise ConfigError(
            f"lora.rank is set, but {type(model).__name__} has no blocks with linear layers that an adapter could stand on: "
            "train full weights (leave lora.rank out), or choose another model."
        )
    for target in targets:
        if target != ALL and not any(_names(target, path) for path in linear):
            raise ConfigError(
                f'lora.targets holds "{target}", which is no linear layer in the blocks of {type(model).__name__}: it has '
                f'{", ".join(known)} ("{ALL}" takes every one).'
            )
    return [path for path in linear if any(target == ALL or _names(target, path) for target in targets)]


def quantize_base(model: nn.Module, bits: int) -> None:
    """Stores the base of each layer with adapters in 8 or 4 bits. Raises ConfigError for a layer whose width does not divide."""
    for path, layer in layers_of(model).items():
        if layer.base.in_features % BLOCK:
            raise ConfigError(
                f"lora.base_bits = {bits}: {path} has {layer.base.in_features} inputs, which is no multiple of {BLOCK}: leave it out "
                "of lora.targets, or lora.base_bits."
            )
        layer.base = QuantizedLinear(layer.base, bits)


def start(model: nn.Module, name: str, seed: int) -> None:
    """A uniform in +-1 / sqrt(inputs), drawn from (seed, name, path of the layer), so the same on every rank; B 0."""
    for path, layer in layers_of(model).items():
        down, up = layer.A[name].weight, layer.B[name].weight
        if down.is_meta:
            continue
        generator = torch.Generator().manual_seed(random.Random(f"adapter {seed} {name} {path}").getrandbits(63))
        bound = 1 / math.sqrt(layer.base.in_features)
        with torch.no_grad():
            put(down, torch.empty(down.shape).uniform_(-bound, bound, generator=generator))
            up.zero_()


def adapter_parameters(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """The weights of one adapter, by their names in the model."""
    return {key: p for key, p in model.named_parameters() if _adapter_of(key) == name}


def name_in_base(key: str) -> str | None:
    """The name that a weight has without adapters; None for a weight of an adapter."""
    if _adapter_of(key) is not None:
        return None
    return key.replace(BASE, ".")


def copy_adapter(model: nn.Module, source: str, target: str) -> None:
    """Makes one adapter equal to another."""
    with torch.no_grad():
        for layer in layers_of(model).values():
            layer.A[target].weight.copy_(layer.A[source].weight)
            layer.B[target].weight.copy_(layer.B[source].weight)


def load_parameters(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor | Stored]) -> None:
    """Copies tensors into parameters of the same names. Raises CheckpointError."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(matching(tensors, name, parameter))


def merged_weights(model: nn.Module, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every weight, whole, under the name that it has without adapters; float32 W + (alpha / rank) * B A where there is one.

    On several ranks all of them iterate together. The layers are those that stand there when this is called.
    """
    return _merged(layers_of(model), weights_of(model), name)


def _merged(layers: Mapping[str, LoRALinear], weights: Mapping[str, Tensor], name: str) -> Iterator[tuple[str, Tensor]]:
    for key, tensor in weights.items():
        if _adapter_of(key) is not None:
            continue
        path, _, kind = key.rpartition(BASE)
        if path not in layers:
            yield key, whole(tensor)
        elif kind == "weight":
            yield f"{path}.weight", layers[path].scale * delta(layers[path], name) + whole(tensor).float()
        elif kind == "codes":
            base = layers[path].base
            weight = base.weight_of(whole(tensor), whole(weights[f"{path}{BASE}scales"]))
            yield f"{path}.weight", layers[path].scale * delta(layers[path], name) + weight.float()
        elif kind != "scales":
            yield f"{path}.{kind}", whole(tensor)


def delta(layer: LoRALinear, name: str) -> Tensor:
    """[outputs, inputs] float32, B A."""
    return whole(layer.B[name].weight.detach()) @ whole(layer.A[name].weight.detach())


def merge(model: nn.Module, name: str) -> None:
    """Adds an adapter to the base's weights, in float32, and takes all adapters off."""
    with torch.no_grad():
        for layer in layers_of(model).values():
            weight = layer.base.weight
            weight.data = weight.float() + layer.scale * delta(layer, name)
    detach(model)


def _names(target: str, path: str) -> bool:
    return path == target or path.endswith(f".{target}")


def _adapter_of(key: str) -> str | None:
    """The adapter that a parameter's name belongs to: `...q_proj.A.actor.weight`."""
    parts = key.split(".")
    return parts[-2] if len(parts) > 3 and parts[-3] in ("A", "B") and parts[-1] == "weight" else None


# --- as peft and engines know them ---------------------------------------------------------------------------------


def peft_tensors(model: nn.Module, name: str) -> Iterator[tuple[str, Tensor]]:
    """One adapter, whole, under peft's names: `base_model.model.<path>.lora_A.weight`.

    On several ranks all of them iterate together.
    """
    for path, layer in layers_of(model).items():
        for kind, part in (("lora_A", layer.A), ("lora_B", layer.B)):
            yield f"base_model.model.{path}.{kind}.weight", whole(part[name].weight.detach())


def peft_config(model: PreTrainedModel, name: str, head: str | None = None) -> dict[str, Any]:
    """What `adapter_config.json` holds beside the tensors; head: of a scorer, whose weights stand among them."""
    layers = layers_of(model)
    first = next(iter(layers.values()))
    rank = first.A[name].out_features
    alpha = first.scale * rank
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if head is None else "SEQ_CLS",
        "base_model_name_or_path": model.config.name_or_path,
        "revision": getattr(model.config, "_commit_hash", None),
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": _peft_targets(model, list(layers)),
        "bias": "none",
        "lora_dropout": 0.0,
        "use_rslora": False,
        "inference_mode": True,
        **({} if head is None else {"modules_to_save": [head]}),
    }


def _peft_targets(model: nn.Module, paths: Sequence[str]) -> list[str]:
    """Last parts of the paths, or the paths themselves where a layer without an adapter has such a name too."""
    short = sorted({path.rpartition(".")[2] for path in paths})
    plain = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    inside = tuple(f"{path}." for path in paths)
    others = [path for path in plain if not path.startswith(inside)]
    return list(paths) if any(_names(name, path) for name in short for path in others) else short
