"""Packs samples into batches: the one place where plain Python becomes tensors that a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.learn.rows import Layout, Row, plan_rows
from miles.learn.step import Step, TrainedSegment
from miles.learn.tree import Ints, Tree, build_tree
from miles.types import Batch

T = TypeVar("T")


def pack(step: Step, samples: Sequence[int], layout: Layout) -> list[Batch]:
    """Batches (on the CPU) that hold every trained token of these samples once, each sample whole in one of them."""
    plan = plan_rows(step, samples, layout)
    return [build_batch(rows, plan.share) for rows in plan.batches]


def build_batch(rows: Sequence[Row], share: bool) -> Batch:
    """One batch of these rows. share: sequences of a row that begin alike are stored once as far as they agree."""
    trees = [build_tree([segment.inputs for segment in row], share) for row in rows]
    width = max(map(len, trees))
    columns = [_read(row, tree, r * width, width) for r, (row, tree) in enumerate(zip(rows, trees, strict=True))]
    columns += [_labels(row, tree, r * width) for r, (row, tree) in enumerate(zip(rows, trees, strict=True))]
    node_ids, parents = _forest(trees, width, sum(map(len, columns)))
    slots = _tensor([column.slots for column in columns])
    return Batch(
        token_ids=_tensor([column.token_ids for column in columns]),
        position_ids=_tensor([column.position_ids for column in columns]),
        node_ids=node_ids,
        parents=parents,
        source=_tensor([column.source for column in columns]),
        loss_mask=slots >= 0,
        slots=slots,
        sample_ids=_tensor([column.sample_ids for column in columns]),
        rows=len(rows),
        width=width,
    )


def empty_batch() -> Batch:
    """A row that trains nothing: what a rank that has run out of batches sends through the model beside the others."""
    nothing = torch.full((2,), -1)
    return Batch(
        token_ids=torch.zeros(2, dtype=torch.int64),
        position_ids=torch.arange(2),
        node_ids=torch.zeros(2, dtype=torch.int64),
        parents=torch.tensor([-1]),
        source=torch.tensor([-1, 0]),
        loss_mask=torch.zeros(2, dtype=torch.bool),
        slots=nothing,
        sample_ids=nothing,
        rows=1,
        width=2,
    )


def move(value: T, device: torch.device | str) -> T:
    """A copy of a dataclass with its tensors on the device."""
    tensors = {f.name: getattr(value, f.name) for f in fields(value) if isinstance(getattr(value, f.name), Tensor)}
    return replace(value, **{name: tensor.to(device) for name, tensor in tensors.items()})


@dataclass(frozen=True)
class _Columns:
    """Fields of a batch for some of its tokens."""

    token_ids: Ints
    position_ids: Ints
    source: Ints  # counts from the batch's first token
    slots: Ints
    sample_ids: Ints

    def __len__(self) -> int:
        return len(self.slots)


def _read(row: Row, tree: Tree, offset: int, width: int) -> _Columns:
    """The tokens of a row that the model reads; a trained one carries its loss in the sequence that brought it."""
    slots, sample_ids = np.full(width, -1), np.full(width, -1)
    for segment, path, shared in zip(row, tree.paths, tree.shared, strict=True):
        own = _own(segment, path, shared)
        at = path[segment.places[own]]
        slots[at], sample_ids[at] = segment.slots[own], segment.sample
    source = np.where(tree.source < 0, -1, tree.source + offset)
    return _Columns(
        _padded(tree.token_ids, width, 0),
        _padded(tree.position_ids, width, 0),
        _padded(source, width),
        slots,
        sample_ids,
    )


def _labels(row: Row, tree: Tree, offset: int) -> _Columns:
    """The trained tokens of a row that the model need not read."""
    parts = []
    for segment, path, shared in zip(row, tree.paths, tree.shared, strict=True):
        label = ~_own(segment, path, shared)
        places = segment.places[label]
        source = path[places - 1] + offset
        owner = np.full(len(places), segment.sample)
        parts.append((segment.token_ids[places], places, source, segment.slots[label], owner))
    return _Columns(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _own(segment: TrainedSegment, path: Ints, shared: int) -> NDArray[np.bool_]:
    """Which trained tokens of a segment stand in the row, and are not another sequence's."""
    return (segment.places >= shared) & (segment.places < len(path))


def _forest(trees: Sequence[Tree], width: int, tokens: int) -> tuple[Tensor, Tensor]:
    """node_ids [tokens] and parents [K] of trees in rows of `width`, counted through."""
    node_ids, parents, above = [], [], 0
    for tree in trees:
        node_ids.append(_padded(tree.node_ids + above, width))
        parents.append(np.where(tree.parents < 0, -1, tree.parents + above))
        above += len(tree.parents)
    node_ids.append(np.full(tokens - len(trees) * width, -1))
    return _tensor(node_ids), _tensor(parents)


def _padded(column: Ints, width: int, fill: int = -1) -> Ints:
    return np.concatenate([column, np.full(width - len(column), fill)])


def _tensor(parts: Sequence[Ints]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
