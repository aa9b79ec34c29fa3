"""`miles export`: the newest model of a run as a plain Hugging Face folder, or its adapter as peft's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from miles.config.schema import Recipe
from miles.errors import RunDirError
from miles.learn import checkpoint
from miles.learn.adapters import adapter_parameters, attach, load_parameters, merge
from miles.learn.critic import load_weights
from miles.learn.export import check_target, save_trained
from miles.learn.load import load_model, load_tokenizer
from miles.run.resume import CHECKPOINTS
from miles.run.rundir import stored_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def export_command(run_dir: Path, to: Path, merge_adapter: bool) -> int:
    """Export the newest checkpoint of `run_dir`. `merge_adapter` changes nothing for full weights, and says so."""
    recipe = stored_recipe(run_dir)
    check_target(to)
    path = checkpoint.newest(run_dir / CHECKPOINTS)
    if path is None:
        raise RunDirError(
            f"{run_dir} has no complete checkpoint yet, so no trained weights to export: train longer, or resume it"
        )
    model, version = _trained(recipe, path)
    if merge_adapter and recipe.lora.rank is None:
        print("--merge: this run trained full weights, there is no adapter to merge")
    elif merge_adapter:
        merge(model, "actor")
    facts = {"version": version, "recipe": recipe.model_dump(mode="json")}
    save_trained(model, load_tokenizer(recipe.model), to, facts)
    kind = "model" if recipe.lora.rank is None or merge_adapter else "adapter"
    print(f"{kind} of step {version}: {to}")
    return 0


def _trained(recipe: Recipe, path: Path) -> tuple[PreTrainedModel, int]:
    """The actor of a checkpoint, in float32, and its version."""
    model = load_model(recipe.model, seed=recipe.run.seed)
    tensors, state, _ = checkpoint.read(path)
    if recipe.lora.rank is None:
        load_weights(model, tensors.get("model", {}))
    else:
        attach(model, ["actor"], recipe.lora, recipe.run.seed)
        load_parameters(adapter_parameters(model, "actor"), tensors.get("adapter", {}))
    return model, int(state["learner"]["version"])
