"""`miles export`: the newest model of a run as a plain Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from miles.errors import RunDirError
from miles.learn import checkpoint
from miles.learn.export import check_target, export
from miles.learn.learner import Learner
from miles.learn.load import load_model, load_tokenizer
from miles.run.resume import CHECKPOINTS
from miles.run.rundir import stored_recipe


def export_command(run_dir: Path, to: Path, merge: bool) -> int:
    """Export the newest checkpoint of `run_dir`. `merge` changes nothing for full weights, and says so."""
    recipe = stored_recipe(run_dir)
    check_target(to)
    path = checkpoint.newest(run_dir / CHECKPOINTS)
    if path is None:
        raise RunDirError(
            f"{run_dir} has no complete checkpoint yet, so no trained weights to export: train longer, or resume it"
        )
    model = load_model(recipe.model, seed=recipe.run.seed)
    learner = Learner(model, recipe, device="cpu", total_steps=recipe.algorithm.steps or 1)  # no update is made
    tensors, state, _ = checkpoint.read(path)
    learner.load_state(tensors, state["learner"])
    if merge:
        print("--merge: this run trained full weights, there is no adapter to merge")
    facts = {"version": learner.version, "recipe": recipe.model_dump(mode="json")}
    export(model, load_tokenizer(recipe.model), to, facts=facts)
    print(f"model of step {learner.version}: {to}")
    return 0
