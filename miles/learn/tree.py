"""Prefix trees of token sequences: tokens that several sequences share are stored once, in preorder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Tree:
    """n stored tokens in K nodes (runs of tokens without a branch); what comes before a token stands before it."""

    token_ids: Ints  # [n]
    position_ids: Ints  # [n] place of the token in its own sequences
    source: Ints  # [n] index of the token before it, -1 at a root
    node_ids: Ints  # [n]
    parents: Ints  # [K] parent node, -1 at a root
    paths: tuple[Ints, ...]  # for each sequence the index of each of its tokens
    shared: tuple[int, ...]  # for each sequence, how many of its first tokens an earlier one had brought

    def __len__(self) -> int:
        return len(self.token_ids)


def common_prefix(a: Ints, b: Ints) -> int:
    """Number of first tokens in which two sequences agree."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def sorted_order(sequences: Sequence[Ints]) -> list[int]:
    """The order in which each sequence shares its longest prefix with the one before it; equal ones keep their order."""
    keys = [sequence.astype(">i8").tobytes() for sequence in sequences]
    return sorted(range(len(keys)), key=keys.__getitem__)


def stored_tokens(sequences: Sequence[Ints]) -> int:
    """Tokens of the tree of these sequences."""
    ordered = [sequences[i] for i in sorted_order(sequences)]
    return sum(map(len, ordered)) - sum(common_prefix(a, b) for a, b in pairwise(ordered))


def build_tree(sequences: Sequence[Ints], share: bool = True) -> Tree:
    """share: False makes each sequence a root of its own. Order of the stored tokens: preorder, siblings by token id."""
    order = sorted_order(sequences) if share else list(range(len(sequences)))
    paths: list[Ints] = [np.empty(0, np.int64)] * len(sequences)
    shared = [0] * len(sequences)
    token_ids, position_ids, source = [], [], []
    before, path, size = np.empty(0, np.int64), np.empty(0, np.int64), 0
    for i in order:
        sequence = sequences[i]
        common = common_prefix(before, sequence) if share else 0
        new = np.arange(size, size + len(sequence) - common)
        previous = np.concatenate([path[common - 1 : common] if common else [-1], new[:-1]])
        token_ids.append(sequence[common:])
        position_ids.append(np.arange(common, len(sequence)))
        source.append(previous[: len(new)])
        path = np.concatenate([path[:common], new])
        paths[i], shared[i] = path, common
        before, size = sequence, size + len(new)
    sources = _joined(source)
    node_ids, parents = _nodes(sources)
    return Tree(_joined(token_ids), _joined(position_ids), sources, node_ids, parents, tuple(paths), tuple(shared))


def _nodes(source: Ints) -> tuple[Ints, Ints]:
    """A node ends where its last token has not exactly one child, and the child that follows starts a new one."""
    n = len(source)
    children = np.bincount(source[source >= 0], minlength=n)
    starts = (source != np.arange(n) - 1) | (source < 0)
    starts[1:] |= children[: n - 1] > 1
    node_ids = np.cumsum(starts) - 1
    above = source[starts]
    return node_ids, np.where(above < 0, -1, node_ids[above]) if n else node_ids


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)
