"""compile, FSDP2, LoRA and recomputation together on two ranks, against one eager process."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from miles.learn import learner
from miles.learn.blocks import Blocks
from miles.learn.tiny import tiny_model

RANKED = {
    "algorithm__beta": 0.1, "learner__compile": True, "lora__rank": 4, "learner__gradient_checkpointing": True,
    "learner__eps": 1e-3, "learner__learning_rate": 1e-2, "learner__tokens_per_microbatch": 128,
}  # fmt: skip
WARM = (8, 1)  # groups of the first steps: a forward of one row on each rank, and one of several


def groups_module():
    spec = importlib.util.spec_from_file_location("miles_learn_groups", Path(__file__).with_name("groups.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["miles_learn_groups"] = module
    spec.loader.exec_module(module)
    return module


def rows_of(keys: dict[str, Any]) -> Any:
    """Rows of steps of other sizes, and the graphs that were compiled in the first of them and in the rest."""
    groups = groups_module()
    one = learner.Learner(tiny_model("llama"), groups.recipe(**keys))
    counted, rows = torch._dynamo.utils.counters["stats"], []
    start = counted["unique_graphs"]
    for seed, count in enumerate([*WARM, 7, 2]):
        with torch._dynamo.config.patch(error_on_recompile=seed >= len(WARM)):
            made = groups.measured(tiny_model("llama"), groups.draw(count=count, size=4, seed=seed))
            step = one.pack(made)
            rows.append(one.update(step, one.score(step)))
        if seed < len(WARM):
            warm = counted["unique_graphs"]
    kept = [{key: value for key, value in row.items() if key != "memory/peak_bytes"} for row in rows]
    return kept, warm - start, counted["unique_graphs"] - warm


def job_compiled(keys: dict[str, Any]) -> Any:
    learner.Blocks = partial(Blocks, backend="eager")
    return rows_of(keys)


@pytest.mark.slow
def test_compiled_and_recomputed_adapters_on_two_ranks_are_one_eager_process(gang):
    """compile, FSDP2, LoRA and recomputation together: the losses and norms of one plain process, and no late compilation."""
    expected, graphs, _ = rows_of({**RANKED, "learner__compile": False, "learner__gradient_checkpointing": False})
    assert graphs == 0
    for rows, warm, late in gang.run(2, job_compiled, {**RANKED, "parallel__shard": 2}, limit_s=400):
        assert warm > 0
        assert late == 0
        for a, b in zip(rows, expected, strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
