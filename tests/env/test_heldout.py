from __future__ import annotations

import json

import pytest

from miles.config.schema import Data, Eval
from miles.env.data import Dataset, load_rows
from miles.env.heldout import split_held_out
from miles.env.tasks import find
from miles.errors import DataError


def numbered(n: int) -> Dataset:
    return Dataset(tuple({"prompt": f"p{i}", "answer": i} for i in range(n)), "numbers")


def prompts(data: Dataset) -> set[str]:
    return {row["prompt"] for row in data}


def test_rows_are_taken_out_of_the_training_data_by_content():
    train = Dataset((*numbered(40).rows, {"prompt": "p3", "answer": "again"}), "numbers")
    split = split_held_out(Eval(rows=6), Data(), train, seed=5)
    assert len(split.held_out) == 6
    assert not prompts(split.held_out) & prompts(split.train)
    assert prompts(split.held_out) | prompts(split.train) == prompts(train)
    assert "6 held-out rows taken out of numbers" in split.message


def test_the_choice_does_not_depend_on_the_order_of_rows_and_does_on_the_seed():
    train = numbered(40)
    turned = train.only(reversed(range(40)))
    choices = [prompts(split_held_out(Eval(rows=6), Data(), data, seed=5).held_out) for data in (train, turned)]
    assert choices[0] == choices[1]
    assert choices[0] != prompts(split_held_out(Eval(rows=6), Data(), train, seed=6).held_out)


def test_a_fifth_is_the_most_and_few_rows_are_not_split():
    split = split_held_out(Eval(rows=20), Data(), numbered(12))
    assert (len(split.train), len(split.held_out)) == (10, 2)
    assert "eval.rows asks for 20; a fifth" in split.message
    few = split_held_out(Eval(rows=20), Data(), numbered(4))
    assert (len(few.train), len(few.held_out)) == (4, 0)
    assert "no held-out evaluation: numbers has 4 distinct prompts" in few.message


def test_zero_rows_means_no_evaluation():
    split = split_held_out(Eval(rows=0), Data(), numbered(10))
    assert (len(split.train), len(split.held_out)) == (10, 0)


def test_a_given_file_is_removed_from_training_and_counted(tmp_path):
    file = tmp_path / "eval.jsonl"
    chat = [{"role": "user", "content": "p2"}]  # the same question as the text p2
    file.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("p1", chat, "new", "beyond eval.rows")))
    split = split_held_out(Eval(source=str(file), rows=3), Data(max_rows=2), numbered(10))
    assert len(split.held_out) == 3
    assert prompts(split.train) == {f"p{i}" for i in range(10)} - {"p1", "p2"}
    assert "2 rows of numbers are among them and are left out" in split.message


def test_nothing_left_to_train_on_is_an_error(tmp_path):
    file = tmp_path / "eval.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(3)))
    with pytest.raises(DataError, match="nothing is left to train on"):
        split_held_out(Eval(source=str(file)), Data(), numbered(3))


def test_whole_rows_are_compared_where_prompts_say_little():
    train = Dataset(tuple({"prompt": "play", "level": i} for i in range(30)), "games")
    split = split_held_out(Eval(rows=5), Data(), train, whole_rows=True)
    assert (len(split.train), len(split.held_out)) == (25, 5)


@pytest.mark.parametrize("name", ["addition", "arithmetic", "guess_number"])
def test_tasks_bring_held_out_rows_that_share_no_prompt(name):
    task = find(f"task:{name}")
    train = load_rows(Data(), task=task, seed=3)
    split = split_held_out(Eval(rows=20), Data(), train, task=task, seed=3)
    assert len(split.held_out) == 20
    assert len(split.train) == len(train)
    assert not prompts(split.train) & prompts(split.held_out)


def test_a_task_without_held_out_rows_has_no_evaluation():
    task = find("task:echo_digit")
    split = split_held_out(Eval(), Data(), load_rows(Data(), task=task), task=task)
    assert (len(split.train), len(split.held_out)) == (160, 0)
    assert "task:echo_digit has no held-out rows of its own" in split.message


def test_another_task_can_be_the_held_out_source():
    split = split_held_out(Eval(source="task:addition", rows=5), Data(), numbered(10))
    assert split.held_out.source == "task:addition"
    assert len(split.held_out) == 5


@pytest.mark.parametrize("source", ["no/such.jsonl", "task:no_such"])
def test_held_out_rows_that_do_not_exist_are_named_by_their_own_key(source):
    with pytest.raises(DataError, match=r"^eval.source: "):
        split_held_out(Eval(source=source), Data(), numbered(10), task=None, seed=0)
