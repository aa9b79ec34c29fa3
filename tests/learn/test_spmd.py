"""Several ranks against one: the same losses, norms, weights and decisions, however the step was split."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from miles.config.schema import Parallel
from miles.errors import ConfigError, TrainingAborted
from miles.learn.learner import Learner
from miles.learn.parallel import whole
from miles.learn.spmd import Ranks
from miles.learn.tiny import tiny_model

ROWS = {
    "grpo": {},
    "dapo": {"algorithm__entropy_coef": 0.01},
    "gspo": {"learner__epochs": 2, "learner__minibatches": 2},
    "dr_grpo": {"algorithm__beta": 0.1, "algorithm__kl_place": "loss"},
    "ppo": {"algorithm__beta": 0.1, "algorithm__kl_place": "reward", "learner__minibatches": 2},
}
LORA = {"lora__rank": 4, "lora__targets": ["q_proj", "v_proj", "down_proj"]}
# A large epsilon keeps AdamW from turning a difference of 1e-9 in a tiny gradient into a whole step.
KEYS = {"learner__learning_rate": 1e-2, "learner__eps": 1e-3, "algorithm__groups_per_step": 4}


def groups_module():
    spec = importlib.util.spec_from_file_location("miles_learn_groups", Path(__file__).with_name("groups.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["miles_learn_groups"] = module
    spec.loader.exec_module(module)
    return module


def recorded(groups, size=4):
    return groups.measured(tiny_model("llama"), groups.draw(count=4, size=size), noise=0.4)


def steps(groups, made, keys, count=2, family="llama", ranks=None):
    """Metrics of some steps, and the trained weights after them, whole."""
    one = Learner(tiny_model(family), groups.recipe(**{**KEYS, **keys}), ranks=ranks)
    rows = []
    for _ in range(count):
        step = one.pack(made)
        rows.append(one.update(step, one.score(step)))
    trained = [p for role in one.roles.names if role in ("actor", "critic") for p in one.roles.trained(role).values()]
    return [comparable(row) for row in rows], [whole(p.detach()).flatten().tolist() for p in trained]


def comparable(row):
    return {key: value for key, value in row.items() if key != "memory/peak_bytes"}


def close(found, expected, where):
    for a, b in zip(found[0], expected[0], strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5), where
        for key in ("grad_norm", "loss/total", "grad_norm/critic", "loss/value"):
            assert a.get(key, 0.0) == pytest.approx(b.get(key, 0.0), rel=1e-5, abs=1e-6), (where, key)
    for a, b in zip(found[1], expected[1], strict=True):
        assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < 1e-5, where


def cases(mesh: dict[str, int]):
    for name, keys in ROWS.items():
        for lora in ({}, LORA):
            if mesh.get("parallel__replicate") and name != "ppo":
                continue
            yield name, bool(lora), {"algorithm__name": name, **keys, **lora, **mesh}


def job_steps(mesh: dict[str, int], tokens: int) -> Any:
    groups = groups_module()
    made = recorded(groups)
    return [steps(groups, made, {**keys, "learner__tokens_per_microbatch": tokens}) for _, _, keys in cases(mesh)]


def job_mesh(parallel: dict[str, int]) -> str:
    try:
        Ranks.join(Parallel(**parallel), torch.device("cpu"))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "mesh", "tokens"),
    [
        (2, {"parallel__shard": 2, "parallel__offload_reference": True}, 64),
        (2, {"parallel__replicate": 2}, 4096),
        (4, {"parallel__shard": 2, "parallel__replicate": 2}, 256),
    ],
)
def test_ranks_make_the_steps_of_one_process(gang, groups, ranks, mesh, tokens):
    made = recorded(groups)
    results = gang.run(ranks, job_steps, mesh, tokens)
    assert all(result == results[0] for result in results[1:]), "every rank has the same numbers, to the bit"
    for found, (name, lora, keys) in zip(results[0], cases(mesh), strict=True):
        alone = {key: value for key, value in keys.items() if not key.startswith("parallel")}
        close(found, steps(groups, made, alone), (name, lora))


@pytest.mark.slow
def test_a_mesh_that_does_not_fit_the_ranks_is_refused(gang):
    for message in gang.run(2, job_mesh, {"shard": 4, "replicate": 2}):
        assert "parallel.shard = 4 times parallel.replicate = 2 is 8 ranks, but 2 were started" in message
    assert gang.run(2, job_mesh, {"shard": 1, "replicate": 2}) == ["", ""]
    assert "is 2 ranks, but 1 was started" in job_mesh({"shard": 2})


def job_few() -> Any:
    """One group of one sample each for four ranks, blocks recomputed, an embedding apart from the head."""
    groups = groups_module()
    made = recorded(groups, size=1)[:1]
    keys = {"algorithm__name": "reinforce", "learner__gradient_checkpointing": True, "parallel__shard": 4}
    one = steps(groups, made, keys)
    model = tiny_model("llama", tied=False)
    learner = Learner(model, groups.recipe(**KEYS, parallel__shard=4, algorithm__name="ppo"))
    held = sum(p.to_local().numel() for p in learner.roles.trained("critic").values())
    return one, isinstance(model.lm_head.weight, DTensor), held, dist.get_rank()


@pytest.mark.slow
def test_a_rank_without_samples_goes_along(gang, groups):
    results = gang.run(4, job_few)
    made = recorded(groups, size=1)[:1]
    expected = steps(groups, made, {"algorithm__name": "reinforce"})
    for found, sharded, held, _ in results:
        close(found, expected, "reinforce")
        assert sharded
        whole_critic = sum(p.numel() for p in tiny_model("llama", tied=False).base_model.parameters()) + 65
        assert held <= 0.3 * whole_critic


def job_skip() -> Any:
    groups = groups_module()
    made = recorded(groups)
    one = Learner(tiny_model("llama"), groups.recipe(**KEYS, parallel__shard=2, run__max_skipped_updates=2))
    before = whole(one.model.model.norm.weight.detach()).tolist()
    step = one.pack(made)
    signal = one.score(step)
    signal = replace(
        signal, advantages=torch.where(torch.arange(len(signal.advantages)) == 0, math.nan, signal.advantages)
    )
    first = one.update(step, signal)
    try:
        one.update(step, signal)
        aborted = ""
    except TrainingAborted as error:
        aborted = str(error)
    return first["update/skipped"], aborted, whole(one.model.model.norm.weight.detach()).tolist() == before


@pytest.mark.slow
def test_a_number_that_is_not_finite_on_one_rank_is_skipped_on_all(gang):
    """The broken token lies with one rank alone."""
    for skipped, aborted, unchanged in gang.run(2, job_skip):
        assert skipped == 1
        assert "not finite in 2 updates in a row" in aborted
        assert unchanged
