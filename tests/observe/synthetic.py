"""Run directories as a training run would leave them, made without training: metrics, samples and a resolved recipe."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.types import FinishedGroup, Group, Sample, Segment

START = 1_700_000_000.0
HOSTILE = "<script>document.title='owned'</script></td>\x1b[2J\u202e & \"quoted\" 'text'"


@dataclass(frozen=True)
class Shape:
    """What kind of run it is. `written` steps of `total` are on disk."""

    total: int = 16
    written: int = 16
    eval_every: int | None = None
    stale: bool = False
    critic: bool = False
    drops: bool = False
    hostile: bool = False
    finished: bool = True
    seed: int = 0


def make_run(run_dir: Path, shape: Shape) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.toml").write_text(recipe_text(shape))
    write_jsonl(run_dir / "metrics.jsonl", metrics_rows(shape))
    write_jsonl(run_dir / "samples.jsonl", sample_rows(shape))
    if shape.finished:
        (run_dir / "final").mkdir()
        (run_dir / "final" / "model.safetensors").write_bytes(b"\0" * 64)
    return run_dir


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def metrics_rows(shape: Shape) -> list[dict[str, Any]]:
    rng = random.Random(shape.seed)
    rows = [eval_row(shape, 0, rng)]
    for step in range(1, shape.written + 1):
        rows.append(step_row(shape, step, rng))
        last = step == shape.written and shape.finished
        if last or (shape.eval_every and step % shape.eval_every == 0):
            rows.append(eval_row(shape, step, rng))
    return rows


def progress(shape: Shape, step: float) -> float:
    """0 to 1, steepest at a third of the run."""
    return 1 / (1 + math.exp(-12 * (step / shape.total - 0.33)))


def eval_row(shape: Shape, version: int, rng: random.Random) -> dict[str, Any]:
    reward = 0.02 + 0.96 * progress(shape, version) + (rng.random() - 0.5) * 0.02
    return {
        "event": "eval",
        "version": version,
        "eval/reward/mean": reward,
        "eval/reward/greedy": 0.52 + 0.48 * progress(shape, version),
        "eval/samples": 160,
        "eval/standard_error": math.sqrt(max(reward * (1 - reward), 0.001) / 160),
        "time": START + version * 6.1,
        "time/eval_s": 3.2 + rng.random(),
    }


def step_row(shape: Shape, step: int, rng: random.Random) -> dict[str, Any]:
    done = progress(shape, step)
    reward = min(max(0.03 + 0.94 * done + rng.gauss(0, 0.05), 0.0), 1.0)
    length = 2.1 + 5.4 * (1 - done) + rng.random() * 0.4
    collect, score, update = 2.4 + rng.random(), 0.05 + 0.02 * rng.random(), 2.2 + 0.7 * rng.random()
    solved = round(7 * done)
    row = {
        "step": step,
        "version": step,
        "reward/mean": reward,
        "reward/std": math.sqrt(max(reward * (1 - reward), 0.0)),
        "reward/exact_number/mean": reward,
        "reward/trained_mean": reward,
        "completion/length_mean": length,
        "completion/length_max": 8,
        "completion/truncated_fraction": 0.72 * (1 - done) + 0.02 * rng.random(),
        "completion/repeat_fraction": 0.01 * rng.random(),
        "completion/length_correct_mean": 2.0 + rng.random() * 0.3,
        "completion/length_wrong_mean": length + 0.5,
        "group/unique_fraction": 0.2 + 0.75 * (1 - done),
        "groups/generated": 8,
        "groups/trained": 8,
        "groups/solved_all": solved,
        "groups/solved_none": min(8 - solved, round(3 * (1 - done))),
        "groups/error": 0,
        "tokens/generated": round(length * 64),
        "tokens/trained": round(length * 64),
        "tokens/scored": round(length * 64 * (1 - 0.6 * done)),
        "loss/policy": rng.gauss(0, 0.03),
        "loss/total": rng.gauss(0, 0.03),
        "kl/behavior": abs(rng.gauss(0, 2e-6)),
        "kl/ref": 0.9 * done + 0.02 * rng.random(),
        "entropy": 0.25 + 1.6 * (1 - done) + 0.05 * rng.random(),
        "entropy/p10": 0.02 + 0.3 * (1 - done),
        "ratio/mean": 1 + rng.gauss(0, 0.003),
        "ratio/max": 1.2 + 0.6 * rng.random(),
        "ratio/clip_fraction": 0.02 * rng.random(),
        "advantage/mean": rng.gauss(0, 0.01),
        "advantage/std": 0.4 * (1 - done) + 0.1,
        "grad_norm": 0.4 + 2.2 * (1 - done) * (0.7 + 0.6 * rng.random()),
        "lr": 1e-5 * min(1.0, step / 4),
        "update/skipped": 0,
        "time": START + step * 6.1,
        "time/collect_s": collect,
        "time/score_s": score,
        "time/update_s": update,
        "time/publish_s": 0.01,
        "time/step_s": collect + score + update + 0.2 * rng.random(),
        "memory/peak_bytes": int(3.0e9 + 2e8 * done),
    }
    row["throughput/samples_per_s"] = 64 / row["time/step_s"]
    row["throughput/tokens_per_s"] = row["tokens/generated"] / row["time/step_s"]
    row.update(_stale(shape, rng) | _critic(shape, done, rng) | _drops(shape, rng))
    return row


def _stale(shape: Shape, rng: random.Random) -> dict[str, float]:
    mean = 0.6 + 0.8 * rng.random() if shape.stale else 0.0
    return {"staleness/mean": mean, "staleness/max": math.ceil(mean)}


def _critic(shape: Shape, done: float, rng: random.Random) -> dict[str, float]:
    if not shape.critic:
        return {}
    return {
        "loss/value": 0.12 * (1 - done) + 0.01 * rng.random(),
        "value/mean": 0.9 * done,
        "value/explained_variance": 0.8 * done + 0.05 * rng.random(),
        "value/clip_fraction": 0.05 * rng.random(),
        "grad_norm/critic": 1.5 * (1 - done) + 0.2,
        "lr/critic": 5e-5,
    }


def _drops(shape: Shape, rng: random.Random) -> dict[str, float]:
    if not shape.drops:
        return {}
    equal, error = rng.randrange(5), int(rng.random() < 0.1)
    counts = {"groups/dropped/equal_rewards": equal, "groups/dropped/error": error}
    return {
        "groups/generated": 8 + equal + error,
        "groups/error": error,
        **{key: count for key, count in counts.items() if count},
    }


def sample_rows(shape: Shape) -> list[dict[str, Any]]:
    rng = random.Random(shape.seed + 1)
    rows = [_sample_row(shape, rng, {"event": "eval", "version": 0}, row) for row in (90, 91)]
    for step in range(1, shape.written + 1):
        if step == 1 or step % max(shape.total // 8, 1) == 0:
            rows.append(_sample_row(shape, rng, {"step": step}, 7))
            rows.append(_sample_row(shape, rng, {"step": step}, 11))
            if shape.drops:
                rows.append(_sample_row(shape, rng, {"step": step}, 30 + step, reason="equal_rewards"))
    if shape.finished:
        rows += [_sample_row(shape, rng, {"event": "eval", "version": shape.written}, row) for row in (90, 91)]
    return rows


def _sample_row(
    shape: Shape, rng: random.Random, place: dict[str, Any], row: int, reason: str | None = None
) -> dict[str, Any]:
    a, b = row % 10, row * 3 % 10
    done = progress(shape, place.get("step", place.get("version", 0)))
    samples = [_answer(rng, a + b, done) for _ in range(8)]
    if shape.hostile:
        samples[0] = {**samples[0], "text": HOSTILE}
    system = "<|im_start|>system\nYou answer with a single number.<|im_end|>\n"
    prompt = f"{system}<|im_start|>user\n{a} + {b} =<|im_end|>\n<|im_start|>assistant\n"
    return {
        **place,
        "ordinal": place.get("step", 0) * 8,
        "row": row,
        "reason": reason,
        "prompt": prompt,
        "samples": samples,
    }


def _answer(rng: random.Random, right: int, done: float) -> dict[str, Any]:
    if rng.random() < done:
        return {"text": f"{right}", "reward": 1.0, "parts": {"exact_number": 1.0}, "tokens": 2, "stop_reason": "stop"}
    wrong = rng.choice(
        [f"The sum of the two is {right + 1}", "To add them we first", "Sure! Let's\nsee:\n1.", "", "27"]
    )
    return {"text": wrong, "reward": 0.0, "parts": {"exact_number": 0.0}, "tokens": 8, "stop_reason": "length"}


def recipe_text(shape: Shape) -> str:
    return f"""[model]
name = "smollm2-135m-instruct-q4"

[data]
source = "task:addition"
system_prompt = "You answer with a single number."

[rollout]
group_size = 8
temperature = 1.0
max_new_tokens = 8

[algorithm]
name = "{"ppo" if shape.critic else "grpo"}"
steps = {shape.total}
groups_per_step = 8
scale_std = false
reduction = "token_mean"

[learner]
learning_rate = 1e-5
betas = [0.9, 0.99]

[run]
seed = {shape.seed}
"""


def finished_group(
    ordinal: int,
    rewards: list[float | None],
    lengths: list[int] | None = None,
    reason: str | None = None,
    version_min: int = 0,
    unique: float = 1.0,
    repeat: float = 0.0,
    truncated: list[bool] | None = None,
    parts: dict[str, tuple[float | None, ...]] | None = None,
) -> FinishedGroup:
    sizes = lengths if lengths is not None else [4] * len(rewards)
    return FinishedGroup(
        ordinal=ordinal,
        reason=reason,
        rewards=tuple(rewards),
        reward_parts=parts or {},
        lengths=tuple(sizes),
        truncated=tuple(truncated or [False] * len(sizes)),
        unique_fraction=unique,
        repeat_fraction=repeat,
        version_min=version_min,
    )


def group(ordinal: int, row: int, texts: list[str], reward: float | None = 1.0, prompt: str = "2 + 3 =") -> Group:
    segment = Segment((1, 2, 3), (False, True, True), (0.0, -0.5, -0.25), (-1, 0, 0))
    samples = tuple(Sample((segment,), "stop", text, reward, {"exact": reward}) for text in texts)
    return Group(ordinal, row, samples, prompt)
