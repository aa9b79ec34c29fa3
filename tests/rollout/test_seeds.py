from __future__ import annotations

from miles.rollout.seeds import derive_seed, evaluation_seeds, sample_seeds


def test_seeds_depend_on_run_ordinal_and_sample_alone():
    assert sample_seeds(1, 2, 4) == sample_seeds(1, 2, 8)[:4]
    train = {seed for run in range(3) for ordinal in range(20) for seed in sample_seeds(run, ordinal, 8)}
    held_out = {seed for run in range(3) for row in range(20) for seed in evaluation_seeds(run, row, 8)}
    assert len(train) == len(held_out) == 3 * 20 * 8
    assert not train & held_out
    assert all(0 <= seed < 2**63 for seed in train)


def test_seeds_are_the_same_on_every_machine():
    assert derive_seed("train", 0, 0, 0) == 1588349953847159965
    assert derive_seed("a", 1) != derive_seed("a1")
