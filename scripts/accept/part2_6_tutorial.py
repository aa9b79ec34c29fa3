"""The tutorial in under 20 minutes: SFT lowers the held-out loss, pairs right > 0.8 from about 0.5, PPO raises the score."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import MILES, ROOT, check, evals, finish, metrics, run
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

RECIPES = ROOT / "recipes" / "tutorial"
PARTS = ("1_sft", "2_reward_model", "3_ppo")
MINUTES = 20


def train(folder: Path) -> float:
    """Minutes of the three runs, each by its recipe as it stands."""
    started = time.perf_counter()
    for part in PARTS:
        run([*MILES, "train", str(RECIPES / f"{part}.toml"), "--run", f"runs/tutorial/{part}"], cwd=folder)
    return (time.perf_counter() - started) / 60


def ends(folder: Path, part: str, key: str) -> tuple[float, float]:
    values = [row[key] for row in evals(metrics(folder / "runs" / "tutorial" / part)) if key in row]
    return values[0], values[-1]


def own_accuracy(folder: Path) -> float:
    """Held-out pairs that plain transformers orders rightly with the exported reward model."""
    from miles.env.courtesy import courtesy_rows

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = courtesy_rows(0)[1]
    right = 0
    for row in rows:
        chats = [
            [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
            for side in ("chosen", "rejected")
        ]
        inputs = tokenizer.apply_chat_template(chats, padding=True, return_tensors="pt", return_dict=True)
        with torch.inference_mode():
            chosen, rejected = model(**inputs).logits[:, 0].tolist()
        right += chosen > rejected
    return right / len(rows)


def courteous_answers(folder: Path) -> float:
    """Share of held-out prompts that the model answers courteously, sampled by plain transformers."""
    from miles.env.courtesy import courteous, courtesy_rows

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    rows = courtesy_rows(0)[1]
    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(0)
    with torch.inference_mode():
        ids = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=24)
    texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    scores = courteous([row["prompt"] for row in rows], texts, [row["name"] for row in rows])
    return sum(score or 0.0 for score in scores) / len(scores)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    try:
        minutes = train(folder)
        check(f"minutes of the three parts (< {MINUTES})", round(minutes, 1), minutes < MINUTES)
        before, after = ends(folder, "1_sft", "eval/loss")
        check("held-out loss of sft (after < half of before)", f"{before:.3f} -> {after:.3f}", after < before / 2)
        before, after = ends(folder, "2_reward_model", "eval/pairs/accuracy")
        check(
            "held-out pairs right (about 0.5 -> > 0.8)",
            f"{before:.2f} -> {after:.2f}",
            abs(before - 0.5) < 0.1 and after > 0.8,
        )
        before, after = ends(folder, "3_ppo", "eval/reward/mean")
        error = evals(metrics(folder / "runs" / "tutorial" / "3_ppo"))[-1]["eval/standard_error"]
        rise = f"{before:.3f} -> {after:.3f}, standard error {error:.3f}"
        check(
            "held-out score of the reward model under PPO (rises by > 5 standard errors)",
            rise,
            after - before > 5 * error,
        )
        runs = folder / "runs" / "tutorial"
        accuracy = own_accuracy(runs / "2_reward_model" / "final")
        check("held-out pairs right in plain transformers (> 0.8)", round(accuracy, 2), accuracy > 0.8)
        shares = [courteous_answers(runs / part / "final") for part in ("1_sft", "3_ppo")]
        check("courteous answers in plain transformers, before and after PPO (rises by > 0.2)",
              f"{shares[0]:.2f} -> {shares[1]:.2f}", shares[1] - shares[0] > 0.2)  # fmt: skip
    finally:
        if len(sys.argv) < 2:
            shutil.rmtree(folder)
    finish()


if __name__ == "__main__":
    main()
