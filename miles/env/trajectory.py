"""The token book-keeping of a trajectory: which tokens were sampled, by which weights, and what stood around them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from miles.errors import EngineError
from miles.types import Completion, Segment


def first_segment(prompt_ids: Sequence[int], completion: Completion) -> Segment:
    """Prompt and answer. Example, prompt [5 6], answer [7 8]: token_ids 5 6 7 8, loss_mask F F T T."""
    return extended(Segment((), (), (), ()), prompt_ids, completion)


def extended(segment: Segment, observed_ids: Sequence[int], completion: Completion) -> Segment:
    """The segment with what the environment said (not trained) and the model's next answer behind it."""
    unsampled = len(observed_ids)
    return Segment(
        token_ids=(*segment.token_ids, *observed_ids, *completion.token_ids),
        loss_mask=(*segment.loss_mask, *(False,) * unsampled, *(True,) * len(completion.token_ids)),
        behavior_logprobs=(*segment.behavior_logprobs, *(0.0,) * unsampled, *completion.logprobs),
        versions=(*segment.versions, *(-1,) * unsampled, *token_versions(completion)),
    )


def token_versions(completion: Completion) -> tuple[int, ...]:
    """The version of the weights that sampled each token."""
    return tuple(span.version for span in completion.versions for _ in range(span.start, span.end))


def checked(completions: Sequence[Completion], n: int) -> list[Completion]:
    """The completions. Raises EngineError unless there are n, each with one log-prob and one version for each token."""
    if len(completions) != n:
        raise EngineError(f"the engine returned {len(completions)} completions where {n} were asked for")
    for place, completion in enumerate(completions):
        counts = (len(completion.token_ids), len(completion.logprobs), len(token_versions(completion)))
        if len(set(counts)) != 1 or counts[0] == 0:
            raise EngineError(
                f"completion {place} of the engine has {counts[0]} tokens, {counts[1]} log-probs and versions for"
                f" {counts[2]} tokens; each must be the same and at least 1"
            )
    return list(completions)


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a later turn: the sample's own for turn 0, else 63 bits of BLAKE2b of (seed, turn)."""
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}:{turn}".encode(), digest_size=8).digest()) >> 1
