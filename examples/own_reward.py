"""Rewards of your own, in all the shapes that Miles accepts.

    miles train recipes/quickstart.toml --reward.functions '["examples/own_reward.py:close_number"]'

or from Python: `miles.train(..., reward=close_number)`.
"""

from __future__ import annotations

import re


def close_number(prompts, completions, answer, **columns):
    """1 for the right number, less the further it is off; None where the row itself has no answer to compare with.

    `answer` is a column of the data: one value for each completion. Name the columns you need, or take `**columns`.
    """
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        numbers = re.findall(r"-?\d{1,15}", completion)
        if right is None:
            rewards.append(None)
        elif not numbers:
            rewards.append(0.0)
        else:
            rewards.append(1.0 / (1.0 + abs(int(numbers[-1]) - int(right))))
    return rewards


async def short(prompts, completions, **columns):
    """1 for an empty answer, 0 for 40 characters and more. Coroutines may await a service; plain functions run in threads."""
    return [max(0.0, 1.0 - len(completion) / 40) for completion in completions]


def solution(data_source, solution_str, ground_truth, extra_info=None):
    """Called once for each completion. A dict needs the key `score`; its other numbers become metrics of their own."""
    right = str(ground_truth) in re.findall(r"-?\d+", solution_str)
    return {"score": float(right), "characters": len(solution_str)}
