"""Reads the rows that prompts are made of: from files, the hub, a built-in task, or Python; every bad row is named."""

from __future__ import annotations

import csv
import difflib
import hashlib
import importlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from miles.config import schema
from miles.config.names import DATA_SUFFIXES, is_hub_id, is_text, stands
from miles.env.recorded import exchanges
from miles.errors import DataError, in_short, in_words

if TYPE_CHECKING:
    from miles.env.tasks import Task

EXTRA = "install it with: pip install 'miles-rl[data]'"


@dataclass(frozen=True)
class Dataset(Sequence[Mapping[str, Any]]):
    """Rows in a fixed order. A row's index, counted from 0, is its name everywhere: prompts, groups, messages."""

    rows: tuple[Mapping[str, Any], ...]
    source: str
    prompt_column: str = "prompt"
    form: str = "prompts"  # what the rows hold: prompts, answers or pairs

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.rows[index]

    @property
    def columns(self) -> list[str]:
        """Every column that some row has, in order of first appearance."""
        return list(dict.fromkeys(column for row in self.rows for column in row))

    def prompt(self, index: int) -> Any:
        return self.rows[index][self.prompt_column]

    def only(self, indices: Iterable[int]) -> Dataset:
        return replace(self, rows=tuple(self.rows[index] for index in indices))

    @property
    def content_hash(self) -> str:
        """SHA-256 of all rows in order: two runs with the same hash saw the same data."""
        digest = hashlib.sha256()
        for index, row in enumerate(self.rows):
            try:
                text = canonical(row)
            except (ValueError, RecursionError, TypeError) as error:
                raise DataError(
                    f"row {index} of {self.source} (counted from 0) cannot be written down: {in_words(error)}; give it plain"
                    " lists and dicts with text as keys"
                ) from error
            digest.update(text.encode(errors="surrogatepass") + b"\n")
        return digest.hexdigest()


def nearest(name: str, known: Iterable[str]) -> str:
    """The half sentence that helps after a misspelt name: the closest known one, else what there is."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; the nearest is {close[0]!r}"
    return f"; there is {', '.join(map(repr, names[:20]))}" if names else ""


def canonical(value: Any) -> str:
    """One text for equal values: JSON with sorted keys; what JSON has no form for as its `repr`."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=repr)


def fresh(value: Any) -> Any:
    """A copy of a row's dicts and lists, for code of the user's that may change what it is given."""
    if isinstance(value, Mapping):
        return {key: fresh(item) for key, item in value.items()}
    return [fresh(item) for item in value] if isinstance(value, list) else value


def not_text(text: str) -> str | None:
    """What is wrong with a string that holds half a character, as `\\ud800` alone; no tokenizer and no file takes it."""
    if is_text(text):
        return None
    place, half = next((i, c) for i, c in enumerate(text) if not is_text(c))
    return f"holds half a character ({half!a} at place {place}); remove it"


def load_rows(
    section: schema.Data,
    *,
    rows: Iterable[Mapping[str, Any]] | None = None,
    task: Task | None = None,
    seed: int = 0,
    key: str = "data.source",
    form: str = "prompts",
) -> Dataset:
    """The training rows of `data`: those given from Python, else the task's, else what `data.source` names.

    `seed` decides which rows a built-in task holds out; `key` is the recipe's, for messages; `form`: what each row must
    hold (prompts, answers or pairs). Raises DataError, which names the file, row or column.
    """
    if rows is not None:
        found, source = _from_python(rows), "the rows given from Python"
    elif task is not None:
        found, source = iter(task.rows(seed).train), f"task:{task.name}"
    else:
        found, source = _open(section.source, section.split, key), section.source
    try:
        kept = tuple(itertools.islice(found, section.max_rows))
    except OSError as error:
        raise DataError(f"{key}: {source} cannot be read ({error.strerror or error}); make it readable") from error
    if not kept:
        raise DataError(f"{source} has no rows; {key} must name at least one prompt")
    (_check_prompts if form == "prompts" else _check_recorded)(kept, source, section.prompt_column, form)
    return Dataset(kept, source, section.prompt_column, form)


def _open(source: str, split: str, key: str) -> Iterator[Mapping[str, Any]]:
    if not source:
        raise DataError(
            f"{key} is empty: name a .jsonl, .parquet or .csv file, a hub id or task:NAME, or give rows from Python"
        )
    path = Path(source).expanduser()
    if path.suffix in DATA_SUFFIXES or stands(path):
        if not stands(path) or not path.is_file():
            here = "is no file" if stands(path) else f"does not exist, or may not be read (looked from {Path.cwd()})"
            what = "is a folder" if stands(path) and path.is_dir() else here
            raise DataError(f"{key}: {source} {what}; name a .jsonl, .parquet or .csv file")
        readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".csv": _read_csv}
        if path.suffix not in readers:
            raise DataError(f"{key}: {source} ends in {path.suffix!r}; files of rows are .jsonl, .parquet or .csv")
        return readers[path.suffix](path)
    if is_hub_id(source.partition(":")[0]):
        return _read_hub(source, split, key)
    raise DataError(f"{key}: {source!r} is no file that exists, no hub id (owner/name) and no task:NAME")


def _from_python(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    if isinstance(rows, (str, bytes, Mapping)):
        raise DataError(
            f"data: rows from Python must be an iterable of dicts with a prompt, got a {type(rows).__name__}"
        )
    for index, row in enumerate(_iterated(rows)):
        if not isinstance(row, Mapping):
            raise DataError(
                f"row {index} of the rows given from Python is a {type(row).__name__}, not a dict with a prompt: {row!r:.80}"
            )
        if odd := [name for name in row if not isinstance(name, str)]:
            raise DataError(
                f"row {index} of the rows given from Python has the column {in_short(odd[0])}: name it by a text"
            )
        yield dict(row)


def _iterated(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The rows of an iterable of the user's; what it raises is told with the number of the row."""
    count = 0
    try:
        for row in rows:
            yield row
            count += 1
    except Exception as error:
        raise DataError(
            f"the rows given from Python ended at row {count} (counted from 0): {in_words(error)}"
        ) from error


def _read_jsonl(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if not text:
                    continue
                row = json.loads(text)
            except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, brackets without end
                raise DataError(f"{path}, line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number} is a {type(row).__name__}; each line must be one JSON object")
            yield row


def _read_csv(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            if twice := [name for name, count in Counter(reader.fieldnames or ()).items() if count > 1]:
                raise DataError(f"{path} has two columns {twice[0]!r} in its header; give each a name of its own")
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(
                        f"{path}, line {reader.line_num} has another number of fields than the header"
                        f" ({len(reader.fieldnames or [])}); put text with commas or line breaks in double quotes"
                    )
                yield row
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(
                f"{path}, line {reader.line_num + 1} is not CSV: {error}; .jsonl has no such limits"
            ) from error


def _read_parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    parquet = _extra("pyarrow.parquet", f"reading {path}")
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def _read_hub(source: str, split: str, key: str) -> Iterator[Mapping[str, Any]]:
    datasets = _extra("datasets", f"loading {source!r} from the hub (there is no such file)")
    name, _, subset = source.partition(":")
    try:
        rows = datasets.load_dataset(name, subset or None, split=split)
    except Exception as error:  # the library raises many kinds; the user needs its words and ours
        raise DataError(
            f"{key}: {source!r} is no file that exists, and the hub did not give it"
            f" (split {split!r}): {type(error).__name__}: {error}"
        ) from error
    return (dict(row) for row in rows)


def _extra(module: str, purpose: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{purpose} needs the package {module.partition('.')[0]}; {EXTRA}") from error


def _check_recorded(rows: Sequence[Mapping[str, Any]], source: str, column: str, form: str) -> None:
    for index, row in enumerate(rows):
        try:
            exchanges(row, form, column)
        except ValueError as error:
            raise DataError(f"row {index} of {source} (counted from 0) {error}") from error


def _check_prompts(rows: Sequence[Mapping[str, Any]], source: str, column: str, form: str) -> None:
    for index, row in enumerate(rows):
        if column not in row:
            raise DataError(_missing_column(source, index, column, [str(name) for name in row]))
        problem = _prompt_problem(row[column])
        if problem:
            raise DataError(f"row {index} of {source} (counted from 0): column {column!r} {problem}")


def _missing_column(source: str, index: int, column: str, columns: list[str]) -> str:
    return (
        f"row {index} of {source} (counted from 0) has no column {column!r}{nearest(column, columns)}"
        " (data.prompt_column names the column with the prompt)"
    )


def _prompt_problem(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return not_text(prompt) if prompt.strip() else "is empty; remove the row or give it a prompt"
    if not isinstance(prompt, Sequence):
        return f"must be text or a list of chat messages, got {type(prompt).__name__}: {prompt!r:.80}"
    if not prompt:
        return "is an empty list of messages; remove the row or give it a prompt"
    for place, message in enumerate(prompt):
        problem = message_problem(message)
        if problem:
            return f"{problem} (message {place})"
    last = prompt[-1]
    if last["role"] == "assistant":
        return "ends with an assistant message, but the model's turn comes next; end with a user message"
    if not (last.get("content") or "").strip():
        return "ends with an empty message; remove the row or give it a prompt"
    return None


def message_problem(message: Any) -> str | None:
    """What is wrong with one chat message, as the end of a sentence."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return f"must hold messages like {{'role': 'user', 'content': 'text'}}, got {message!r:.80}"
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        return f"has a message whose content must be text, got {type(content).__name__}: {content!r:.80}"
    return not_text(message["role"] + (content or ""))
