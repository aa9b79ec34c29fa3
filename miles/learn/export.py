"""Writes a model as a plain Hugging Face folder that transformers and other tools load; whole, or not at all."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from miles.config.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, INSIDE, MARKER
from miles.config.adapters import HEAD as SAVED_HEAD
from miles.config.names import is_text
from miles.errors import BadInput, CheckpointError
from miles.learn import folders
from miles.learn.adapters import detach, layers_of, merged_weights, peft_config, peft_tensors
from miles.learn.critic import whole_weights
from miles.learn.parallel import whole
from miles.learn.quiet import quiet
from miles.learn.scorer import HEAD, scorer_head
from miles.learn.weightfiles import write_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    *,
    weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
    facts: Mapping[str, Any] | None = None,
    beside: Callable[[Path], None] | None = None,
) -> Path:
    """Write weights, config, generation config, tokenizer and chat template to `directory` and return it.

    `weights` (names of `model.state_dict()`, tied ones under any of their names) replaces the model's own, for masters
    that live elsewhere; pairs are taken one after the other, and what is taken is let go with each file. Floating-point
    tensors become `dtype`; None: as they are. Larger models are split into files of `max_shard_size`. `facts` (JSON) goes
    into the marker, see `read_marker`; `beside` writes further files into the folder. The live model, its config and the
    tokenizer are not changed.

    A folder that stands there is replaced only when Miles exported it and nothing in it has changed since; otherwise
    BadInput. Raises CheckpointError when the disk is full or cannot be written.
    """
    directory = Path(directory)

    def write(folder: Path) -> None:
        write_model(model, weights, dtype, max_shard_size, folder)
        _save_generation_config(model, folder)
        if beside is not None:
            beside(folder)

    return _publish(directory, tokenizer, facts, write)


def export_adapter(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    *,
    name: str = "actor",
    tensors: Mapping[str, Tensor] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write one adapter of the model as the folder that peft and engines load; rules for `directory` as with `export`.

    No base weights and no value head are in it. `tensors`, under peft's names, replace the model's own.
    """
    directory = Path(directory)
    found = dict(peft_tensors(model, name)) if tensors is None else dict(tensors)
    return _publish(directory, tokenizer, facts, _adapter_writer(found, peft_config(model, name)))


def save_trained(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    facts: Mapping[str, Any],
    *,
    writes: bool = True,
) -> None:
    """What was trained: the adapter where there is one, else the whole model.

    A scorer's adapter is added to its base, so that everything that reads sequence classifiers reads it; the adapter and the
    head alone stand beside it, for runs on the same base. On several ranks all of them call this, and put one tensor after the
    other together; the one that `writes` keeps what goes into one file in host memory.
    """
    layers = layers_of(model)
    adapter = {name: tensor.cpu() for name, tensor in _adapter_tensors(model, layers) if writes}
    if layers and model.can_generate():
        if writes:
            export_adapter(model, tokenizer, directory, tensors=adapter, facts=facts)
        return
    weights = iter(merged_weights(model, "actor") if layers else whole_weights(model))
    try:
        if writes:
            beside = _scorer_adapter(adapter, peft_config(model, "actor", HEAD)) if layers else None
            _export_plain(model, tokenizer, directory, weights, facts, beside)
    finally:
        for _ in weights:  # the other ranks go on to the end, also where writing has failed
            pass


def _export_plain(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    weights: Iterable[tuple[str, Tensor]],
    facts: Mapping[str, Any],
    beside: Callable[[Path], None] | None,
) -> None:
    """Exports the model without its adapters, which come back afterwards."""
    layers = layers_of(model)
    detach(model)
    try:
        export(model, tokenizer, directory, weights=weights, facts=facts, beside=beside)
    finally:
        for path, layer in layers.items():
            model.set_submodule(path, layer)


def _adapter_tensors(model: PreTrainedModel, layers: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    """Under peft's names; of a scorer with its head. Nothing where there are no adapters."""
    if not layers:
        return
    yield from peft_tensors(model, "actor")
    if not model.can_generate():
        yield SAVED_HEAD, whole(scorer_head(model).weight.detach())


def _adapter_writer(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        save_file(dict(tensors), folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        folders.write_json(folder / ADAPTER_CONFIG, config)

    return write


def _scorer_adapter(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Callable[[Path], None]:
    """Writes a scorer's adapter into a folder inside of the scorer's."""

    def write(folder: Path) -> None:
        inside = folder / INSIDE
        inside.mkdir()
        _adapter_writer(tensors, config)(inside)

    return write


def _publish(
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    facts: Mapping[str, Any] | None,
    write: Callable[[Path], None],
) -> Path:
    """The folder with what `write` writes and the tokenizer, sealed, whole or not at all."""
    check_target(directory)
    try:
        with folders.staged(directory) as partial, quiet():
            write(partial)
            _save_tokenizer(tokenizer, partial)
            folders.seal(partial, MARKER, facts=dict(facts or {}))
            if directory.exists() and any(directory.iterdir()):
                folders.replace(partial, directory)
            else:
                folders.publish(partial, directory)
        for leftover in folders.leftovers(directory.parent, re.escape(directory.name)):
            shutil.rmtree(leftover)
    except (OSError, SafetensorError) as error:
        full = folders.is_disk_full(error)
        way_out = "Free some space or choose another folder" if full else "Choose a folder that can be written"
        raise CheckpointError(f"the model could not be exported to {directory}: {error}. {way_out}.") from error
    return directory


def read_marker(directory: Path) -> dict[str, Any] | None:
    """The `facts` that an export was given; None when the folder is not an export of Miles."""
    return folders.read_facts(Path(directory), MARKER)


def check_target(directory: Path) -> None:
    """Raise BadInput when an export to `directory` would lose something of the user's, or cannot be written."""
    if not is_text(str(directory)):
        raise BadInput(f"cannot export to {str(directory)!a}: the name is not UTF-8. Choose another folder.")
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.is_dir() and (directory / MARKER).is_file():
        try:
            foreign = folders.strangers(directory, MARKER)
            problem = f"it holds {foreign[0]}, which Miles did not write" if foreign else None
            if problem is None:
                folders.verify(directory, MARKER)
        except folders.Damaged as error:
            problem = f"it was changed since Miles wrote it ({error})"
        if problem is None:
            return
    elif not directory.exists() and not directory.is_symlink():
        return
    else:
        problem = "it is there already and is not an export of Miles"
    raise BadInput(f"cannot export to {directory}: {problem}. Choose another folder, or move this one away.")


def _save_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """As it was loaded, word for word: also where transformers would not save it (temperature without do_sample)."""
    if model.can_generate():
        text = model.generation_config.to_json_string(use_diff=True)
        (folder / "generation_config.json").write_text(text, encoding="utf-8")


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    # Padding and truncation are settings of the last call that a fast tokenizer keeps; they are not part of it.
    tokenizer = copy.deepcopy(tokenizer)
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        backend.no_padding()
        backend.no_truncation()
    tokenizer.save_pretrained(folder)
