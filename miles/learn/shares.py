"""Which samples each rank trains: about equally many tokens, groups whole where they fit, so that a prompt is read once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from miles.learn.rows import Member, cut, members_of, size_of
from miles.learn.step import Step

FINENESS = (1, 2, 4, 8)  # pieces of a rank's part that are tried: finer ones balance better and repeat more prompts


def shares(step: Step, samples: Sequence[int], ranks: int, share: bool, whole_groups: bool = False) -> list[list[int]]:
    """A part for each rank, each ascending: a function of the step, the samples and the number of ranks alone.

    share: a prefix costs once for all samples of a piece, and whole_groups: no group is cut, as in `rows.Layout`. Of the ways that are tried, the one whose
    fullest rank has the fewest tokens; the coarsest of equals.
    """
    if ranks == 1 or not samples:
        return [sorted(samples), *([] for _ in range(ranks - 1))]
    groups = members_of(step, samples, share)
    total = sum(size_of(group) for group in groups)
    widths = [total] if whole_groups else [math.ceil(total / (ranks * parts)) for parts in FINENESS]
    ways = [_dealt(groups, width, ranks) for width in widths]
    parts, _ = min(ways, key=lambda way: max(map(sum, way[1])))
    return [sorted(part) for part in parts]


def _dealt(groups: Sequence[Sequence[Member]], width: int, ranks: int) -> tuple[list[list[int]], list[list[int]]]:
    """Pieces of at most `width` tokens, largest first, each to the rank that has the least; samples and sizes by rank."""
    pieces = [piece for group in groups for piece in cut(group, width)]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    sizes: list[list[int]] = [[] for _ in range(ranks)]
    for piece in sorted(pieces, key=size_of, reverse=True):
        least = min(range(ranks), key=lambda rank: (sum(sizes[rank]), rank))
        parts[least] += [member.sample for member in piece]
        sizes[least].append(size_of(piece))
    return parts, sizes
