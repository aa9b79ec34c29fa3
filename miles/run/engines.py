"""What a run samples with: the engine of its recipe, and the publisher that brings new weights to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from miles.config.schema import Recipe
from miles.engine.inprocess import InProcessEngine
from miles.errors import ConfigError
from miles.learn.adapters import peft_config
from miles.learn.learner import Learner
from miles.protocols import Engine, Publisher
from miles.publish.copies import CopiesPublisher
from miles.publish.files import WeightFiles
from miles.publish.following import FollowingPublisher
from miles.publish.inprocess import InProcessPublisher
from miles.run.crossover import cache_file, kind_of, measured
from miles.run.handover import HandOver
from miles.run.prepare import Inputs
from miles.run.vllm import VllmWays, canary_ids, open_vllm

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rollouts:
    """An engine that serves the learner's version, and its publisher. With servers rank 0 alone has an engine."""

    engine: Engine | None
    publisher: Publisher
    shares_weights: bool = False  # samples with the learner's own, which are put together for it on several ranks
    slow_reason: Callable[[], str | None] = lambda: None  # why the engine is slow on this model, once that is known


@contextmanager
def open_rollouts(
    recipe: Recipe, inputs: Inputs, model: PreTrainedModel, learner: Learner, run_dir: Path, weights: Path | None
) -> Iterator[Rollouts]:
    """The engine of `engine.kind`, started, at the learner's version; all of it ends with the block.

    `weights`: folder that collectors in other processes, which keep a copy, read them from. None: there are none.
    """
    if recipe.engine.kind == "vllm" and learner.ranks.rank > 0:
        learner.canary_ids = canary_ids(inputs)
        follower = FollowingPublisher(verify=recipe.publish.verify)
        follower.publish(learner.policy_update())
        yield Rollouts(None, follower)
        return
    if recipe.engine.kind == "vllm":
        with open_vllm(recipe, inputs, learner, run_dir) as (engine, publisher):
            yield Rollouts(engine, publisher)
        return
    own = InProcessPublisher(learner.version)
    engine = InProcessEngine(
        model, inputs.tokenizer, version=lambda: own.version, end_token_ids=inputs.sampling.stop_token_ids,
        max_batch=recipe.engine.max_batch, deterministic=recipe.rollout.deterministic,
    )  # fmt: skip
    publisher = own if weights is None else _to_copies(learner, weights, own)
    if recipe.engine.kind == "inprocess":
        yield Rollouts(engine, publisher, True, lambda: engine.slow_reason)
        return
    with closing(_handing_over(recipe, inputs, learner, run_dir, engine, publisher)) as both:
        yield Rollouts(both, both, True, lambda: engine.slow_reason)


def _to_copies(learner: Learner, folder: Path, own: InProcessPublisher) -> Publisher:
    """Publishes to a folder, the learner's version at once; on several ranks rank 0 writes what all of them put together.

    Raises ConfigError where the copies would be of another base.
    """
    if (bits := learner.recipe.lora.base_bits) is not None:
        raise ConfigError(
            f"lora.base_bits = {bits}: collectors of their own keep the base as it is, so they would sample from another policy than "
            "the one that is trained: collect in the learner's process (miles train), or leave lora.base_bits out"
        )
    if learner.ranks.rank > 0:
        publisher: Publisher = FollowingPublisher(own)
    else:
        adapter = peft_config(learner.model, "actor") if learner.recipe.lora.rank else None
        publisher = CopiesPublisher(WeightFiles(folder, torch.float32, adapter), learner.version, own)
    publisher.publish(learner.policy_update())
    return publisher


def _handing_over(
    recipe: Recipe, inputs: Inputs, learner: Learner, run_dir: Path, engine: Engine, publisher: Publisher
) -> HandOver:
    limit, source = recipe.engine.crossover, "engine.crossover"
    if limit is None:
        device = learner.device.type
        limit, source = measured(cache_file(), kind_of(recipe, device), device)
    told = "never" if limit is None else f"from {limit} tokens a step on"
    log.warning("rollouts begin in process and go to vLLM %s: %s", told, source)
    samples = recipe.algorithm.groups_per_step * recipe.rollout.group_size
    return HandOver(
        engine, publisher, VllmWays(recipe, inputs, learner, run_dir), samples=samples, crossover=limit,
        start_timeout_s=recipe.engine.start_timeout_s,
    )  # fmt: skip
