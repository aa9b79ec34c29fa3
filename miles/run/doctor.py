"""`miles doctor`: what this machine is, how fast its disk makes things durable, and whether engine and learner agree."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from miles.config.schema import Recipe
from miles.errors import BadInput
from miles.learn.learner import Learner
from miles.learn.load import load_model
from miles.run.agreement import compare_engine, print_agreement, sampled_tokens
from miles.run.local import device_of, total_steps
from miles.run.prepare import prepare
from miles.run.recipes import inspect
from miles.types import Group

PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "peft", "pydantic", "numpy")
TINY = {
    "model.name": "tiny-random:llama",
    "data.source": "task:echo_digit",
    "algorithm.steps": 1,
    "rollout.max_new_tokens": 8,
}
SAME_LOSS = 1e-4  # relative


def doctor_command(recipes: Sequence[Path], overrides: Mapping[str, Any]) -> int:
    """Print what was found; 1 when something is wrong. Without a recipe a tiny random model is looked at."""
    resolved = inspect(recipes, overrides if recipes else {**TINY, **overrides}, os.environ)
    recipe = resolved.recipe
    if resolved.row.recorded:
        raise BadInput(
            f"miles doctor compares the engine's answers with the learner, and {recipe.algorithm.name} samples none: give a "
            "recipe of another algorithm, or none."
        )
    print_machine(recipe)
    torch.set_num_threads(recipe.run.threads or 1)
    inputs = prepare(recipe, resolved.row)
    model = load_model(recipe.model, seed=recipe.run.seed, device=device_of(recipe))
    learner = Learner(model, recipe, device=device_of(recipe), total_steps=total_steps(recipe, len(inputs.train)))
    found, groups = compare_engine(recipe, inputs, model, learner)
    print_agreement(found, sampled_tokens(groups), inputs.tokenizer)
    healthy = print_invariance(recipe, model, groups) and found.agrees
    print("everything agrees" if healthy else "something is wrong: see above")
    return 0 if healthy else 1


def print_machine(recipe: Recipe) -> None:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    print("packages  " + ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES))
    print(
        f"devices   {', '.join(gpus) or 'no GPU'}; this recipe uses {device_of(recipe).type}, {recipe.run.threads} threads"
    )
    with tempfile.TemporaryDirectory(dir=".") as folder:
        sync = 1000 * statistics.median(_fsync_seconds(Path(folder) / "probe") for _ in range(20))
    free = shutil.disk_usage(".").free / 2**30
    print(f"disk      {free:.0f} GiB free here; one durable write of 64 KiB takes {sync:.1f} ms")
    if recipe.publish.kind in ("nccl", "ipc"):
        print(f"publish   {recipe.publish.kind} has not been run by the makers of Miles: leave publish.verify on")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        print(f"ports     loopback works (tried {probe.getsockname()[1]}); this recipe opens none")


def print_invariance(recipe: Recipe, model: Any, groups: Sequence[Group]) -> bool:
    """The loss of the same groups, packed in one piece and in many."""
    losses = {}
    for tokens in (1 << 20, 64, 1):
        section = recipe.learner.model_copy(update={"tokens_per_microbatch": tokens, "learning_rate": 0.0})
        changed = recipe.model_copy(update={"learner": section})
        learner = Learner(model, changed, device=device_of(recipe), total_steps=1)
        step = learner.pack(groups)
        losses[tokens] = learner.update(step, learner.score(step))["grad_norm"]
    spread = max(losses.values()) - min(losses.values())
    same = spread <= SAME_LOSS * max(1e-6, max(losses.values()))
    shown = ", ".join(f"{norm:.6g}" for norm in losses.values())
    print(
        f"gradient norm in one micro-batch, in small ones, one sample each: {shown}"
        + ("" if same else "  <- must be equal")
    )
    return same


def _fsync_seconds(path: Path) -> float:
    started = time.perf_counter()
    with path.open("wb") as file:
        file.write(bytes(64 << 10))
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started
