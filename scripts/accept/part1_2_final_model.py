"""The trained quickstart model in plain transformers, greedy: at least 90 of the 100 sums; the untrained one fails."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from common import ROOT, check, finish
from transformers import AutoModelForCausalLM, AutoTokenizer

SYSTEM = "You answer with a single number."


def right_answers(folder: Path) -> int:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report
    sums = [(a, b) for a in range(10) for b in range(10)]
    chats = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{a} + {b} ="}] for a, b in sums]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=8)
    texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    numbers = [re.findall(r"-?\d+", text) for text in texts]
    return sum(bool(n) and int(n[-1]) == a + b for n, (a, b) in zip(numbers, sums, strict=True))


def main() -> None:
    from miles.learn.cache import smollm2_folder

    trained = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "runs" / "quickstart" / "final"
    after, before = right_answers(trained), right_answers(smollm2_folder())
    check("sums right of 100, trained, greedy (>= 90)", after, after >= 90)
    check("sums right of 100, untrained, greedy (< 90)", before, before < 90)
    finish()


if __name__ == "__main__":
    main()
