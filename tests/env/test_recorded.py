"""Rows with answers: what they must hold, and which of their tokens are trained."""

from __future__ import annotations

import pytest

from miles.config.schema import Data, Eval
from miles.env.answers import Answers, fit_answers
from miles.env.data import Dataset, load_rows
from miles.env.heldout import split_held_out
from miles.env.recorded import exchanges
from miles.env.template import Renderer
from miles.errors import DataError

PAD, BOS, EOS, START, END = range(5)
USER, TWO = {"role": "user", "content": "hi"}, {"role": "user", "content": "more"}


def reply(text):
    return {"role": "assistant", "content": text}


def answers(make_tokenizer, template="chatml", form="answers", scorer=False, add_bos=False, **data):
    section = Data(**data)
    tokenizer = make_tokenizer(template, add_bos=add_bos)
    renderer = Renderer(tokenizer, section)
    return Answers(renderer, section, form, (tokenizer.eos_token_id,), scorer=scorer)


def trained(made, row):
    """Of each segment the text with the trained tokens in brackets."""
    return made.shown(row)


def test_every_assistant_turn_is_trained_with_its_end_token_and_nothing_else(make_tokenizer):
    row = {"messages": [{"role": "system", "content": "s"}, USER, reply("yo"), TWO, reply("bye")]}
    assert trained(answers(make_tokenizer), row) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[yo<|im_end|>]]\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n[[bye<|im_end|>]]\n"
    )
    (sample,) = answers(make_tokenizer).samples(row, version=3)
    (segment,) = sample.segments
    assert segment.num_trained == len("yo") + 1 + len("bye") + 1
    assert {v for v, m in zip(segment.versions, segment.loss_mask, strict=True) if m} == {3}
    assert set(segment.behavior_logprobs) == {0.0}
    assert (sample.text, sample.reward, sample.stop_reason) == ("yo\nbye", 1.0, "stop")


def test_the_ids_are_those_of_one_rendering_of_the_whole_conversation(make_tokenizer):
    tokenizer = make_tokenizer("bos_trims", add_bos=True)
    messages = [USER, reply("yo"), TWO, reply("bye")]
    made = answers(make_tokenizer, "bos_trims", add_bos=True)
    (segment,) = made.samples({"messages": messages})[0].segments
    assert list(segment.token_ids) == tokenizer.apply_chat_template(messages, return_dict=False)
    assert segment.token_ids.count(BOS) == 1


def test_the_prompt_is_encoded_as_it_will_be_when_the_model_samples(make_tokenizer):
    section = Data(system_prompt="Be brief.")
    renderer = Renderer(make_tokenizer("chatml"), section)
    made = Answers(renderer, section, "answers", (END,))
    row = {"prompt": "1 + 1 =", "completion": "2"}
    (segment,) = made.samples(row)[0].segments
    prompt = renderer.prompt(row).ids
    assert segment.token_ids[: len(prompt)] == prompt
    assert segment.loss_mask == (False,) * len(prompt) + (True, True, False)
    assert made.prompt_text(row) == renderer.text(row)


def test_a_template_that_forgets_gives_a_segment_for_each_turn(make_tokenizer):
    """The first answer is learnt with its thought, and the second one after a history without it, as it will be seen."""
    row = {"messages": [USER, reply("<think>a</think>b"), TWO, reply("c")]}
    made = answers(make_tokenizer, "forgets_thoughts")
    assert trained(made, row) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[<think>a</think>b<|im_end|>]]\n\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n"
        "<|im_start|>assistant\n[[c<|im_end|>]]\n"
    )
    assert len(made.samples(row)[0].segments) == 2


@pytest.mark.parametrize("completion", ["7 8", "7 8</s>"])
def test_plain_text_ends_with_exactly_one_end_token(make_tokenizer, completion):
    made = answers(make_tokenizer, "none", add_bos=True)
    (segment,) = made.samples({"prompt": "a b ", "completion": completion})[0].segments
    assert segment.token_ids[0] == BOS
    assert segment.token_ids.count(EOS) == 1
    assert segment.token_ids[-1] == EOS
    assert segment.loss_mask == (False,) * 5 + (True,) * 4


def test_tool_results_and_earlier_turns_of_a_prompt_are_not_trained(make_tokenizer):
    prompt = [USER, reply("earlier"), TWO]
    made = answers(make_tokenizer, "groups_tools")
    completion = [reply("call"), {"role": "tool", "content": "42"}, reply("42!")]
    shown = trained(made, {"prompt": prompt, "completion": completion})
    assert "[[call<|im_end|>]]" in shown
    assert "[[42!<|im_end|>]]" in shown
    assert shown.count("[[") == 2


def test_a_scorer_reads_the_whole_conversation_and_has_one_place_after_it(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    row = {"prompt": "q", "chosen": "good", "rejected": "bad", "margin": 2}
    made = answers(make_tokenizer, form="pairs", scorer=True)
    chosen, rejected = made.samples(row)
    whole = tokenizer.apply_chat_template([{"role": "user", "content": "q"}, reply("good")], return_dict=False)
    assert list(chosen.segments[0].token_ids[:-1]) == whole
    assert chosen.segments[0].loss_mask == (False,) * len(whole) + (True,)
    assert (chosen.reward, rejected.reward) == (1.0, 0.0)
    assert chosen.extras == rejected.extras == {"margin": 2.0}
    assert made.length(row) == len(whole)
    assert made.last_tokens() == {whole[-1], END}
    assert answers(make_tokenizer, "none", form="pairs", scorer=True).last_tokens() == {EOS}


def test_pairs_of_whole_conversations_share_their_prompt():
    chosen = [USER, reply("a"), TWO, reply("b")]
    one, two = exchanges({"chosen": chosen, "rejected": [*chosen[:3], reply("c")]}, "pairs", "prompt")
    assert one.prompt == two.prompt == tuple(chosen[:3])
    assert (one.answer, two.answer) == ((reply("b"),), (reply("c"),))
    longer = exchanges({"chosen": chosen[:2], "rejected": chosen}, "pairs", "prompt")
    assert [e.answer for e in longer] == [(reply("a"),), tuple(chosen[1:])]


def test_pairs_of_plain_texts(make_tokenizer):
    made = answers(make_tokenizer, form="pairs", scorer=True)
    chosen, _ = made.samples({"chosen": "good", "rejected": "bad"})
    assert chosen.segments[0].token_ids[-2] == END
    assert len(chosen.segments[0].token_ids) == len("good") + 2


SAME = [USER, reply("x")]


@pytest.mark.parametrize(
    ("form", "row", "words"),
    [
        ("answers", {"prompt": "a"}, "has no column 'completion': it needs `messages`, or 'prompt' and `completion`, and has 'prompt'"),
        ("answers", {"question": "a", "completion": "b"}, "has no column 'prompt'"),
        ("answers", {"prompt": "a", "completion": " "}, "has an empty answer under 'completion'"),
        ("answers", {"prompt": "a", "completion": 7}, "must have text or a list of chat messages under 'completion', got 7"),
        ("answers", {"messages": [USER]}, "has no assistant message under 'messages'"),
        ("answers", {"messages": [USER, reply("")]}, "has an empty assistant message under 'messages'"),
        ("answers", {"messages": "text"}, "has a text under 'messages'"),
        ("answers", {"messages": [{"role": "user"}]}, "whose content is no text under 'messages' (message 0)"),
        ("pairs", {"prompt": "a", "chosen": "b"}, "has no column 'rejected': it needs `chosen` and `rejected`"),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "b"}, "equals the rejected one"),
        ("pairs", {"chosen": SAME, "rejected": SAME}, "equals the rejected one"),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": ""}, "has an empty answer under 'rejected'"),
        ("pairs", {"chosen": SAME, "rejected": "b"}, "a text on one side and messages on the other"),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": -1}, "has margin = -1"),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, "must be a number of at least 0"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named(form, row, words):
    good = {"prompt": "a", "completion": "b", "chosen": "c", "rejected": "d"}
    with pytest.raises(DataError) as error:
        load_rows(Data(), rows=[good, row], form=form)
    assert str(error.value).startswith("row 1 of the rows given from Python (counted from 0) ")
    assert words in str(error.value)


def test_answers_that_become_the_same_tokens_are_refused(make_tokenizer):
    made = answers(make_tokenizer, "bos_trims", form="pairs", scorer=True)
    with pytest.raises(DataError, match="become the same tokens"):
        made.samples({"prompt": "q", "chosen": "a", "rejected": "a "})


def test_rendered_text_and_mixed_forms_are_refused(make_tokenizer):
    made = answers(make_tokenizer)
    with pytest.raises(DataError, match="already rendered"):
        made.samples({"prompt": "<|im_start|>user\nhi<|im_end|>\n", "completion": "a"})
    with pytest.raises(DataError, match="plain text and its answer chat messages"):
        answers(make_tokenizer, "none").samples({"prompt": "q", "completion": [reply("a")]})


def test_overlong_rows_are_refused_or_left_out(make_tokenizer):
    rows = ({"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": "a" * 50})
    data = Dataset(rows, "mine.jsonl", form="answers")
    made = answers(make_tokenizer)
    longest = made.length(rows[0])
    with pytest.raises(DataError, match=r"1 of 2 rows of mine.jsonl are longer than .*: row 1 \(.*data.max_row_tokens"):
        fit_answers(data, made, Data(max_row_tokens=longest), context=None)
    with pytest.raises(DataError, match="1 of 2 rows"):
        fit_answers(data, made, Data(), context=longest)
    kept, note = fit_answers(data, made, Data(max_row_tokens=longest, overlong_prompts="drop"), context=9999)
    assert kept.rows == rows[:1]
    assert note is not None
    assert note.endswith("left out")


def test_held_out_rows_share_no_prompt_with_training_rows():
    rows = [{"messages": [{"role": "user", "content": str(i % 10)}, reply(str(i))]} for i in range(20)]
    train = load_rows(Data(), rows=rows, form="answers")
    split = split_held_out(Eval(rows=2), Data(), train)
    asked = [{row["messages"][0]["content"] for row in part} for part in (split.train, split.held_out)]
    assert len(split.held_out) == 2
    assert not asked[0] & asked[1]
    pairs = load_rows(
        Data(), rows=[{"prompt": str(i % 5), "chosen": f"{i}a", "rejected": "b"} for i in range(10)], form="pairs"
    )
    split = split_held_out(Eval(rows=1), Data(), pairs)
    assert (len(split.train), len(split.held_out)) == (8, 1)


def test_the_rows_of_the_tutorial_serve_all_three_of_its_parts():
    from miles.env.tasks import find

    task = find("task:courtesy")
    assert task is not None
    found = task.rows(0)
    assert (len(found.train), len(found.held_out)) == (144, 36)
    assert task.rows(0) == found != task.rows(1)
    assert not {row["prompt"] for row in found.train} & {row["prompt"] for row in found.held_out}
    for form in ("answers", "pairs", "prompts"):
        assert len(load_rows(Data(), task=task, form=form)) == 144
