"""Versions over HTTP: whole and unaltered, or not at all; what has come is not asked for again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from miles.publish.fetch import TRIES, Fetcher, FetchError, FileFacts, Offer, sha256

CONTENT = bytes(range(256)) * 5000
NAME = "policy-v7.safetensors"


class Shelf:
    """Serves `files`; `body` makes the answer's, and every range that is asked for is remembered."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.asked = files, []
        self.body: Callable[[bytes], httpx2.SyncByteStream] = httpx2.ByteStream

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        assert request.headers["authorization"] == "Bearer secret"
        name, start = request.url.path.removeprefix("/"), int(request.headers["range"][6:-1])
        self.asked.append((name, start))
        if name not in self.files:
            return httpx2.Response(404, text="no such file")
        return httpx2.Response(206, stream=self.body(self.files[name][start:]))

    def offer(self, tmp_path: Path, name: str = NAME, keep: tuple[int, ...] = ()) -> Offer:
        facts = []
        for path, content in self.files.items():
            (tmp_path / "hashed").write_bytes(content)
            facts.append(FileFacts(path, len(content), sha256(tmp_path / "hashed")))
        return Offer("http://shelf", "secret", name, tuple(facts), keep)

    def fetcher(self, folder: Path) -> Fetcher:
        return Fetcher(folder, httpx2.MockTransport(self.answer))


class Breaks(httpx2.SyncByteStream):
    """The first bytes of a body, and then nothing more."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __iter__(self):
        yield self._content
        raise httpx2.ReadError("the connection was broken")


def broken_after(count: int) -> Callable[[bytes], httpx2.SyncByteStream]:
    return lambda content: Breaks(content[:count])


def test_a_file_comes_whole_and_is_not_taken_twice(tmp_path: Path) -> None:
    shelf = Shelf({NAME: CONTENT})
    fetcher = shelf.fetcher(tmp_path / "to")
    for _ in range(2):
        path = fetcher.fetch(shelf.offer(tmp_path))
        assert path == tmp_path / "to" / NAME
        assert path.read_bytes() == CONTENT
    assert shelf.asked == [(NAME, 0)]
    assert [each.name for each in (tmp_path / "to").iterdir()] == [NAME]


def test_an_adapter_is_a_folder_of_its_two_files(tmp_path: Path) -> None:
    shelf = Shelf({"policy-v7/adapter_config.json": b"{}", "policy-v7/adapter_model.safetensors": CONTENT})
    path = shelf.fetcher(tmp_path / "to").fetch(shelf.offer(tmp_path, "policy-v7"))
    assert sorted(each.name for each in path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert (path / "adapter_model.safetensors").read_bytes() == CONTENT


def test_a_broken_connection_goes_on_where_it_broke(tmp_path: Path) -> None:
    shelf = Shelf({NAME: CONTENT})
    shelf.body = broken_after(500_000)
    assert shelf.fetcher(tmp_path / "to").fetch(shelf.offer(tmp_path)).read_bytes() == CONTENT
    assert [start for _, start in shelf.asked] == [0, 500_000, 1_000_000]


def test_a_shelf_that_sends_nothing_is_given_up_and_the_next_try_goes_on(tmp_path: Path) -> None:
    shelf = Shelf({NAME: CONTENT})
    limits = iter([300_000] + [0] * TRIES)
    shelf.body = lambda content: broken_after(next(limits))(content)
    fetcher = shelf.fetcher(tmp_path / "to")
    with pytest.raises(FetchError, match="did not come from http://shelf: ReadError the connection was broken"):
        fetcher.fetch(shelf.offer(tmp_path))
    assert not (tmp_path / "to" / NAME).exists()
    shelf.body, shelf.asked = httpx2.ByteStream, []
    assert fetcher.fetch(shelf.offer(tmp_path)).read_bytes() == CONTENT
    assert shelf.asked == [(NAME, 300_000)]


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"x", b"x" + CONTENT[1:]])
def test_an_altered_file_is_refused_and_forgotten(tmp_path: Path, content: bytes) -> None:
    shelf = Shelf({NAME: CONTENT})
    offer = shelf.offer(tmp_path)
    shelf.files[NAME] = content
    fetcher = shelf.fetcher(tmp_path / "to")
    with pytest.raises(FetchError, match=r"came with SHA-256 [0-9a-f]{12} instead of"):
        fetcher.fetch(offer)
    assert not (tmp_path / "to" / NAME).exists()
    shelf.files[NAME], shelf.asked = CONTENT, []
    assert fetcher.fetch(offer).read_bytes() == CONTENT
    assert shelf.asked == [(NAME, 0)]  # from the beginning


def test_a_file_that_never_ends_is_refused(tmp_path: Path) -> None:
    shelf = Shelf({NAME: CONTENT})
    offer = shelf.offer(tmp_path)
    shelf.files[NAME] = CONTENT + b"more"
    with pytest.raises(FetchError, match=f"more than its {len(CONTENT)} bytes"):
        shelf.fetcher(tmp_path / "to").fetch(offer)


def test_a_version_that_is_gone_is_said_so(tmp_path: Path) -> None:
    shelf = Shelf({NAME: CONTENT})
    offer = shelf.offer(tmp_path)
    shelf.files.clear()
    with pytest.raises(FetchError, match=r"refused policy-v7\.safetensors with status 404"):
        shelf.fetcher(tmp_path / "to").fetch(offer)


def test_versions_that_are_not_needed_go_first(tmp_path: Path) -> None:
    shelf = Shelf({NAME: CONTENT})
    folder = tmp_path / "to"
    folder.mkdir()
    for version in (4, 5, 6):
        (folder / f"policy-v{version}.safetensors").write_bytes(b"old")
    (folder / ".policy-v3.safetensors.part").mkdir()
    (folder / "something else").touch()
    shelf.fetcher(folder).fetch(shelf.offer(tmp_path, keep=(6,)))
    assert sorted(each.name for each in folder.iterdir()) == ["policy-v6.safetensors", NAME, "something else"]


def test_a_disk_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shelf = Shelf({NAME: CONTENT})
    with pytest.raises(FetchError, match=r"policy-v7\.safetensors could not be written to .*file/to"):
        shelf.fetcher(tmp_path / "file" / "to").fetch(shelf.offer(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../policy-v7.safetensors"},
        {"name": "policy-v07.safetensors"},
        {"files": (FileFacts("../x", 1, "0" * 64),)},
        {"files": (FileFacts(NAME, -1, "0" * 64),)},
        {"files": (FileFacts(NAME, 1, "0" * 63 + "g"),)},
        {"files": ()},
        {"name": "policy-v7"},
        {"url": "file:///etc"},
    ],
)
def test_hostile_offers_are_refused(tmp_path: Path, change: dict) -> None:
    good = Shelf({NAME: CONTENT}).offer(tmp_path)
    assert Offer.parse(good.json()) == good
    with pytest.raises(FetchError):
        replace(good, **change)


@pytest.mark.parametrize("content", [None, [], {}, {"files": 3}, {"files": [{}], "keep": []}])
def test_offers_that_are_none_are_refused(content: object) -> None:
    with pytest.raises(FetchError, match="is not whole"):
        Offer.parse(content)
