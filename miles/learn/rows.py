"""Which samples stand together in a row, and which rows in a batch: the cheapest of a few plans, by a small cost model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from miles.learn.step import Step, TrainedSegment
from miles.learn.tree import common_prefix, sorted_order, stored_tokens

Row = tuple[TrainedSegment, ...]

GROWTH = 1.25  # from one row width that is tried to the next
TOP_WIDTH = 1024  # tokens; wider rows are tried only where samples are that long
CAUSAL = 0.7  # a causal kernel against one that reads a mask, measured on a CPU
PER_BATCH = 32.0  # fixed cost of a batch (gradients of embedding and head, calls), in tokens


@dataclass(frozen=True)
class Layout:
    """What rows may hold, and what they cost."""

    share: bool  # a prefix is stored once for all sequences of a row
    pack: bool  # a row may hold several sequences; False: one segment a row, padded, for models without a mask
    tokens_per_batch: int  # R * L at most, unless one sample alone (or one group, with whole_groups) is longer
    whole_groups: bool = False  # all samples of a group stand in one batch: losses that compare them
    attention_half: float = 2000.0  # row width at which attention costs as much as everything else of a layer


@dataclass(frozen=True)
class RowPlan:
    """Batches of rows of segments."""

    batches: tuple[tuple[Row, ...], ...]
    share: bool
    cost: float  # in tokens of a row without attention


@dataclass(frozen=True)
class Member:
    """A sample on its way into a row."""

    sample: int
    alone: int  # tokens of a row that holds nothing else
    beside: int  # tokens that it adds, at most, to a row with the member before it


def plan_rows(step: Step, samples: Sequence[int], layout: Layout) -> RowPlan:
    """The cheapest plan for these samples.

    A sample never stands in two batches; a group may, its prompt repeated, unless `whole_groups` says otherwise.
    """
    plan = _separate(step, samples, layout)
    if not layout.pack or not samples:
        return plan
    groups = members_of(step, samples, layout.share)
    root = _root(step, samples) if layout.share else 0
    smallest = max(member.alone for group in groups for member in group)
    largest = max(smallest, min(max(TOP_WIDTH, 2 * smallest), layout.tokens_per_batch))
    everything = root + sum(size_of(group) - root for group in groups)
    for width in _widths(smallest, min(largest, max(smallest, everything))):
        packed = _packed(step, groups, root, width, layout)
        if packed.cost < plan.cost:
            plan = packed
    return plan


def row_tokens(row: Row, share: bool) -> int:
    """Tokens that the model reads of a row."""
    inputs = [segment.inputs for segment in row]
    return stored_tokens(inputs) if share else sum(map(len, inputs))


def _widths(smallest: int, largest: int) -> list[int]:
    widths = [smallest]
    while widths[-1] < largest:
        widths.append(min(largest, math.ceil(widths[-1] * GROWTH)))
    return widths


def _separate(step: Step, samples: Sequence[int], layout: Layout) -> RowPlan:
    """One segment a row: what plain transformers does, without the tokens that predict nothing."""
    units = _by_group(step, samples) if layout.whole_groups else [[i] for i in samples]
    together = [[s for i in unit for s in step.segments[i]] for unit in units]
    whole = [(max(len(s.inputs) for s in segments), [(s,) for s in segments]) for segments in together]
    return _batched(whole, False, CAUSAL, layout)


def members_of(step: Step, samples: Sequence[int], share: bool) -> list[list[Member]]:
    """The samples of each group, neighbours sharing the most."""
    return [_ordered(step, group, share) for group in _by_group(step, samples)]


def _by_group(step: Step, samples: Sequence[int]) -> list[list[int]]:
    by_group: dict[int, list[int]] = {}
    for i in samples:
        by_group.setdefault(int(step.table.group_ids[i]), []).append(i)
    return list(by_group.values())


def _ordered(step: Step, group: Sequence[int], share: bool) -> list[Member]:
    alone = {i: row_tokens(step.segments[i], share) for i in group}
    if not share:
        return [Member(i, alone[i], alone[i]) for i in group]
    first = [step.segments[i][0].inputs for i in group]
    members, before = [], None
    for k in sorted_order(first):
        common = 0 if before is None else common_prefix(before, first[k])
        members.append(Member(group[k], alone[group[k]], alone[group[k]] - common))
        before = first[k]
    return members


def size_of(members: Sequence[Member]) -> int:
    return members[0].alone + sum(member.beside for member in members[1:])


def _root(step: Step, samples: Sequence[int]) -> int:
    """Length of the prefix of every sequence: a system prompt, say."""
    inputs = [segment.inputs for i in samples for segment in step.segments[i]]
    order = sorted_order(inputs)
    return common_prefix(inputs[order[0]], inputs[order[-1]])


def _packed(step: Step, groups: Sequence[Sequence[Member]], root: int, width: int, layout: Layout) -> RowPlan:
    """First fit, largest first, into rows of at most `width` tokens; what cannot be cut to that has a row of its own."""
    width = min(width, layout.tokens_per_batch)
    pieces = [piece for group in groups for piece in ([group] if layout.whole_groups else cut(group, width))]
    rows: list[tuple[int, list[int]]] = []
    for piece in sorted(pieces, key=size_of, reverse=True):
        size, members = size_of(piece), [member.sample for member in piece]
        for at, (filled, held) in enumerate(rows):
            if filled + size - root <= width:
                rows[at] = (filled + size - root, held + members)
                break
        else:
            rows.append((size, members))
    segments = [(sorted(held), filled) for filled, held in rows]
    whole = [(filled, [tuple(s for i in held for s in step.segments[i])]) for held, filled in segments]
    return _batched(whole, layout.share, 1.0, layout)


def cut(group: Sequence[Member], width: int) -> list[list[Member]]:
    """A group cut by samples so that each piece fits into a row."""
    pieces: list[list[Member]] = []
    filled = 0
    for member in group:
        if pieces and filled + member.beside <= width:
            pieces[-1].append(member)
            filled += member.beside
        else:
            pieces.append([member])
            filled = member.alone
    return pieces


def _batched(whole: Sequence[tuple[int, list[Row]]], share: bool, attention: float, layout: Layout) -> RowPlan:
    """Rows that must stay together, each list with its widest row, into batches within the limit; like beside like."""
    batches: list[list[Row]] = []
    widths: list[int] = []
    for width, rows in sorted(whole, key=lambda item: item[0], reverse=True):
        if batches and (len(batches[-1]) + len(rows)) * widths[-1] <= layout.tokens_per_batch:
            batches[-1] += rows
        else:
            batches.append(list(rows))
            widths.append(width)
    cost = sum(
        PER_BATCH + len(rows) * width * (1 + attention * width / layout.attention_half)
        for rows, width in zip(batches, widths, strict=True)
    )
    return RowPlan(tuple(tuple(rows) for rows in batches), share, cost)
