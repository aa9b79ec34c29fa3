"""`miles export-samples`: every finished group of a run as a table, one row a sample, for study."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from miles.buffer.ledger import LedgerReader
from miles.errors import BadInput
from miles.run.buffer import open_reader
from miles.run.rundir import stored_recipe
from miles.types import FinishedGroup, Group, Sample

Write = Callable[[list[dict[str, Any]]], None]


def export_samples(run_dir: Path, kind: str, to: Path | None) -> int:
    """Write the samples of `run_dir` to `to` (None: RUN/finished.<kind>) as `kind`, parquet or jsonl."""
    target = run_dir / f"finished.{kind}" if to is None else to
    if target.exists():
        raise BadInput(f"{target} exists already: move it away, or name another file with --to")
    reader = open_reader(run_dir, stored_recipe(run_dir).buffer)
    count = 0
    try:
        with WRITERS[kind](target) as write:
            for rows in _rows_by_step(reader):
                write(rows)
                count += len(rows)
    finally:
        reader.close()
    print(f"{count} samples: {target}")
    return 0


def _rows_by_step(reader: LedgerReader) -> Iterator[list[dict[str, Any]]]:
    """One list of rows for each manifest, and one for what was dropped after the last."""
    stats = reader.stats()
    for step in range(stats.replayable_from, stats.next_step + 1):
        groups = [(done, reader.group(done.ordinal)) for done in reader.finished(step) if done.lengths]
        yield [
            _row(step, done, group, index, sample)
            for done, group in groups
            for index, sample in enumerate(group.samples)
        ]


def _row(step: int, done: FinishedGroup, group: Group, index: int, sample: Sample) -> dict[str, Any]:
    """Columns of one sample. Token columns hold one list for each segment."""
    return {
        "step": step + 1,
        "ordinal": group.ordinal,
        "data_row": group.row,
        "sample": index,
        "dropped": done.reason,
        "prompt": group.prompt_text,
        "completion": sample.text,
        "reward": sample.reward,
        "reward_parts": json.dumps(dict(sample.reward_parts), sort_keys=True),
        "baseline_reward": group.baseline_reward,
        "stop_reason": sample.stop_reason,
        "version_min": group.version_min,
        "version_max": group.version_max,
        "token_ids": [list(segment.token_ids) for segment in sample.segments],
        "loss_mask": [list(segment.loss_mask) for segment in sample.segments],
        "behavior_logprobs": [list(segment.behavior_logprobs) for segment in sample.segments],
        "versions": [list(segment.versions) for segment in sample.segments],
    }


@contextmanager
def _jsonl(target: Path) -> Iterator[Write]:
    with target.open("w", encoding="utf-8") as file:
        yield lambda rows: file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


@contextmanager
def _parquet(target: Path) -> Iterator[Write]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise BadInput(
            "--format parquet needs pyarrow: pip install 'miles-rl[data]', or choose --format jsonl"
        ) from error
    texts = ("dropped", "prompt", "completion", "reward_parts", "stop_reason")
    lists = {
        "token_ids": pa.int32(),
        "loss_mask": pa.bool_(),
        "behavior_logprobs": pa.float32(),
        "versions": pa.int32(),
    }
    numbers = ("step", "ordinal", "data_row", "sample", "version_min", "version_max")
    schema = pa.schema(
        [(name, pa.int64()) for name in numbers]
        + [(name, pa.string()) for name in texts]
        + [(name, pa.float64()) for name in ("reward", "baseline_reward")]
        + [(name, pa.list_(pa.list_(kind))) for name, kind in lists.items()]
    )
    with pq.ParquetWriter(target, schema) as writer:
        yield lambda rows: writer.write_table(pa.Table.from_pylist(rows, schema=schema)) if rows else None


WRITERS: dict[str, Callable[[Path], AbstractContextManager[Write]]] = {"parquet": _parquet, "jsonl": _jsonl}
