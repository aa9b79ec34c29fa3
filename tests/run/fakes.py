"""Parts of one's own for runs with faults (`run.parts`): an engine and a learner without a model, which start in no time.

The engine's answers depend on the seeds alone, so on the ordinal; the learner's state is a hash over all groups in the order that
they were trained in, so one group too much, too little, or in another place, changes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time

from miles.types import Completion, PolicyUpdate, VersionSpan

ALPHABET = "0123456789 =abcdefghijklmnopqrstuvwxyz"


class Tokenizer:
    """One letter, one token."""

    chat_template = None
    name_or_path = "letters"
    bos_token_id = eos_token_id = None
    all_special_ids = ()

    def encode(self, text, add_special_tokens=True):
        return [ALPHABET.index(letter) for letter in text]

    def decode(self, ids, **options):
        return "".join(ALPHABET[each] for each in ids)

    def __call__(self, text, add_special_tokens=True, **options):
        return {"input_ids": self.encode(text)}


class Engine:
    """As old as it may be: tokens are of `min_version`."""

    async def generate(self, ids, n, sampling, seeds, min_version=0):
        completions = []
        for seed in seeds:
            draw = random.Random(seed)
            tokens = tuple(draw.randrange(len(ALPHABET)) for _ in range(sampling.max_new_tokens))
            spans = (VersionSpan(min_version, 0, len(tokens)),)
            completions.append(Completion(tokens, (-1.0,) * len(tokens), spans, "length"))
        return completions


class Learner:
    judged = ()

    def __init__(self, pause: float) -> None:
        self.version, self._digest, self._pause = 0, "", pause

    def pack(self, groups):
        return groups

    def score(self, batches):
        return None

    def update(self, batches, signals):
        for group in batches:
            told = json.dumps([group.ordinal, group.row, [[s.text, s.reward] for s in group.samples]])
            self._digest = hashlib.sha256(f"{self._digest}{self.version}{told}".encode()).hexdigest()
        time.sleep(self._pause)
        self.version += 1
        return {"trained": float(len(batches))}

    def policy_update(self):
        return PolicyUpdate(self.version, lambda: iter(()))

    def state(self):
        return json.dumps({"version": self.version, "digest": self._digest}).encode()

    def load_state(self, state):
        found = json.loads(state)
        self.version, self._digest = found["version"], found["digest"]


class Parts:
    """`LEARNER_PAUSE`: seconds of each update."""

    tokenizer, vocabulary = Tokenizer(), len(ALPHABET)

    def __init__(self, recipe) -> None:
        self.recipe = recipe

    def engine(self):
        return Engine()

    def learner(self):
        return Learner(float(os.environ.get("LEARNER_PAUSE", 0)))

    def publisher(self):
        return self

    def publish(self, update):
        """The engine needs no weights."""
