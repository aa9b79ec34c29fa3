"""Models on the Hugging Face hub: which commit a name stands for, what the hub says about it, what is in the cache."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import HfApi, hf_hub_download, is_offline_mode, try_to_load_from_cache

# HTTPError is the client's own: which HTTP library it stands on differs between versions of huggingface_hub.
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from miles.errors import ModelError
from miles.learn import cache, tiny
from miles.learn.quiet import quiet

if TYPE_CHECKING:
    from miles.config.schema import Model

logger = logging.getLogger(__name__)

_COMMIT = re.compile(r"[0-9a-f]{40}")
WAYS_OUT = (
    f"Ways out: a folder with the model in it, the packaged model {cache.SMOLLM2!r}, or a hub id that this machine "
    "can reach or has downloaded before."
)


class Hub:
    """What Miles asks the hub before it loads a model. Raises what the hub's client raises."""

    @property
    def offline(self) -> bool:
        """Whether the user switched the hub off (HF_HUB_OFFLINE)."""
        return is_offline_mode()

    def files(self, name: str, revision: str | None) -> list[str]:
        """Names of the files of a model; one short try."""
        info = HfApi().model_info(name, revision=revision, timeout=10)
        return [file.rfilename for file in info.siblings or []]

    def config(self, name: str, revision: str | None) -> Path:
        """Download config.json. The cache notes at which commit the branch is, so that it alone can answer next time."""
        with quiet():
            return Path(hf_hub_download(name, "config.json", revision=revision))

    def cached_config(self, name: str, revision: str | None) -> Path | None:
        """config.json as this machine last saw it."""
        found = try_to_load_from_cache(name, "config.json", revision=revision)
        return Path(found) if isinstance(found, str) else None


def find_commit(section: Model, weights: bool, hub: Hub) -> tuple[str, bool]:
    """(commit, whether it is to be read from the cache alone) of the hub id `model.name`. Raises ModelError."""
    name, revision = section.name, section.revision
    if section.trust_remote_code and not _COMMIT.fullmatch(revision or ""):
        raise ModelError(
            f"model.trust_remote_code runs code that comes with {name!r}, and model.revision = {revision or 'none'} does "
            "not pin it: set model.revision to a commit of 40 hexadecimal digits that was read, or leave "
            "trust_remote_code out."
        )
    if hub.offline:
        return _from_cache(section, hub, "the hub is switched off (HF_HUB_OFFLINE)"), True
    try:
        files = hub.files(name, revision)
        if weights:
            check_weights(name, files)
        return hub.config(name, revision).parent.name, False
    except (HfHubHTTPError, HFValidationError) as error:
        if (problem := _refusal(section, error)) is not None:
            raise ModelError(problem) from error
        return _from_cache(section, hub, f"the hub answered with an error ({one_line(error)})"), True
    except (HTTPError, OSError) as error:
        return _from_cache(section, hub, f"the hub cannot be reached ({one_line(error)})"), True


def check_weights(name: str, files: Sequence[str]) -> None:
    """Refuse a model without safetensors. Raises ModelError."""
    if not any(file.endswith(".safetensors") for file in files):
        pickled = [file for file in files if file.endswith((".bin", ".pt", ".pth"))]
        what = f"its weights are pickled ({pickled[0]}) and Miles unpickles nothing" if pickled else "it has no weights"
        raise ModelError(
            f"model.name = {name!r}: {what}. Use a model with *.safetensors files (save_pretrained writes them)."
        )


def one_line(error: Exception, limit: int = 300) -> str:
    """An error's text on one line, not longer than a paragraph needs."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[:limit].rstrip() + " ..."


def _refusal(section: Model, error: Exception) -> str | None:
    """What is wrong with the name or the revision, by the hub's answer; None where the trouble is the hub's own."""
    name = section.name
    if isinstance(error, HFValidationError):
        return f"model.name = {name!r} is neither a folder nor a hub id: {one_line(error)} {WAYS_OUT}"
    if isinstance(error, GatedRepoError):
        return (
            f"model.name = {name!r} is gated: accept its terms on the hub and log in with `hf auth login`, or set "
            f"HF_TOKEN. {WAYS_OUT}"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"model.name = {name!r} is neither a folder here nor a model on the hub (or it is private and HF_TOKEN is "
            f"not set). {_hint(name)}{WAYS_OUT}"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"model.revision = {section.revision!r}: {name!r} has no such branch, tag or commit on the hub."
    if isinstance(error, EntryNotFoundError):
        return f"model.name = {name!r} has no config.json on the hub, so it is no model that transformers can load."
    return None


def _from_cache(section: Model, hub: Hub, reason: str) -> str:
    config = hub.cached_config(section.name, section.revision)
    if config is None:
        raise ModelError(
            f"model.name = {section.name!r} is no folder here, {reason}, and no copy of it is in the hub's cache on "
            f"this machine (HF_HOME). {_hint(section.name)}{WAYS_OUT}"
        )
    commit = config.parent.name
    logger.warning("%s: %s comes from the hub's cache on this machine, commit %s", reason, section.name, commit)
    return commit


def _hint(name: str) -> str:
    known = [cache.SMOLLM2, *(tiny.PREFIX + family for family in tiny.FAMILIES)]
    near = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {near[0]!r}? " if near else ""
