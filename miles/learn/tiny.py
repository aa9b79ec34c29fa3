"""Tiny random models and their tokenizer, made on the spot: every code path of a real family in a fraction of a second."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from miles.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PREFIX = "tiny-random:"
UNTIED = "-untied"

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
SPECIAL = (PAD, BOS, EOS, UNK)
SYMBOLS = "0123456789 =+-*.,?:\nhigerlow"  # one token each; the letters spell higher, lower, high and low
WINDOW = 16  # tokens that a sliding layer sees: short enough that a test's rows end inside and outside of it
CONTEXT = 512


@dataclass(frozen=True)
class Family:
    """How one family is made tiny: its config class and the keys in which it differs from the others."""

    config: Callable[..., PreTrainedConfig]
    add_bos: bool  # whether the family's real tokenizers put BOS before a text
    keys: Mapping[str, Any]


_GROUPED = {"num_key_value_heads": 2, "head_dim": 16}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(LlamaConfig, True, _GROUPED),
        "qwen3": Family(Qwen3Config, False, _GROUPED),
        "mistral": Family(MistralConfig, True, {**_GROUPED, "sliding_window": WINDOW}),
        "gemma3": Family(
            Gemma3TextConfig,
            True,
            {
                **_GROUPED,
                "sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "full_attention"],
                "query_pre_attn_scalar": 16,
            },
        ),
        "gpt_neox": Family(GPTNeoXConfig, False, {}),
    }
)


def parse(name: str) -> tuple[str, bool]:
    """(family, tied) of `tiny-random:FAMILY` or `tiny-random:FAMILY-untied`. Raises ModelError."""
    family = name.removeprefix(PREFIX)
    tied = not family.endswith(UNTIED)
    family = family.removesuffix(UNTIED)
    if family not in FAMILIES:
        near = difflib.get_close_matches(family, FAMILIES, n=1)
        hint = f" (did you mean {PREFIX}{near[0]}?)" if near else ""
        raise ModelError(
            f"model.name = {name!r}: there is no tiny family {family!r}{hint}; the families are "
            f"{', '.join(FAMILIES)}, each also with {UNTIED} for an output head of its own"
        )
    return family, tied


def tiny_config(family: str, tied: bool = True, **overrides: Any) -> PreTrainedConfig:
    """The config of a tiny model: 2 layers, hidden size 64, 4 heads (2 for keys and values where the family has them).

    `overrides` are keys of the family's own config class. Sliding layers see `WINDOW` tokens; Gemma 3 has one sliding
    and one full layer.
    """
    keys: dict[str, Any] = {
        "vocab_size": len(SPECIAL) + len(SYMBOLS),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "tie_word_embeddings": tied,
    }
    return FAMILIES[family].config(**{**keys, **FAMILIES[family].keys, **overrides})


def tiny_model(family: str, tied: bool = True, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A tiny model with random fp32 weights, equal to the bit for equal arguments; in eval mode, on the CPU.

    The global random generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family, tied, **overrides), dtype=torch.float32)
    model.config.name_or_path = f"{PREFIX}{family}{'' if tied else UNTIED}"
    return model.eval()


def tiny_tokenizer(chat_template: str | None = None, *, add_bos: bool = True) -> PreTrainedTokenizerFast:
    """One token for each of `SYMBOLS`, and pad, bos, eos, unk before them; decoding gives back the text as it was.

    With `add_bos` a text that is encoded with special tokens starts with BOS. Other characters become unk.
    """
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *SYMBOLS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )
