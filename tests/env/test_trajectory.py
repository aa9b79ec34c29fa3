from __future__ import annotations

import pytest

from miles.env.trajectory import checked, extended, first_segment, turn_seed
from miles.errors import EngineError
from miles.types import Completion, VersionSpan


def test_prompt_answer_observation_answer():
    first = Completion((7, 8), (-0.1, -0.2), (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)), "stop")
    second = Completion((9,), (-0.3,), (VersionSpan(5, 0, 1),), "length")
    segment = extended(first_segment([5, 6], first), [1, 2], second)
    assert segment.token_ids == (5, 6, 7, 8, 1, 2, 9)
    assert segment.loss_mask == (False, False, True, True, False, False, True)
    assert segment.behavior_logprobs == (0.0, 0.0, -0.1, -0.2, 0.0, 0.0, -0.3)
    assert segment.versions == (-1, -1, 3, 4, -1, -1, 5)
    assert segment.num_trained == 3


@pytest.mark.parametrize(
    ("completions", "message"),
    [
        ([], "returned 0 completions where 1 were asked for"),
        ([Completion((1, 2), (-0.1,), (VersionSpan(0, 0, 2),), "stop")], "2 tokens, 1 log-probs and versions for 2"),
        ([Completion((1, 2), (-0.1, -0.1), (VersionSpan(0, 0, 1),), "stop")], "versions for 1 tokens"),
        ([Completion((), (), (), "stop")], "0 tokens"),
    ],
)
def test_an_engine_that_breaks_its_word_is_an_error(completions, message):
    with pytest.raises(EngineError, match=message):
        checked(completions, 1)


def test_turn_seeds_differ_by_turn_and_seed_and_fit_63_bits():
    assert turn_seed(5, 0) == 5
    seeds = {turn_seed(seed, turn) for seed in range(20) for turn in range(1, 5)}
    assert len(seeds) == 80
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert turn_seed(5, 1) == turn_seed(5, 1)
