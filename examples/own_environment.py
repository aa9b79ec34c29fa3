"""An environment of your own: something that answers the model between its turns.

    miles train RECIPE --rollout.environment examples/own_environment.py:SecondChance --rollout.max_turns 2

on any data with a numeric column `answer`.
"""

from __future__ import annotations

import re


class SecondChance:
    """Says whether the answer is right and lets the model try once more; a right second answer is worth half."""

    def __init__(self, row, seed):
        """One object for each trajectory. `row` is the data row; `seed` is for anything random in here."""
        self.right = str(row["answer"])
        self.tries = 0
        self.solved = False

    def respond(self, answer):
        """What the model is told after `answer`: text, or a list of chat messages. None ends the trajectory."""
        self.tries += 1
        numbers = re.findall(r"-?\d+", answer)
        self.solved = bool(numbers) and numbers[-1] == self.right
        return None if self.solved else "That is wrong. Try again."

    def reward(self):
        """Called once at the end. Leave this method out to score the model's text with reward functions alone."""
        if not self.solved:
            return 0.0
        return 1.0 if self.tries == 1 else 0.5
