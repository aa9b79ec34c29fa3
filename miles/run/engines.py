"""What a run samples with: the engine of its recipe, and the publisher that brings new weights to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from miles.config.schema import Recipe
from miles.engine.inprocess import InProcessEngine
from miles.learn.learner import Learner
from miles.protocols import Engine, Publisher
from miles.publish.inprocess import InProcessPublisher
from miles.run.prepare import Inputs
from miles.run.vllm import open_vllm


@dataclass(frozen=True)
class Rollouts:
    """An engine that serves the learner's version, and its publisher."""

    engine: Engine
    publisher: Publisher
    slow_reason: Callable[[], str | None] = lambda: None  # why the engine is slow on this model, once that is known


@contextmanager
def open_rollouts(
    recipe: Recipe, inputs: Inputs, model: PreTrainedModel, learner: Learner, run_dir: Path
) -> Iterator[Rollouts]:
    """The engine of `engine.kind`, started, at the learner's version; all of it ends with the block."""
    if recipe.engine.kind == "vllm":
        with open_vllm(recipe, inputs, learner, run_dir) as (engine, publisher):
            yield Rollouts(engine, publisher)
        return
    publisher = InProcessPublisher(learner.version)
    engine = InProcessEngine(
        model, inputs.tokenizer, version=lambda: publisher.version, end_token_ids=inputs.sampling.stop_token_ids,
        max_batch=recipe.engine.max_batch, deterministic=recipe.rollout.deterministic,
    )  # fmt: skip
    yield Rollouts(engine, publisher, lambda: engine.slow_reason)
