from __future__ import annotations

import random

import numpy as np
import pytest

from miles.learn.tree import build_tree, common_prefix, sorted_order, stored_tokens


def arrays(*sequences):
    return [np.array(sequence, dtype=np.int64) for sequence in sequences]


def test_a_prompt_and_two_completions():
    tree = build_tree(arrays([5, 6, 7], [5, 6], [5, 6, 7, 8], [5, 6, 9]))
    assert tree.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert tree.position_ids.tolist() == [0, 1, 2, 3, 2]
    assert tree.source.tolist() == [-1, 0, 1, 2, 1]
    assert tree.node_ids.tolist() == [0, 0, 1, 1, 2]
    assert tree.parents.tolist() == [-1, 0, 0]
    assert [path.tolist() for path in tree.paths] == [[0, 1, 2], [0, 1], [0, 1, 2, 3], [0, 1, 4]]
    assert tree.shared == (2, 0, 3, 2)


def test_without_sharing_every_sequence_is_a_root():
    tree = build_tree(arrays([5, 6], [5, 6], [5]), share=False)
    assert tree.token_ids.tolist() == [5, 6, 5, 6, 5]
    assert tree.parents.tolist() == [-1, -1, -1]
    assert tree.node_ids.tolist() == [0, 0, 1, 1, 2]
    assert tree.source.tolist() == [-1, 0, -1, 2, -1]


def test_no_sequences_make_an_empty_tree():
    assert len(build_tree([])) == 0


@pytest.mark.parametrize("seed", range(20))
def test_random_sequences_come_back_along_their_paths_and_a_node_knows_its_ancestors(seed):
    rng = random.Random(seed)
    sequences = arrays(*([rng.randrange(3) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 12))))
    tree = build_tree(sequences)
    prefixes = {tuple(sequence[: n + 1]) for sequence in sequences for n in range(len(sequence))}
    assert len(tree) == len(prefixes) == stored_tokens(sequences)
    for sequence, path in zip(sequences, tree.paths, strict=True):
        assert tree.token_ids[path].tolist() == sequence.tolist()
        assert tree.position_ids[path].tolist() == list(range(len(sequence)))
        assert tree.source[path].tolist() == [-1, *path[:-1].tolist()]
        nodes = list(dict.fromkeys(tree.node_ids[path].tolist()))
        assert [tree.parents[node] for node in nodes] == [-1, *nodes[:-1]]
    assert (tree.parents < np.arange(len(tree.parents))).all()
    assert (np.diff(tree.node_ids) >= 0).all()


def test_sorting_puts_neighbours_with_the_longest_prefixes_side_by_side_and_keeps_equal_ones_in_order():
    sequences = arrays([2, 1], [300, 1], [2], [2, 1], [2, 70000])
    assert sorted_order(sequences) == [2, 0, 3, 4, 1]
    assert common_prefix(*arrays([1, 2, 3], [1, 2, 4, 5])) == 2
    assert common_prefix(*arrays([1, 2], [1, 2, 4])) == 2
