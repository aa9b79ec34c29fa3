from __future__ import annotations

import threading

import pytest

from miles.env.tokens import Codec

PAD, BOS, EOS, START, END = range(5)


class PythonTokenizer:
    """A tokenizer without a Rust one inside: one id for each character, BOS before and EOS after a text."""

    eos_token_id = 1
    pad_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [ord(c) for c in text]
        return [0, *ids, 1] if add_special_tokens else ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(i) for i in ids if i > 1 or not skip_special_tokens)


@pytest.mark.parametrize(
    ("habits", "prefix"), [({}, []), ({"add_bos": True}, [BOS]), ({"add_bos": True, "add_eos": True}, [BOS])]
)
def test_a_whole_prompt_has_the_tokenizers_own_prefix_once_and_never_its_end(make_tokenizer, habits, prefix):
    codec = Codec(make_tokenizer(**habits))
    assert codec.encode_whole("hi") == prefix + codec.encode("hi")
    assert codec.encode_whole("<s>hi") == [BOS, *codec.encode("hi")]


def test_decode_gives_back_every_token(make_tokenizer):
    codec = Codec(make_tokenizer(add_bos=True))
    assert codec.decode(codec.encode_whole("é <|im_end|>1")) == "<s>é <|im_end|>1"


def test_truncation_and_padding_of_the_shared_tokenizer_do_not_reach_the_copy(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4, direction="left")
    tokenizer.backend_tokenizer.enable_padding(length=50)
    codec = Codec(tokenizer)
    assert len(codec.encode("a" * 20)) == 20
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 4  # left as it was


@pytest.mark.parametrize(
    ("ids", "content"),
    [([50, 60, EOS, PAD], (50, 60)), ([50, 60], (50, 60)), ([EOS], ()), ([50, EOS, 60, EOS], (50, EOS, 60))],
)
def test_all_end_tokens_at_the_end_are_taken_off_and_none_in_the_middle(make_tokenizer, ids, content):
    codec = Codec(make_tokenizer())
    assert codec.end_ids == {PAD, EOS}
    assert codec.without_end(ids, codec.end_ids) == content


def test_many_threads_get_the_ids_of_one_while_another_cuts_and_pads(make_tokenizer):
    tokenizer = make_tokenizer()
    codec = Codec(tokenizer)
    texts = [f"number {i} " * (1 + i % 40) for i in range(60)]
    alone = [codec.encode(text) for text in texts]
    wrong: list[object] = []
    stop = threading.Event()

    def encode() -> None:
        try:
            wrong.extend(text for text, ids in zip(texts, alone, strict=True) if codec.encode(text) != ids)
        except BaseException as error:
            wrong.append(error)

    def disturb() -> None:
        length = 1
        while not stop.is_set():
            length = length % 50 + 1
            tokenizer.backend_tokenizer.enable_truncation(length)

    disturber = threading.Thread(target=disturb)
    threads = [threading.Thread(target=encode) for _ in range(64)]
    disturber.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    disturber.join()
    assert wrong == []


def test_a_tokenizer_written_in_python_works_too():
    codec = Codec(PythonTokenizer())
    assert codec.prefix == (0,)
    assert codec.end_ids == {1}
    assert codec.encode_whole("ab") == [0, 97, 98]
    assert codec.decode([97, 98]) == "ab"
    assert codec.name == "the tokenizer"
