"""Tokenizers built on the spot, chat templates of the common kinds, and an engine that says what it is told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from miles.types import Completion, Sampling, VersionSpan

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BOS_TRIMS = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thoughts stay only in answers that follow the last message of a user, as in Qwen3.
FORGETS_THOUGHTS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last %}{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)
# Tool results in a row stand in one block.
GROUPS_TOOLS = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{% if loop.index0 == 0 or messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user{% endif %}\n<r>{{ m['content'] }}</r>"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "bos_trims": BOS_TRIMS,
    "forgets_thoughts": FORGETS_THOUGHTS,
    "no_system": NO_SYSTEM,
    "groups_tools": GROUPS_TOOLS,
    "none": None,
}
SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
PAD, BOS, EOS, START, END = range(5)


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """One token for each byte, after five special ones; `add_bos` and `add_eos` as the tokenizer's own habit."""

    def make(template: str = "none", *, add_bos: bool = False, add_eos: bool = False) -> PreTrainedTokenizerFast:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: index for index, token in enumerate((*SPECIAL, *alphabet))}
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        if add_bos or add_eos:
            single = f"{'<s> ' if add_bos else ''}$A{' </s>' if add_eos else ''}"
            tokenizer.post_processor = processors.TemplateProcessing(
                single=single, special_tokens=[("<s>", BOS), ("</s>", EOS)]
            )
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<s>",
            eos_token="<|im_end|>" if TEMPLATES[template] else "</s>",
            pad_token="<pad>",
            chat_template=TEMPLATES[template],
        )

    return make


@pytest.fixture
def make_completion() -> Callable[..., Completion]:
    """A completion of these ids, each with log-prob -0.5, from weights of version 3."""

    def make(ids: Sequence[int], stop_reason: str = "stop") -> Completion:
        return Completion(tuple(ids), (-0.5,) * len(ids), (VersionSpan(3, 0, len(ids)),), stop_reason)

    return make


@dataclass
class ScriptedEngine:
    """Answers call after call with the scripted lists of completions, and keeps what it was asked."""

    script: list[list[Completion]]
    asked: list[tuple[tuple[int, ...], Sampling, tuple[int, ...]]] = field(default_factory=list)

    async def generate(
        self, ids: Sequence[int], n: int, sampling: Sampling, seeds: Sequence[int], min_version: int = 0
    ) -> list[Completion]:
        self.asked.append((tuple(ids), sampling, tuple(seeds)))
        return self.script[len(self.asked) - 1]


@pytest.fixture
def make_engine() -> type[ScriptedEngine]:
    return ScriptedEngine
