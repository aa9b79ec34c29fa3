"""Takes a version's files from the learner's shelf to a folder that servers read, and puts them there only when they are whole.

Imports no torch: a service of servers on another machine does it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import httpx2

from miles.publish.versions import NAME, forget

ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors"}
TRIES = 4  # connections that may break in a row without a byte having come
SILENT_S = 15.0  # without a byte before a connection is said to be broken
_HASH = re.compile(r"[0-9a-f]{64}")


class FetchError(Exception):
    """A version that could not be had whole; one sentence."""


@dataclass(frozen=True)
class FileFacts:
    """One file of a version: its path below the shelf, its bytes, and their SHA-256."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Offer:
    """A version on a shelf: where, who may take it, what it is made of, and which older versions are still needed."""

    url: str  # of the shelf
    token: str
    name: str  # policy-v12, or policy-v12.safetensors
    files: tuple[FileFacts, ...]
    keep: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises FetchError for what no learner offers."""
        names = {self.name} if self.name.endswith(".safetensors") else {f"{self.name}/{each}" for each in ADAPTER_FILES}
        if (
            not NAME.fullmatch(self.name)
            or {file.path for file in self.files} != names
            or len(self.files) != len(names)
        ):
            raise FetchError(f"{self.name[:80]!r} is no version of a policy with its own files alone")
        if any(file.size < 0 or not _HASH.fullmatch(file.sha256) for file in self.files):
            raise FetchError(f"{self.name} is offered with a size or a hash that is none")
        if not self.url.startswith(("http://", "https://")):
            raise FetchError(f"{self.url[:80]!r} is no address of a shelf")

    @classmethod
    def parse(cls, content: Any) -> Self:
        """From JSON. Raises FetchError."""
        try:
            files = tuple(FileFacts(str(f["path"]), int(f["size"]), str(f["sha256"])) for f in content["files"])
            keep = tuple(int(version) for version in content["keep"])
            return cls(str(content["url"]), str(content["token"]), str(content["name"]), files, keep)
        except (KeyError, TypeError, ValueError) as error:
            raise FetchError(f"the offer of a version is not whole: {error!r}") from None

    def json(self) -> Mapping[str, Any]:
        return asdict(self)


class Fetcher:
    """Takes offers into one folder. Safe to call from several threads: a version is taken once."""

    def __init__(self, folder: Path, transport: httpx2.BaseTransport | None = None) -> None:
        """`transport`: None connects to the shelf."""
        self._folder, self._transport = folder, transport
        self._one_at_a_time = threading.Lock()
        self._newest: tuple[FileFacts, ...] = ()  # whole and checked: each server behind a service asks for it

    def fetch(self, offer: Offer) -> Path:
        """The version's file or folder, whole and checked. Raises FetchError; what has come stays for the next try."""
        with self._one_at_a_time:
            try:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                forget(self._folder, {*offer.keep, int(NAME.fullmatch(offer.name)[1])})  # type: ignore[index]
                return self._fetch(offer)
            except OSError as error:
                raise FetchError(f"{offer.name} could not be written to {self._folder}: {error}") from error

    def _fetch(self, offer: Offer) -> Path:
        final = self._folder / offer.name
        if (final.exists() and offer.files == self._newest) or _holds(self._folder, offer):
            self._newest = offer.files
            return final
        partial = self._folder / f".{offer.name}.part"
        partial.mkdir(exist_ok=True)
        with httpx2.Client(transport=self._transport, timeout=SILENT_S, trust_env=False) as client:
            for file in offer.files:
                self._take(client, offer, file, partial / Path(file.path).name)
        if final.is_dir():
            shutil.rmtree(final)
        os.replace(partial / offer.name if offer.name.endswith(".safetensors") else partial, final)
        shutil.rmtree(partial, ignore_errors=True)
        self._newest = offer.files
        return final

    def _take(self, client: httpx2.Client, offer: Offer, file: FileFacts, place: Path) -> None:
        """One file, from where an earlier try ended."""
        tries = TRIES
        while tries:
            before = place.stat().st_size if place.exists() else 0
            if before >= file.size and place.exists():
                break
            try:
                _append(client, offer, file, place, before)
            except httpx2.HTTPError as error:
                came = place.exists() and place.stat().st_size > before
                tries = TRIES if came else tries - 1
                if not tries:
                    raise FetchError(
                        f"{file.path} did not come from {offer.url}: {type(error).__name__} {error}"
                    ) from error
        found = sha256(place)
        if (place.stat().st_size, found) != (file.size, file.sha256):
            place.unlink()
            raise FetchError(
                f"{file.path} came with SHA-256 {found[:12]} instead of {file.sha256[:12]}: it was altered on its way, or is another"
            )


def _append(client: httpx2.Client, offer: Offer, file: FileFacts, place: Path, have: int) -> None:
    headers = {"authorization": f"Bearer {offer.token}", "range": f"bytes={have}-"}
    with client.stream("GET", f"{offer.url}/{file.path}", headers=headers) as answer:
        if answer.status_code not in (200, 206):
            answer.read()
            raise FetchError(f"{offer.url} refused {file.path} with status {answer.status_code}: {answer.text[:200]}")
        # A shelf that does not know ranges begins anew.
        with place.open("ab" if answer.status_code == 206 else "wb") as out:
            written = out.tell()
            for piece in answer.iter_raw():
                written += len(piece)
                if written > file.size:
                    raise FetchError(f"{file.path} came with more than its {file.size} bytes")
                out.write(piece)


def _holds(folder: Path, offer: Offer) -> bool:
    return all(
        (place := folder / file.path).is_file() and place.stat().st_size == file.size and sha256(place) == file.sha256
        for file in offer.files
    )


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
