"""The addition task through the last PPOTrainer of TRL (1.12): run by compare.py in a virtual environment of its own.

Each of the 8 prompts of a step is fed 8 times. TRL asks for a reward model; it gets a module that decodes the ids and
looks at the last integer, so that neither side pays for a reward model's forward.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer


class RuleReward(torch.nn.Module):
    """Looks like a reward model to TRL: `backbone` hands the ids on, `score` turns them into rewards [B, T, 1]."""

    base_model_prefix = "backbone"

    def __init__(self, tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.backbone = Backbone()

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        rewards = [self.reward(self.tokenizer.decode(row.long().tolist())) for row in ids[:, :, 0]]
        return torch.tensor(rewards)[:, None, None].expand(ids.shape[0], ids.shape[1], 1)

    @staticmethod
    def reward(text: str) -> float:
        question, _, answer = text.rpartition("assistant\n")
        a, b = re.findall(r"(\d+) \+ (\d+) =", question)[-1]
        numbers = re.findall(r"-?\d+", answer.split("<|im_end|>")[0])
        return float(bool(numbers) and int(numbers[-1]) == int(a) + int(b))


class Backbone(torch.nn.Module):
    def forward(self, input_ids: torch.Tensor, **kwargs) -> SimpleNamespace:
        return SimpleNamespace(hidden_states=[input_ids[:, :, None].float()])


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.start = 0.0
        self.ends: list[float] = []
        self.rewards: list[float] = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.perf_counter() - self.start)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "objective/scores" in logs:
            self.rewards.append(float(logs["objective/scores"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = "<|endoftext|>"  # TRL masks by the pad id, which must not be the end token
    rows = [json.loads(line) for line in Path(args.rows).read_text().splitlines()]
    prompts = [tokenizer.apply_chat_template(r["messages"], add_generation_prompt=True, tokenize=False) for r in rows]
    generator = torch.Generator().manual_seed(args.seed)
    order = torch.randperm(len(prompts), generator=generator).tolist()
    fed = [prompts[i % len(prompts)] for i in order for _ in range(8)]
    dataset = Dataset.from_list([{"input_ids": tokenizer(text, add_special_tokens=False).input_ids} for text in fed])

    def load():
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)

    value = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=1, dtype=torch.float32)
    torch.nn.init.zeros_(value.score.weight)
    config = PPOConfig(
        output_dir=str(args.out.parent / "trl_ppo"), per_device_train_batch_size=64, gradient_accumulation_steps=1,
        num_mini_batches=1, num_ppo_epochs=1, local_rollout_forward_batch_size=64, response_length=8, temperature=1.0,
        kl_coef=0.01, kl_estimator="k1", whiten_rewards=False, gamma=1.0, lam=0.95, cliprange=0.2,
        cliprange_value=0.2, learning_rate=1e-5, lr_scheduler_type="constant", warmup_steps=0, adam_beta1=0.9,
        adam_beta2=0.99, weight_decay=0.0, max_grad_norm=1.0, total_episodes=64 * args.steps, seed=args.seed,
        use_cpu=True, bf16=False, gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to=[],
        disable_tqdm=True, num_sample_generations=0, stop_token="eos", missing_eos_penalty=None,
    )  # fmt: skip
    clock = Clock()
    trainer = PPOTrainer(
        args=config, processing_class=tokenizer, model=load(), ref_model=load(), reward_model=RuleReward(tokenizer),
        value_model=value, train_dataset=dataset, eval_dataset=dataset.select(range(64)), callbacks=[clock],
    )  # fmt: skip
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
