"""The engine of a collector that stands alone: it samples in this process, with a copy of the weights that follows the learner."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from miles.config.schema import Recipe
from miles.engine.following import FollowingEngine
from miles.engine.inprocess import InProcessEngine
from miles.errors import CheckpointError, EngineError
from miles.learn.adapters import attach, layers_of
from miles.learn.critic import load_weights
from miles.learn.load import load_model
from miles.learn.optim import matching
from miles.publish.versions import versions
from miles.run.prepare import Inputs

log = logging.getLogger(__name__)

ACTOR = "actor"
PEFT_PREFIX = "base_model.model."


class CopiedWeights:
    """Satisfies `miles.engine.following.Weights`: a model, and the folder that a learner publishes to."""

    def __init__(self, model: PreTrainedModel, folder: Path, adapter: bool) -> None:
        self._model, self._adapter = model, adapter
        self._folder = folder

    def newest(self) -> int | None:
        """None also where the learner has not made the folder: it may be inside of a run's folder, which only the learner makes."""
        return max(versions(self._folder), default=None) if self._folder.is_dir() else None

    def load(self, version: int) -> bool:
        """Raises EngineError for files that are not this model's."""
        name = f"policy-v{version}"
        path = self._folder / (f"{name}/adapter_model.safetensors" if self._adapter else f"{name}.safetensors")
        try:
            tensors = load_file(path)
            if self._adapter:
                _load_adapter(self._model, tensors)
            else:
                load_weights(self._model, tensors)
        except FileNotFoundError:
            return False
        except (OSError, SafetensorError, CheckpointError) as error:
            raise EngineError(f"version {version} cannot be read from {path}: {error}") from error
        return True


def follow(recipe: Recipe, inputs: Inputs, folder: Path, device: torch.device) -> FollowingEngine:
    """An engine that samples with the newest weights of `folder`. Raises ModelError."""
    torch.set_num_threads(recipe.run.threads or 1)
    model = load_model(recipe.model, seed=recipe.run.seed, device=device).to(device, torch.float32).eval()
    _as_the_learner_has_it(model, recipe)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    log.info("samples with a copy of the weights: %.1f MiB, and a read of %s for each version", size / 2**20, folder)
    weights = CopiedWeights(model, folder, recipe.lora.rank is not None)
    engine = InProcessEngine(
        model, inputs.tokenizer, version=lambda: following.version, end_token_ids=inputs.sampling.stop_token_ids,
        max_batch=recipe.engine.max_batch, deterministic=recipe.rollout.deterministic,
    )  # fmt: skip
    following = FollowingEngine(engine, weights, recipe.engine.start_timeout_s)
    return following


def _as_the_learner_has_it(model: PreTrainedModel, recipe: Recipe) -> None:
    """With adapters: on a base in the type that it computes in."""
    model.requires_grad_(False)
    if recipe.lora.rank is None:
        return
    if recipe.learner.param_dtype == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    attach(model, [ACTOR], recipe.lora, recipe.run.seed)
    model.requires_grad_(False)


def _load_adapter(model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for path, layer in layers_of(model).items():
            for kind, part in (("lora_A", layer.A), ("lora_B", layer.B)):
                weight = part[ACTOR].weight
                weight.copy_(matching(tensors, f"{PEFT_PREFIX}{path}.{kind}.weight", weight))
