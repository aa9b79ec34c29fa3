"""Where a model's files are: a folder, the converted SmolLM2, or a hub id at one commit; and what may be run of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from transformers import PreTrainedConfig
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from miles.config.names import is_config_alone
from miles.errors import ModelError
from miles.learn import cache
from miles.learn.hub import WAYS_OUT, Hub, check_weights, find_commit

if TYPE_CHECKING:
    from miles.config.schema import Model


@dataclass(frozen=True)
class Source:
    """Where a model's files are: a folder, or a hub id at one commit."""

    place: str
    commit: str | None = None  # of the hub; None for folders
    offline: bool = False  # read from the hub's cache on this machine alone

    def arguments(self, section: Model) -> dict[str, Any]:
        """Keywords for every `from_pretrained` call of one load, so that all of them read the same files."""
        return {
            "revision": self.commit,
            "local_files_only": self.offline,
            "trust_remote_code": section.trust_remote_code,
            **({"code_revision": self.commit} if section.trust_remote_code and self.commit else {}),
        }

    def file(self, name: str) -> Path | None:
        """One file of the model on this machine, downloaded where it must be; None where the model has none of it."""
        if self.commit is None:
            path = Path(self.place) / name
            return path if path.is_file() else None
        try:
            return Path(hf_hub_download(self.place, name, revision=self.commit, local_files_only=self.offline))
        except EntryNotFoundError:
            return None


def locate(section: Model, weights: bool = True, hub: Hub | None = None) -> Source:
    """Find the files behind `model.name`, at one commit where they come from the hub.

    Without `weights` nothing is said about weight files. `model.revision` is for the hub: a folder is what it is.
    Raises ModelError.
    """
    name = section.name
    if name == cache.SMOLLM2:
        return Source(str(cache.smollm2_folder(weights)))
    if is_config_alone(name):
        if weights:
            raise ModelError(
                f"model.name = {name!r} is a config without weights: it can be planned (miles plan), not trained. Name the "
                "folder or the hub id of a model."
            )
        return Source(name)
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        _check_folder(name, folder, weights)
        return Source(str(folder))
    if not name or name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name:
        raise ModelError(f"model.name = {name!r}: there is no such folder. {WAYS_OUT}")
    commit, offline = find_commit(section, weights, hub or Hub())
    return Source(name, commit, offline)


def check_code(section: Model, source: Source) -> None:
    """Refuse code that `model.revision` does not pin, before any of it runs. Raises ModelError."""
    if not section.trust_remote_code:
        return
    files = {"revision": source.commit, "local_files_only": source.offline}
    config, _ = PreTrainedConfig.get_config_dict(source.place, **files)
    for places in (config.get("auto_map"), get_tokenizer_config(source.place, **files).get("auto_map")):
        for reference in re.findall(r"[^\s'\"\[\](){},:]+--", str(places or {})):
            if (repository := reference.removesuffix("--")) != source.place:
                raise ModelError(
                    f"model.name = {section.name!r} runs code of another repository, {repository!r}, which "
                    "model.revision does not pin: download both into one folder and name that."
                )


def _check_folder(name: str, folder: Path, weights: bool) -> None:
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model.name = {name!r}: the folder has no config.json, so it is no Hugging Face model. Name the folder "
            "that holds config.json, the tokenizer and *.safetensors files."
        )
    if weights:
        check_weights(name, [path.name for path in folder.iterdir()])
