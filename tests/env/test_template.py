from __future__ import annotations

import pytest

from miles.config.schema import Data
from miles.env.data import Dataset
from miles.env.template import Renderer, fit_prompts, preview
from miles.errors import DataError
from miles.learn.tiny import tiny_tokenizer

PAD, BOS, EOS, START, END = range(5)
CHAT = {"prompt": [{"role": "user", "content": "hi"}]}


def test_text_becomes_one_user_message_after_the_system_prompt(make_tokenizer):
    renderer = Renderer(make_tokenizer("chatml"), Data(system_prompt="Be brief."))
    prompt = renderer.prompt({"prompt": "1 + 1 ="})
    assert prompt.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1 =<|im_end|>\n<|im_start|>assistant\n"
    )
    assert renderer.codec.decode(prompt.ids) == prompt.text
    assert renderer.text({"prompt": "1 + 1 ="}) == prompt.text


@pytest.mark.parametrize("template", ["chatml", "bos_trims", "none"])
@pytest.mark.parametrize("add_bos", [False, True])
def test_exactly_one_bos_where_the_tokenizer_or_the_template_has_one(make_tokenizer, template, add_bos):
    renderer = Renderer(make_tokenizer(template, add_bos=add_bos, add_eos=True), Data())
    ids = renderer.prompt({"prompt": "hi"}).ids
    assert ids.count(BOS) == (1 if add_bos or template == "bos_trims" else 0)
    assert (ids[0] == BOS) == (BOS in ids)
    assert ids[-1] not in (EOS, END)  # the model is to go on


def test_the_tokens_of_a_chat_are_those_of_the_tokenizers_own_rendering(make_tokenizer):
    tokenizer = make_tokenizer("bos_trims", add_bos=True)
    own = tokenizer.apply_chat_template(CHAT["prompt"], add_generation_prompt=True, return_dict=False)
    assert list(Renderer(tokenizer, Data()).prompt(CHAT).ids) == own


def test_text_stays_text_where_the_recipe_or_the_tokenizer_says_so(make_tokenizer):
    assert Renderer(make_tokenizer("chatml"), Data(chat_template=False)).prompt({"prompt": "a"}).text == "a"
    assert Renderer(make_tokenizer(), Data()).prompt({"prompt": "a"}).text == "a"
    renderer = Renderer(make_tokenizer("chatml"), Data(chat_template=False))
    assert renderer.prompt(CHAT).text.startswith("<|im_start|>user")  # message lists always are rendered


def test_messages_without_a_template_are_an_error(make_tokenizer):
    with pytest.raises(DataError, match=r"a list of messages, and .* has no chat template"):
        Renderer(make_tokenizer(), Data()).prompt(CHAT)
    with pytest.raises(DataError, match=r"data.system_prompt needs a chat template"):
        Renderer(make_tokenizer(), Data(system_prompt="x"))


def test_a_prompt_that_is_already_rendered_is_refused(make_tokenizer):
    renderer = Renderer(make_tokenizer("chatml"), Data())
    with pytest.raises(DataError, match=r"already rendered.*data.chat_template = false"):
        renderer.prompt({"prompt": "<|im_start|>user\nhi<|im_end|>\n"})


def test_a_template_that_refuses_a_role_is_named(make_tokenizer):
    with pytest.raises(DataError, match=r"refuses messages with the roles system, user: System role not supported"):
        Renderer(make_tokenizer("no_system"), Data(system_prompt="x")).prompt({"prompt": "a"})


def test_a_system_message_of_the_row_wins_and_the_tasks_own_prompt_comes_last(make_tokenizer):
    row = {"prompt": [{"role": "system", "content": "row"}, {"role": "user", "content": "a"}]}
    tokenizer = make_tokenizer("chatml")
    assert "recipe" not in Renderer(tokenizer, Data(system_prompt="recipe")).text(row)
    assert "system\ntask" in Renderer(tokenizer, Data(), system_prompt="task").text({"prompt": "a"})
    assert "task" not in Renderer(tokenizer, Data(system_prompt="recipe"), system_prompt="task").text({"prompt": "a"})
    assert Renderer(make_tokenizer(), Data(), system_prompt="task").text({"prompt": "a"}) == "a"


def test_the_answer_has_no_end_tokens_and_a_truncated_one_keeps_all(make_tokenizer, make_completion):
    renderer = Renderer(make_tokenizer("chatml"), Data())
    text = renderer.codec.encode("5 6")
    assert renderer.answer(make_completion([*text, END, PAD])) == "5 6"
    assert renderer.answer(make_completion([*text, EOS], "length")) == "5 6</s>"
    assert renderer.answer(make_completion([*text, EOS]), stop_token_ids=(EOS,)) == "5 6"


def test_a_stop_string_stays_in_the_text_that_the_reward_sees(make_tokenizer, make_completion):
    renderer = Renderer(make_tokenizer(), Data())
    ids = renderer.codec.encode("4</answer>")
    assert renderer.answer(make_completion(ids)) == "4</answer>"


# --- the next turn ---------------------------------------------------------------------------------------------------


def turn_of(renderer, make_completion, prompt, answer, told, end=(END,), stop_reason="stop"):
    seen = renderer.prompt({"prompt": prompt})
    completion = make_completion([*renderer.codec.encode(answer), *end], stop_reason)
    return seen, completion, renderer.next_turn(seen, completion, told)


def test_the_next_turn_appends_to_the_ids_seen_and_equals_the_whole_rendering(make_tokenizer, make_completion):
    renderer = Renderer(make_tokenizer("chatml", add_bos=True), Data())
    seen, completion, turn = turn_of(renderer, make_completion, "a", "5", [{"role": "user", "content": "higher"}])
    assert turn.prompt.ids == seen.ids + completion.token_ids + turn.observed
    assert renderer.codec.decode(turn.observed) == "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    assert turn.prompt.ids == renderer.prompt({"prompt": list(turn.prompt.messages)}).ids


def test_an_answer_that_would_be_tokenised_in_another_way_keeps_its_ids(make_completion):
    # The tiny tokenizer decodes <unk>, which encodes to one token; "<", "u", ... are unknown on their own.
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    renderer = Renderer(tiny_tokenizer(template), Data())
    seen = renderer.prompt({"prompt": "1"})
    unk, five = renderer.codec.encode("z5")
    completion = make_completion([unk, five, unk])
    turn = renderer.next_turn(seen, completion, [{"role": "user", "content": "2"}])
    assert turn.prompt.ids[len(seen.ids) : len(seen.ids) + 3] == completion.token_ids


def test_a_truncated_answer_gets_its_end_from_the_template(make_tokenizer, make_completion):
    renderer = Renderer(make_tokenizer("chatml"), Data())
    _, _, turn = turn_of(renderer, make_completion, "a", "5", [{"role": "user", "content": "b"}], (), "length")
    assert turn.observed[0] == END
    assert turn.prompt.ids == renderer.prompt({"prompt": list(turn.prompt.messages)}).ids


@pytest.mark.parametrize(
    ("template", "answer", "end"),
    [
        ("bos_trims", " 5", (END,)),  # the template trims what the model said
        ("forgets_thoughts", "<think>x</think>5", (END,)),  # ... forgets its thoughts
        ("chatml", "5", (PAD,)),  # ... would have ended the answer with another token
    ],
)
def test_a_rendering_that_is_no_extension_begins_anew(make_tokenizer, make_completion, template, answer, end):
    renderer = Renderer(make_tokenizer(template), Data())
    _, _, turn = turn_of(renderer, make_completion, "a", answer, [{"role": "user", "content": "b"}], end)
    assert turn.observed is None
    assert turn.prompt.ids == renderer.prompt({"prompt": list(turn.prompt.messages)}).ids
    assert turn.prompt.ids.count(BOS) == (1 if template == "bos_trims" else 0)


def test_a_tool_result_keeps_the_thoughts_and_adds_no_think_tokens(make_tokenizer, make_completion):
    renderer = Renderer(make_tokenizer("forgets_thoughts"), Data())
    told = [{"role": "tool", "content": "42"}]
    seen, completion, turn = turn_of(renderer, make_completion, "a", "<think>x</think>call", told)
    assert turn.prompt.ids[: len(seen.ids) + len(completion.token_ids)] == seen.ids + completion.token_ids
    assert "think" not in renderer.codec.decode(turn.observed)


def test_tool_results_in_a_row_are_rendered_together(make_tokenizer, make_completion):
    renderer = Renderer(make_tokenizer("groups_tools"), Data())
    told = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    _, _, turn = turn_of(renderer, make_completion, "a", "two calls", told)
    assert renderer.codec.decode(turn.observed).count("<|im_start|>user") == 1
    assert turn.prompt.ids == renderer.prompt({"prompt": [*turn.prompt.messages[:-1], told[1]]} | {}).ids


def test_plain_text_goes_on_with_each_message_on_a_line_of_its_own(make_tokenizer, make_completion):
    renderer = Renderer(make_tokenizer(add_bos=True), Data())
    told = [{"role": "user", "content": "higher"}]
    seen, completion, turn = turn_of(renderer, make_completion, "1, 2, 3 ?", "1", told, (EOS,))
    assert turn.prompt.ids == seen.ids + completion.token_ids + turn.observed
    assert renderer.codec.decode(turn.prompt.ids) == "<s>1, 2, 3 ?1</s>\nhigher\n"


# --- lengths and preview ---------------------------------------------------------------------------------------------


def lengths(*counts: int) -> Dataset:
    return Dataset(tuple({"prompt": "a" * count} for count in counts), "rows")


def test_prompts_that_leave_no_room_are_dropped_and_listed(make_tokenizer):
    renderer = Renderer(make_tokenizer(), Data())
    section = Data(overlong_prompts="drop")
    kept, message = fit_prompts(lengths(10, 70, 64, 48), renderer, section, context=64, max_new_tokens=16)
    assert [len(row["prompt"]) for row in kept] == [10, 48]
    assert message == "2 of 4 prompts of rows are longer than 48 tokens: row 1 (70 tokens), row 2 (64 tokens); left out"


def test_prompts_that_leave_no_room_are_an_error_by_default(make_tokenizer):
    renderer = Renderer(make_tokenizer(), Data())
    with pytest.raises(DataError, match=r"longer than 48 tokens: row 1 \(70 tokens\).*overlong_prompts"):
        fit_prompts(lengths(10, 70), renderer, Data(), context=64, max_new_tokens=16)
    with pytest.raises(DataError, match=r"12 of 12 prompts .* and 2 more"):
        fit_prompts(lengths(*[70] * 12), renderer, Data(overlong_prompts="drop"), context=64, max_new_tokens=16)
    with pytest.raises(DataError, match=r"max_new_tokens = 64 leaves no room"):
        fit_prompts(lengths(1), renderer, Data(), context=64, max_new_tokens=64)


def test_the_recipes_limit_and_the_template_count(make_tokenizer):
    renderer = Renderer(make_tokenizer("chatml"), Data())
    rendered = len(renderer.prompt({"prompt": "a" * 10}).ids)
    for limit, fits in ((rendered, True), (rendered - 1, False)):
        section = Data(max_prompt_tokens=limit, overlong_prompts="drop")
        data = Dataset(({"prompt": "a" * 10}, {"prompt": "a"}), "rows")
        kept, message = fit_prompts(data, renderer, section, context=None, max_new_tokens=16)
        assert len(kept) == (2 if fits else 1)
        assert (message is None) == fits
    assert fit_prompts(data, renderer, Data(), context=None, max_new_tokens=16) == (data, None)


def test_preview_shows_what_the_model_sees(make_tokenizer):
    renderer = Renderer(make_tokenizer("chatml", add_bos=True), Data())
    shown = preview(Dataset(tuple({"prompt": p} for p in "abcd"), "rows"), renderer)
    assert shown == [f"<s><|im_start|>user\n{p}<|im_end|>\n<|im_start|>assistant\n" for p in "abc"]
