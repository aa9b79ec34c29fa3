"""Models and tokenizers by name: a hub id, a folder, the packaged SmolLM2, or a tiny random model."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import HTTPError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from miles.errors import ModelError
from miles.kernels.products import use_fast_products
from miles.learn import tiny
from miles.learn.hub import WAYS_OUT, one_line
from miles.learn.locate import Source, check_code, locate
from miles.learn.quiet import quiet
from miles.learn.shards import Stored
from miles.learn.stream import stored_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from miles.config.schema import Model

# What transformers and the hub's client raise for files that are missing, foreign or broken.
_LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError, HTTPError)


def load_tokenizer(section: Model) -> PreTrainedTokenizerBase:
    """The model's tokenizer with its chat template. Reads no weights (SmolLM2's first conversion aside).

    Raises ModelError that names `model.name` and the ways out.
    """
    if section.name.startswith(tiny.PREFIX):
        family, _ = tiny.parse(section.name)
        return tiny.tiny_tokenizer(add_bos=tiny.FAMILIES[family].add_bos)
    source = locate(section, weights=False)
    with quiet(), _explained(section, "tokenizer"):
        check_code(section, source)
        return AutoTokenizer.from_pretrained(source.place, **source.arguments(section))


def load_config(section: Model) -> PreTrainedConfig:
    """The model's config, without its weights. Raises ModelError, also for models that Miles cannot train."""
    if section.name.startswith(tiny.PREFIX):
        return tiny.tiny_config(*tiny.parse(section.name))
    return _read_config(section, locate(section, weights=False))


def load_generation_config(section: Model) -> GenerationConfig | None:
    """The model's generation config, without its weights; None where it has none. Raises ModelError."""
    if section.name.startswith(tiny.PREFIX):
        tiny.parse(section.name)
        return None
    source = locate(section, weights=False)
    with quiet(), _explained(section, "generation config"):
        if (path := source.file(GENERATION_CONFIG_NAME)) is None:
            return None
        return GenerationConfig.from_pretrained(path.parent)


def load_model(section: Model, *, seed: int, device: str | torch.device = "cpu") -> PreTrainedModel:
    """The causal language model that `model.name` names: fp32, in eval mode, on `device`.

    `seed` makes tiny random models; others do not depend on it. Weights are read from safetensors only, and all of
    them must be there. Raises ModelError that names `model.name` and the ways out.
    """
    if section.name.startswith(tiny.PREFIX):
        family, tied = tiny.parse(section.name)
        model = tiny.tiny_model(family, tied, seed=seed)
        use_fast_products(model)
        return model.to(device)
    source = locate(section)
    _read_config(section, source)
    with quiet(), _explained(section, "model"):
        model, report = AutoModelForCausalLM.from_pretrained(
            source.place,
            dtype=torch.float32,
            use_safetensors=True,
            output_loading_info=True,
            **source.arguments(section),
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"model.name = {section.name!r}: {len(missing)} weights of {type(model).__name__} are not in its files "
            f"({missing[0]}, ...), so they would be random numbers. Use a complete causal language model."
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError(
            f"model.name = {section.name!r} comes with a PEFT adapter beside its weights: merge the adapter into the "
            "weights first, or name the base model."
        )
    model.config._commit_hash = source.commit  # where transformers too keeps it, if it keeps it
    use_fast_products(model)
    return model.eval().to(device)


def in_parts(section: Model) -> bool:
    """Whether the model has files that ranks can read a part of; tiny random ones are made on the spot."""
    return not section.name.startswith(tiny.PREFIX)


def open_model(section: Model) -> tuple[PreTrainedModel, dict[str, Stored]]:
    """The model on the meta device, without memory, and where its weights stand: for ranks that read a part each.

    Raises ModelError as `load_model` does, and for weights that can only be read whole.
    """
    if not in_parts(section):
        raise ModelError(f"model.name = {section.name!r} is made on the spot and has no files to read in parts.")
    source = locate(section)
    config = _read_config(section, source)
    with quiet(), _explained(section, "model"), torch.device("meta"):
        trust = section.trust_remote_code
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust)
    if (generation := load_generation_config(section)) is not None:
        model.generation_config = generation
    weights = stored_weights(model, source.file, section.name)
    model.config._commit_hash = source.commit
    use_fast_products(model)
    return model.eval(), weights


def weights_hash(model: torch.nn.Module, weights: Mapping[str, Stored] | None = None) -> str:
    """SHA-256 over names, types, shapes and bytes of all parameters and saved buffers, in the order of their names.

    A tensor with two names (a tied head) counts once, under the first. Equal models give equal hashes on every machine
    of one byte order. weights: of a model that has no memory (`open_model`); they are read one after the other.
    """
    digest = hashlib.sha256()
    seen: set[int] = set()
    named = model.state_dict(keep_vars=True)
    stored = {id(named[name]): found for name, found in (weights or {}).items()}
    for name, tensor in sorted(named.items()):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        values = stored[id(tensor)].full().to(tensor.dtype) if tensor.is_meta else tensor.detach().cpu()
        raw = values.contiguous().reshape(-1)
        if raw.numel():
            digest.update(raw.view(torch.uint8).numpy())
    return digest.hexdigest()


def end_token_ids(
    config: PreTrainedConfig, generation_config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, ...]:
    """Every token id that ends an answer, ascending: the union of what the three say, each a number, a list or nothing."""
    places = (generation_config, config, config.get_text_config(), tokenizer)
    found: set[int] = set()
    for place in places:
        value = getattr(place, "eos_token_id", None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return tuple(sorted(token for token in found if token >= 0))


def context_length(config: PreTrainedConfig) -> int | None:
    """Tokens that prompt and answer may have together; None where the architecture sets no limit."""
    text = config.get_text_config()
    for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length"):
        value = getattr(text, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def describe(model: PreTrainedModel, weights: Mapping[str, Stored] | None = None) -> dict[str, Any]:
    """What a run records about the model it starts from; JSON. weights: as in `weights_hash`."""
    parameters = list(model.parameters())  # tied ones once
    return {
        "architecture": type(model).__name__,
        "name": model.config.name_or_path,
        "commit": getattr(model.config, "_commit_hash", None),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "dtype": str(model.dtype).removeprefix("torch."),
        "tied": is_tied(model),
        "context": context_length(model.config),
        "weights_sha256": weights_hash(model, weights),
    }


def is_tied(model: PreTrainedModel) -> bool:
    """Whether the output head is the input embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embedding.weight


def _read_config(section: Model, source: Source) -> PreTrainedConfig:
    with quiet(), _explained(section, "config"):
        check_code(section, source)
        config = AutoConfig.from_pretrained(source.place, **source.arguments(section))
    name = section.name
    if config.is_encoder_decoder:
        raise ModelError(f"model.name = {name!r} is an encoder-decoder; Miles trains causal (decoder-only) models.")
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"model.name = {name!r} has quantised weights, which cannot be trained: use the model it was made from."
        )
    return config


@contextlib.contextmanager
def _explained(section: Model, what: str) -> Iterator[None]:
    """Turn what the libraries raise about a model into one paragraph; an error of Miles passes."""
    try:
        yield
    except _LOAD_ERRORS as error:
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"model.name = {section.name!r} comes with Python code of its own, which Miles does not run: read it, "
                "then set model.trust_remote_code = true and model.revision to the commit that was read."
            ) from error
        if "Unrecognized configuration class" in str(error):
            raise ModelError(
                f"model.name = {section.name!r} is not a causal language model ({one_line(error)})"
            ) from error
        raise ModelError(
            f"the {what} of model.name = {section.name!r} could not be loaded: {one_line(error)} {WAYS_OUT}"
        ) from error
