"""The quickstart's task through TRL's GRPOTrainer: run by compare.py in a virtual environment that has trl."""

from __future__ import annotations

import argparse
import json
import re
import resource
import time
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Seconds from the start of training to the end of each step, and the reward that TRL logs for it."""

    def __init__(self) -> None:
        self.start = 0.0
        self.ends: list[float] = []
        self.rewards: list[float] = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.perf_counter() - self.start)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "reward" in logs:
            self.rewards.append(float(logs["reward"]))


def last_integer_is_right(completions, answer, **columns) -> list[float]:
    """1 where the last integer of the completion is the answer, else 0."""
    rewards = []
    for completion, expected in zip(completions, answer, strict=True):
        numbers = re.findall(r"-?\d+", completion[0]["content"])
        rewards.append(float(bool(numbers) and int(numbers[-1]) == int(expected)))
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--rows", required=True, help="jsonl with `messages` and `answer`")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = [json.loads(line) for line in Path(args.rows).read_text().splitlines()]
    dataset = Dataset.from_list([{"prompt": r["messages"], "answer": r["answer"]} for r in rows])
    config = GRPOConfig(
        output_dir=str(args.out.parent / "trl_grpo"), per_device_train_batch_size=64, num_generations=8,
        max_completion_length=8, temperature=1.0, beta=0.0, loss_type="dapo", scale_rewards="none",
        learning_rate=1e-5, lr_scheduler_type="constant", warmup_steps=0, adam_beta1=0.9, adam_beta2=0.99,
        weight_decay=0.0, max_grad_norm=1.0, max_steps=args.steps, seed=args.seed, use_cpu=True, bf16=False,
        gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    clock = Clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        reward_funcs=last_integer_is_right,
        args=config,
        train_dataset=dataset,
        callbacks=[clock],
    )
    trainer.train()
    args.out.write_text(
        json.dumps(
            {
                "samples_per_step": 64,
                "step_ends_s": clock.ends,
                "reward": clock.rewards,
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
