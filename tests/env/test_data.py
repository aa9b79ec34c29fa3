from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path

import pytest

from miles.config.schema import Data
from miles.env.data import Dataset, load_rows
from miles.env.tasks import find
from miles.errors import DataError

ROWS = [{"prompt": "1 + 1 =", "answer": 2}, {"prompt": [{"role": "user", "content": "hi"}], "answer": 0}]


def write_jsonl(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl_gives_its_rows_in_order(tmp_path):
    data = load_rows(Data(source=write_jsonl(tmp_path / "a.jsonl", ROWS)))
    assert list(data) == ROWS
    assert data.columns == ["prompt", "answer"]
    assert data.prompt(0) == "1 + 1 ="


def test_jsonl_with_byte_order_mark_and_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n{"prompt": "b"}\n\n')
    assert [row["prompt"] for row in load_rows(Data(source=str(path)))] == ["a", "b"]


def test_csv_gives_text_columns(tmp_path):
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "answer"], ['say, "x"\nnow', "2"]])
    assert list(load_rows(Data(source=str(path)))) == [{"prompt": 'say, "x"\nnow', "answer": "2"}]


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")
def test_parquet_gives_its_rows(tmp_path):
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    chats = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]]
    parquet.write_table(pyarrow.table({"prompt": chats, "answer": [1, 2]}), path)
    assert list(load_rows(Data(source=str(path)))) == [
        {"prompt": chats[0], "answer": 1},
        {"prompt": chats[1], "answer": 2},
    ]
    assert len(load_rows(Data(source=str(path), max_rows=1))) == 1
    path.write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        load_rows(Data(source=str(path)))


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_parquet_without_the_extra_says_how_to_install_it(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"needs the package pyarrow.*miles-rl\[data\]"):
        load_rows(Data(source=str(tmp_path / "a.parquet")))


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="datasets is installed")
@pytest.mark.parametrize("source", ["someone/some-data", "someone/some-data:main"])
def test_hub_id_without_the_extra_says_how_to_install_it(source):
    with pytest.raises(DataError, match=r"needs the package datasets.*miles-rl\[data\]"):
        load_rows(Data(source=source))


def test_rows_from_python_are_read_once_and_only_as_far_as_max_rows():
    seen = []

    def endless():
        while True:
            seen.append(1)
            yield {"prompt": f"p{len(seen)}"}

    data = load_rows(Data(max_rows=3), rows=endless())
    assert [row["prompt"] for row in data] == ["p1", "p2", "p3"]
    assert len(seen) == 3


def test_a_task_brings_its_training_rows():
    data = load_rows(Data(), task=find("task:addition"), seed=1)
    assert data.source == "task:addition"
    assert list(data) == list(find("task:addition").rows(1).train)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', r"a.jsonl, line 2 is not JSON"),
        ('{"prompt": "a"}\n[1]\n', r"line 2 is a list; each line must be one JSON object"),
        ("\n", r"has no rows"),
        ('{"promt": "a"}\n', r"row 0 .* has no column 'prompt'; the nearest is 'promt'"),
        ('{"question": "a"}\n', r"no column 'prompt'; there is 'question' .*data.prompt_column"),
        ('{"prompt": "a"}\n{"prompt": "  "}\n', r"row 1 .*column 'prompt' is empty"),
        ('{"prompt": []}\n', r"row 0 .*empty list of messages"),
        ('{"prompt": 7}\n', r"row 0 .*must be text or a list of chat messages, got int: 7"),
        ('{"prompt": ["a"]}\n', r"must hold messages like .*got 'a' \(message 0\)"),
        ('{"prompt": [{"role": "user", "content": 3}]}\n', r"content must be text, got int: 3"),
        ('{"prompt": [{"role": "user", "content": " "}]}\n', r"ends with an empty message"),
        (
            '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
            r"ends with an assistant message",
        ),
    ],
)
def test_bad_jsonl_is_named(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        load_rows(Data(source=str(tmp_path / "a.jsonl")))


def test_bad_bytes_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match="line 2 is not JSON"):
        load_rows(Data(source=str(tmp_path / "a.jsonl")))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prompt,answer\na,1\nb\n", r"line 3 has another number of fields than the header \(2\)"),
        ("prompt,answer\na,1,2\n", r"line 2 has another number of fields"),
        ('prompt\n"a\n', r"is not CSV"),
        ("prompt\n" + "a" * 200_000 + "\n", r"field larger than field limit.*\.jsonl has no such limits"),
    ],
)
def test_bad_csv_is_named(tmp_path, content, message):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(DataError, match=message):
        load_rows(Data(source=str(tmp_path / "a.csv")))


def test_bad_sources_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "folder.csv").mkdir()
    cases = {
        "": "data.source is empty",
        str(tmp_path / "no.jsonl"): "does not exist",
        str(tmp_path / "folder.csv"): "is a folder",
        str(tmp_path / "a.txt"): r"ends in '.txt'; files of rows are .jsonl, .parquet or .csv",
        "../nowhere/data": "no file that exists, no hub id",
    }
    for source, message in cases.items():
        with pytest.raises(DataError, match=message):
            load_rows(Data(source=source))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("text", "must be an iterable of dicts"),
        ({"prompt": "a"}, "must be an iterable of dicts"),
        (["a"], r"row 0 of the rows given from Python is a str, not a dict with a prompt"),
        ([], "has no rows|have no rows"),
    ],
)
def test_bad_rows_from_python_are_named(rows, message):
    with pytest.raises(DataError, match=message):
        load_rows(Data(), rows=rows)


def test_an_assistant_message_with_tool_calls_needs_no_content():
    prompt = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [{}]},
        {"role": "tool", "content": "b"},
    ]
    assert len(load_rows(Data(), rows=[{"prompt": prompt}])) == 1


def test_content_hash_depends_on_contents_and_order_alone():
    one = Dataset(({"prompt": "a", "x": 1}, {"prompt": "b", "x": 2}), "one")
    same = Dataset(({"x": 1, "prompt": "a"}, {"prompt": "b", "x": 2}), "other")
    assert one.content_hash == same.content_hash
    assert one.content_hash != one.only([1, 0]).content_hash


def test_the_example_data_loads():
    data = load_rows(Data(source=str(Path(__file__).parents[2] / "examples" / "own_data.jsonl")))
    assert len(data) == 12
    assert all(isinstance(row["answer"], int) for row in data)


@pytest.mark.parametrize("prompt", ["a\ud800b", [{"role": "user", "content": "a\ud800b"}]])
def test_half_a_character_in_a_prompt_is_named(prompt):
    with pytest.raises(
        DataError, match=r"row 0 of .* column 'prompt' holds half a character \('\\ud800' at place \d\)"
    ):
        load_rows(Data(), rows=[{"prompt": prompt}])


def test_half_a_character_elsewhere_is_the_rewards_business():
    data = load_rows(Data(), rows=[{"prompt": "a", "answer": "\ud800"}])
    assert data.content_hash != load_rows(Data(), rows=[{"prompt": "a", "answer": "\ud801"}]).content_hash


def test_brackets_without_end_are_no_json(tmp_path):
    path = tmp_path / "deep.jsonl"
    path.write_text('{"prompt": "a", "x": ' + "[" * 100_000 + "\n")
    with pytest.raises(DataError, match="line 1 is not JSON"):
        load_rows(Data(source=str(path)))


def test_two_csv_columns_of_one_name_are_refused(tmp_path):
    path = tmp_path / "twice.csv"
    path.write_text("prompt,answer,answer\n1,2,3\n")
    with pytest.raises(DataError, match="has two columns 'answer' in its header"):
        load_rows(Data(source=str(path)))


def test_an_iterable_that_raises_midway_is_named_with_its_row():
    def rows():
        yield {"prompt": "a"}
        raise OSError("gone")

    with pytest.raises(DataError, match=r"ended at row 1 \(counted from 0\): OSError: gone"):
        load_rows(Data(), rows=rows())
    with pytest.raises(DataError, match=r"ended at row 0 .* not iterable"):
        load_rows(Data(), rows=5)


def test_a_column_without_a_text_as_name_is_refused():
    with pytest.raises(DataError, match="row 1 of the rows given from Python has the column 5: name it by a text"):
        load_rows(Data(), rows=[{"prompt": "a"}, {"prompt": "a", 5: 1}])


def test_a_row_without_an_end_is_named():
    row: dict = {"prompt": "a"}
    row["self"] = row
    with pytest.raises(DataError, match=r"row 0 of .* cannot be written down: ValueError: Circular reference"):
        _ = load_rows(Data(), rows=[row]).content_hash
