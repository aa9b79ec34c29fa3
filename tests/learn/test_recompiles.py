from __future__ import annotations

from functools import partial

import pytest
import torch

from miles.learn import learner
from miles.learn.blocks import Blocks
from miles.learn.tiny import tiny_model

PPO = {"algorithm__name": "ppo", "algorithm__beta": 0.1, "algorithm__kl_place": "reward", "learner__compile": True}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler itself looks at it
@pytest.mark.parametrize("keys", [{}, {"lora__rank": 4, "learner__gradient_checkpointing": True}])
def test_after_the_first_steps_no_length_and_no_role_compiles_anything(groups, monkeypatch, keys):
    """Actor, critic and reference, with and without gradient, over steps of other sizes; a compilation would raise."""
    torch._dynamo.reset()
    monkeypatch.setattr(learner, "Blocks", partial(Blocks, backend="aot_eager"))
    one = learner.Learner(tiny_model("llama"), groups.recipe(**PPO, **keys, learner__tokens_per_microbatch=128))

    def step(seed, count):
        made = groups.measured(tiny_model("llama"), groups.draw(count=count, size=4, seed=seed), noise=0.3)
        batches = one.pack(made)
        one.update(batches, one.score(batches))

    for seed in range(3):
        step(seed, 4)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3, 6):
            step(seed, seed)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    torch._dynamo.reset()
