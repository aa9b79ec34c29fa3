"""`miles eval`: the held-out score of any model, by the episodes and rewards that training uses."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from miles.config.schema import Recipe
from miles.engine.inprocess import InProcessEngine
from miles.errors import DataError
from miles.learn.learner import Learner
from miles.learn.spmd import Ranks
from miles.rollout.episode import Episodes
from miles.rollout.evaluate import evaluate
from miles.rollout.recorded import Recorded
from miles.run.local import device_of, held_out_metrics, load_trained
from miles.run.prepare import Inputs, prepare
from miles.run.recipes import inspect


def eval_command(recipes: Sequence[Path], overrides: Mapping[str, Any], model: str) -> int:
    """Print the eval metrics of `model` on the recipe's held-out rows."""
    # One model is scored, whatever base it has, so a reward model scores with weights of its own.
    alone = {"reward.model_place": "collecting", "lora.path": None, "learner.critic_model": None}
    resolved = inspect(recipes, {**overrides, **alone, "model.name": model}, os.environ)
    recipe, inputs = resolved.recipe, prepare(resolved.recipe, resolved.row)
    if not len(inputs.held_out):
        why = "".join(f" ({note})" for note in inputs.notes)
        raise DataError(f"the recipe has no held-out rows{why}: set eval.rows above 0, or name some with eval.source")
    torch.set_num_threads(recipe.run.threads or 1)
    loaded = load_trained(recipe, resolved.row, device_of(recipe))
    if inputs.answers is not None:
        learner = Learner(loaded, recipe, device=device_of(recipe), ranks=Ranks())
        metrics = held_out_metrics(learner, inputs.held_out, Recorded(inputs.answers))
    else:
        metrics = _sampled(recipe, inputs, loaded)
    print(f"{model} on {len(inputs.held_out)} held-out rows of {inputs.held_out.source}")
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print(f"  {name:<{width}}  {value:.4g}")
    return 0


def _sampled(recipe: Recipe, inputs: Inputs, model: PreTrainedModel) -> Mapping[str, float]:
    if inputs.reward_model is not None:
        inputs.reward_model.load(device_of(recipe))
    engine = InProcessEngine(
        model, inputs.tokenizer, version=lambda: 0, end_token_ids=inputs.sampling.stop_token_ids,
        max_batch=recipe.engine.max_batch, deterministic=recipe.rollout.deterministic,
    )  # fmt: skip
    episodes = Episodes(inputs.environment, engine, inputs.rewards, inputs.sampling, inputs.renderer.text)
    return asyncio.run(evaluate(inputs.held_out, episodes, recipe=recipe, full_reward=inputs.rewards.full))
