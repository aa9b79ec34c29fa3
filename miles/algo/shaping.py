"""The length terms: from a sample's reward to the reward that credit is made of; plain numbers, no torch.

Order: weighted sum of the parts, None where a part is None (the environment); filters, which look at that unshaped
reward (collecting); the length terms (here); credit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from miles.errors import ConfigError
from miles.types import Sample

if TYPE_CHECKING:
    from miles.config.schema import Reward


def overlong_penalty(length: int, max_length: int, buffer: float | None = None, factor: float = 1.0) -> float:
    """max(-f, min(0, f * (Lmax - Lbuf - length) / Lbuf)).  DAPO, arXiv:2503.14476, eq. 13.

    length: trained tokens of the sample (tool output does not count); buffer: None is a quarter of max_length. Raises
    ConfigError for a buffer that is not above 0.
    """
    buffer = max_length / 4 if buffer is None else buffer
    if buffer <= 0:
        raise ConfigError(
            f"reward.overlong_buffer must be above 0, got {buffer:g}: the penalty grows over that many tokens."
        )
    return max(-factor, min(0.0, factor * (max_length - buffer - length) / buffer))


def shape_reward(sample: Sample, settings: Reward, max_new_tokens: int) -> float | None:
    """The reward that the sample is trained with; None: it leaves the loss mask (unscored, or truncated and masked)."""
    if sample.reward is None or (sample.truncated and settings.truncated == "mask"):
        return None
    if sample.truncated and settings.truncated == "value":
        return settings.truncated_value
    if not settings.overlong:
        return sample.reward
    return sample.reward + overlong_penalty(
        sample.num_trained, max_new_tokens, settings.overlong_buffer, settings.overlong_factor
    )


def shape_rewards(samples: Sequence[Sample], settings: Reward, max_new_tokens: int) -> list[float | None]:
    """`shape_reward` of each sample. settings: the recipe's [reward] section; max_new_tokens: the recipe's, Lmax."""
    return [shape_reward(sample, settings, max_new_tokens) for sample in samples]
