"""The rows of the tutorial's task: ask somebody to do something, in one sentence, courteously or bluntly."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack", "Laura", "Max")
DEEDS = (
    "close the window", "send the report", "turn down the music", "wait outside", "check the numbers",
    "bring some water", "clean the kitchen", "call the doctor", "open the door", "feed the cat",
    "lock the car", "read the letter", "water the plants", "print the tickets", "switch off the lights",
)  # fmt: skip
COURTEOUS = (
    "{name}, could you please {deed}?",
    "{name}, would you be so kind and {deed}?",
    "Would you {deed}, {name}? Thank you!",
    "{name}, please {deed} when you have a moment.",
)
BLUNT = (
    "{name}, {deed} now.",
    "{name}, you have to {deed}.",
    "Please just {deed}, {name}.",
    "{name}, {deed} or leave. Thank you!",
)
KIND = ("could you", "would you", "when you have a moment")
TRAIN, HELD_OUT = 144, 36


def courtesy_rows(seed: int) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Training and held-out rows; every pair of a name and a deed stands in one of them.

    `completion`: an answer as people write it, courteous in half of the rows. `chosen` and `rejected`: what people prefer,
    a courteous one, and a blunt one.
    """
    draw = random.Random(f"courtesy {seed}")
    asked = list(itertools.product(NAMES, DEEDS))
    draw.shuffle(asked)
    rows = []
    for place, (name, deed) in enumerate(asked):
        manner = COURTEOUS if place % 2 else BLUNT
        forms = draw.choice(manner), draw.choice(COURTEOUS), draw.choice(BLUNT)
        completion, chosen, rejected = (form.format(name=name, deed=deed) for form in forms)
        rows.append(
            {
                "prompt": f"Ask {name} to {deed}.",
                "name": name,
                "completion": completion,
                "chosen": chosen,
                "rejected": rejected,
            }
        )
    return rows[:TRAIN], rows[TRAIN : TRAIN + HELD_OUT]


def courteous(prompts: list[Any], completions: list[str], name: list[str], **columns: Any) -> list[float | None]:
    """1.0 where the answer names the person and leaves them a choice: a yardstick that no reward model has seen."""
    kind = [any(words in text.lower() for words in KIND) for text in completions]
    return [float(polite and who in text) for polite, who, text in zip(kind, name, completions, strict=True)]
