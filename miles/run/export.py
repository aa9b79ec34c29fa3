"""`miles export`: the newest model of a run as a plain Hugging Face folder, or its adapter as peft's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from miles.config.schema import Recipe
from miles.env.answers import Answers
from miles.env.template import Renderer
from miles.errors import RunDirError
from miles.learn import checkpoint
from miles.learn.adapters import adapter_parameters, attach, load_parameters, merge
from miles.learn.critic import load_weights
from miles.learn.export import check_target, save_trained
from miles.learn.load import end_token_ids, load_generation_config, load_model, load_tokenizer
from miles.learn.scorer import HEAD, load_scorer, scorer_head, set_padding
from miles.run.resume import CHECKPOINTS
from miles.run.rundir import stored_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


ADAPTER_HEAD = "value_head.weight"
"""Of a scorer that was trained by an adapter, in its checkpoint."""


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
    tokenizer = tokenizer_of(recipe, model)
    if merge_adapter and recipe.lora.rank is None:
        print("--merge: this run trained full weights, there is no adapter to merge")
    elif merge_adapter:
        merge(model, "actor")
    facts = {"version": version, "recipe": recipe.model_dump(mode="json")}
    whole = recipe.lora.rank is None or merge_adapter or not model.can_generate()
    save_trained(model, tokenizer, to, facts)
    kind = "model" if whole else "adapter"
    print(f"{kind} of step {version}: {to}")
    return 0


def tokenizer_of(recipe: Recipe, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer that goes with the trained model; of a scorer both get a padding token that no sequence ends with."""
    tokenizer = load_tokenizer(recipe.model)
    if not model.can_generate():
        ends = end_token_ids(model.config, load_generation_config(recipe.model), tokenizer)
        answers = Answers(Renderer(tokenizer, recipe.data), recipe.data, "pairs", ends, scorer=True)
        set_padding(model, tokenizer, answers.last_tokens())
    return tokenizer


def _trained(recipe: Recipe, path: Path) -> tuple[PreTrainedModel, int]:
    """The actor of a checkpoint, in float32, and its version; a scorer is known by its head."""
    tensors, state, _ = checkpoint.read(path)
    scorer = f"{HEAD}.weight" in tensors.get("model", {}) or ADAPTER_HEAD in tensors.get("adapter", {})
    model = (load_scorer if scorer else load_model)(recipe.model, seed=recipe.run.seed)
    if recipe.lora.rank is None:
        load_weights(model, tensors.get("model", {}))
    else:
        attach(model, ["actor"], recipe.lora, recipe.run.seed)
        head = {ADAPTER_HEAD: scorer_head(model).weight} if scorer else {}
        load_parameters({**adapter_parameters(model, "actor"), **head}, tensors.get("adapter", {}))
    return model, int(state["learner"]["version"])
