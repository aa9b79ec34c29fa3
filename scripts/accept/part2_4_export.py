"""Exports of 2 ranks, full weights and LoRA with compile: transformers and peft load them, logits equal the learner's to 1e-3."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from common import MILES, check, finish, run
from peft import PeftModel
from ranks import TINY
from transformers import AutoModelForCausalLM

from miles.config.schema import Model
from miles.learn import checkpoint
from miles.learn.export import export
from miles.learn.learner import Learner
from miles.learn.load import load_model, load_tokenizer
from miles.learn.spmd import Ranks
from miles.run.rundir import stored_recipe

TRAIN = [*MILES, "train", str(TINY), "--algorithm.steps", "3", "--parallel.shard", "2", "--learner.compile", "true"]


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(0, model.config.vocab_size, (4, 24), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids, use_cache=False).logits.float()


def learner_of(run_dir: Path) -> torch.nn.Module:
    """The actor of the run's last checkpoint, in the learner's own modules."""
    recipe = stored_recipe(run_dir)
    model = load_model(recipe.model, seed=recipe.run.seed)
    eager = recipe.model_copy(update={"learner": recipe.learner.model_copy(update={"compile": False})})
    learner = Learner(model, eager, ranks=Ranks())
    tensors, state, _ = checkpoint.read(checkpoint.newest(run_dir / "checkpoints"))
    learner.load_state(tensors, state["learner"])
    return learner.model


def compare(what: str, loaded: torch.nn.Module, run_dir: Path, base: torch.nn.Module) -> None:
    expected, found = logits(learner_of(run_dir)), logits(loaded)
    moved = (expected - logits(base)).abs().max().item()
    check(f"{what}: how far training has moved the logits", f"{moved:.3f}", moved > 0.01)
    worst = (expected - found).abs().max().item()
    check(f"{what}: largest difference from the learner's logits", f"{worst:.1e}", worst < 1e-3)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        section = Model(name="tiny-random:llama")
        base = load_model(section, seed=0)
        start = export(base, load_tokenizer(section), folder / "base")
        options = ["--model.name", str(start)]
        full, lora = folder / "full", folder / "lora"
        run([*TRAIN, *options, "--run", str(full)])
        compare("transformers, full weights", AutoModelForCausalLM.from_pretrained(full / "final"), full, base)
        adapter = ["--lora.rank", "4", "--learner.learning_rate", "1e-2"]
        run([*TRAIN, *options, *adapter, "--run", str(lora)])
        with_adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(start), lora / "final")
        compare("peft, adapter", with_adapter, lora, base)
        run([*MILES, "export", str(lora), "--to", str(folder / "merged"), "--merge"])
        merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
        compare("transformers, merged adapter", merged, lora, base)
    finish()


if __name__ == "__main__":
    main()
