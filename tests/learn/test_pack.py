from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from miles.learn.pack import build_batch, move, pack
from miles.learn.rows import plan_rows, row_tokens


def sequence_before(batch, t):
    """Token ids up to and with token t, along its sources."""
    out = []
    while t >= 0:
        out.append(int(batch.token_ids[t]))
        t = int(batch.source[t])
    return out[::-1]


def layouts(groups):
    return {"tree": groups.TREE, "packed": groups.PACKED, "separate": groups.SEPARATE}


@pytest.mark.parametrize("kind", ["tree", "packed", "separate"])
@pytest.mark.parametrize("limit", [1, 40, 90, 4096])
def test_every_trained_token_stands_once_after_its_own_sequence(groups, kind, limit):
    made = groups.draw(seed=limit)
    step = groups.step(made)
    batches = pack(step, step.samples, replace(layouts(groups)[kind], tokens_per_batch=limit))
    expected = {
        int(slot): segment.token_ids[: place + 1].tolist()
        for sample in step.segments
        for segment in sample
        for place, slot in zip(segment.places, segment.slots, strict=True)
    }
    found, where = {}, {}
    for number, batch in enumerate(batches):
        assert batch.loss_mask.tolist() == (batch.slots >= 0).tolist() == (batch.sample_ids >= 0).tolist()
        read = batch.rows * batch.width
        assert read <= limit or len(set(batch.sample_ids.tolist()) - {-1}) == 1
        assert (batch.source < read).all()
        assert (batch.node_ids[read:] == -1).all()
        for t in batch.loss_mask.nonzero().flatten().tolist():
            slot = int(batch.slots[t])
            assert slot not in found
            found[slot] = sequence_before(batch, t)
            assert len(found[slot]) == int(batch.position_ids[t]) + 1
            sample = int(batch.sample_ids[t])
            assert sample == int(step.table.sample_ids[slot])
            assert where.setdefault(sample, number) == number, "a sample stands in two batches"
    assert found == expected


def test_the_documented_example(groups):
    made = [
        groups.group(
            0,
            [
                groups.sample(groups.segment([([5, 6], False), ([7, 8], True)])),
                groups.sample(groups.segment([([5, 6], False), ([9], True)])),
            ],
        )
    ]
    step = groups.step(made)
    batch = build_batch([(*step.segments[0], *step.segments[1])], share=True)
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 2]
    assert batch.node_ids.tolist() == [0, 0, 0, -1, -1]
    assert batch.parents.tolist() == [-1]
    assert batch.source.tolist() == [-1, 0, 1, 2, 1]
    assert batch.slots.tolist() == [-1, -1, 0, 1, 2]
    assert (batch.rows, batch.width) == (1, 3)


def test_equal_answers_cost_nothing_and_a_system_prompt_stands_once_in_a_row(groups):
    answers = [[10, 2], [10, 2], [11, 12, 2]]
    made = [
        groups.group(
            g, [groups.sample(groups.segment([([*groups.SYSTEM, 20 + g], False), (a, True)])) for a in answers]
        )
        for g in range(3)
    ]
    step = groups.step(made)
    (batch,) = pack(step, step.samples, groups.TREE)
    assert (batch.rows, batch.width) == (1, len(groups.SYSTEM) + 3 * (1 + 1 + 2))
    assert int(batch.loss_mask.sum()) == 3 * 7


def test_a_group_too_long_for_a_row_is_cut_by_samples_with_its_prompt_repeated(groups):
    prompt = list(range(3, 23))
    made = [groups.group(0, [groups.sample(groups.segment([(prompt, False), ([k] * 11, True)])) for k in range(3, 9)])]
    step = groups.step(made)
    batches = pack(step, step.samples, replace(groups.TREE, tokens_per_batch=40))
    assert [batch.rows * batch.width for batch in batches] == [40, 40, 40]
    assert sorted(len(set(batch.sample_ids.tolist()) - {-1}) for batch in batches) == [2, 2, 2]


def test_samples_that_are_left_out_change_no_slot(groups):
    step = groups.step(groups.draw())
    (batch,) = pack(step, [1, 6], groups.TREE)
    assert set(batch.sample_ids.tolist()) == {-1, 1, 6}
    kept = sorted(slot for slot in batch.slots.tolist() if slot >= 0)
    assert kept == [i for i, owner in enumerate(step.table.sample_ids.tolist()) if owner in (1, 6)]
    assert pack(step, [], groups.TREE) == []


def test_the_cost_model_shares_short_rows_and_separates_long_answers(groups):
    short = groups.step(groups.draw(count=6, size=8))
    plan = plan_rows(short, short.samples, groups.TREE)
    assert plan.share
    assert sum(row_tokens(row, True) for rows in plan.batches for row in rows) < 0.6 * sum(
        len(part.inputs) for sample in short.segments for part in sample
    )
    long = [
        groups.group(0, [groups.sample(groups.segment([([1, 2, 3], False), ([3 + k] * 3000, True)])) for k in range(4)])
    ]
    apart = groups.step(long)
    assert not plan_rows(apart, apart.samples, replace(groups.TREE, tokens_per_batch=20000)).share


def test_moving_keeps_everything_but_the_device(groups):
    step = groups.step(groups.draw())
    (batch,) = pack(step, step.samples, groups.TREE)
    moved = move(batch, torch.device("meta"))
    assert moved.token_ids.device.type == "meta"
    assert (moved.rows, moved.width) == (batch.rows, batch.width)
