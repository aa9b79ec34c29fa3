"""The same groups on 1, 2 and 4 ranks, in micro-batches of 64, 256 and all tokens: losses and gradient norms to 1e-5."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, check, finish, run

ROWS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {},
    "gspo": {"learner__epochs": 2, "learner__minibatches": 2},
    "dr_grpo": {"algorithm__beta": 0.05, "algorithm__kl_place": "loss"},
    "ppo": {"algorithm__beta": 0.05, "algorithm__kl_place": "reward", "learner__minibatches": 2},
}
WEIGHTS = {"full": {"learner__learning_rate": 1e-5}, "LoRA": {"learner__learning_rate": 2e-4, "lora__rank": 8}}
TOKENS = {"64 tokens": 64, "256 tokens": 256, "all tokens": 1 << 20}
NUMBERS = ("loss/total", "loss/value", "grad_norm", "grad_norm/critic")
STEPS, TOLERANCE = 5, 1e-5


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = {ranks: measured(ranks, Path(folder) / str(ranks)) for ranks in (1, 2, 4)}
    for row in ROWS:
        for weights in WEIGHTS:
            expected = found[1][f"{row} {weights} all tokens"]
            worst, where = max(
                (difference(rows[f"{row} {weights} {tokens}"], expected), f"{ranks} ranks, {tokens}")
                for ranks, rows in found.items()
                for tokens in TOKENS
            )
            what = f"{row}, {weights}: largest relative difference in {STEPS} steps"
            check(what, f"{worst:.1e} ({where})", worst <= TOLERANCE)
    finish()


def measured(ranks: int, out: Path) -> dict[str, list[dict[str, float]]]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run([*launch, __file__, str(out)], env={"OMP_NUM_THREADS": "1"})
    return json.loads(out.read_text())


def difference(found: list[dict[str, float]], expected: list[dict[str, float]]) -> float:
    """Of each number relative to its largest in the run: a loss may pass through zero."""
    assert len(found) == len(expected) == STEPS
    return max(
        abs(a[key] - b[key]) / max(abs(step[key]) for step in expected)
        for key in NUMBERS
        if key in expected[0]
        for a, b in zip(found, expected, strict=True)
    )


def rank(out: Path) -> None:
    """One of the ranks."""
    import torch.distributed as dist

    sys.path.insert(0, str(ROOT / "tests" / "learn"))
    import groups

    from miles.learn.learner import Learner
    from miles.learn.tiny import tiny_model

    dist.init_process_group("gloo")
    made = groups.measured(tiny_model("llama"), groups.draw(count=6, size=4), noise=0.3)
    found = {}
    for row, keys in ROWS.items():
        for weights, more in WEIGHTS.items():
            for tokens, limit in TOKENS.items():
                size = {"parallel__shard": dist.get_world_size(), "learner__tokens_per_microbatch": limit}
                recipe = groups.recipe(algorithm__name=row, algorithm__groups_per_step=6, **keys, **more, **size)
                learner = Learner(tiny_model("llama"), recipe)
                rows = []
                for _ in range(STEPS):
                    step = learner.pack(made)
                    rows.append(learner.update(step, learner.score(step)))
                found[f"{row} {weights} {tokens}"] = rows
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank(Path(sys.argv[1]))
    else:
        main()
