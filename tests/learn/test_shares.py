from __future__ import annotations

import pytest

from miles.learn.rows import members_of, row_tokens, size_of
from miles.learn.shares import shares


def tokens_of(step, part, share=True):
    return sum(size_of(group) for group in members_of(step, part, share)) if part else 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_every_sample_stands_in_one_part(groups, ranks):
    step = groups.step(groups.draw(count=5, size=6))
    chosen = list(step.samples)[2:]
    parts = shares(step, chosen, ranks, True)
    assert len(parts) == ranks
    assert sorted(sample for part in parts for sample in part) == chosen
    assert all(part == sorted(part) for part in parts)
    assert shares(step, chosen, ranks, True) == parts


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_fullest_rank_has_little_more_than_its_part(groups, ranks):
    step = groups.step(groups.draw(count=12, size=8, longest=20))
    sizes = [tokens_of(step, part) for part in shares(step, step.samples, ranks, True)]
    assert max(sizes) <= 1.1 * sum(sizes) / ranks


def test_groups_of_equal_length_stay_whole_and_their_prompts_are_read_once(groups):
    prompt = [1, *range(3, 23)]
    made = [
        groups.group(
            g, [groups.sample(groups.segment([([*prompt, g + 3], False), ([5, 6, 7, s + 8], True)])) for s in range(4)]
        )
        for g in range(4)
    ]
    step = groups.step(made)
    parts = shares(step, step.samples, 2, True)
    owners = [{int(step.table.group_ids[sample]) for sample in part} for part in parts]
    assert not owners[0] & owners[1]
    assert [len(groups_of) for groups_of in owners] == [2, 2]


def test_one_group_is_cut_by_samples(groups):
    step = groups.step(groups.draw(count=1, size=8))
    parts = shares(step, step.samples, 4, True)
    assert all(parts)
    longest = max(row_tokens(step.segments[i], True) for i in step.samples)
    assert max(tokens_of(step, part) for part in parts) <= tokens_of(step, list(step.samples)) / 4 + longest


def test_ranks_without_a_sample_have_an_empty_part(groups):
    step = groups.step(groups.draw(count=1, size=2))
    assert [len(part) for part in shares(step, step.samples, 4, True)] == [1, 1, 0, 0]
    assert shares(step, [], 3, True) == [[], [], []]
