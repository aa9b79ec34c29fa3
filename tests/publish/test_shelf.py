"""A learner's shelf over real HTTP on loopback: to whoever has its token, and versions alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from miles.errors import BadInput
from miles.publish.fetch import Fetcher, FetchError
from miles.publish.shelf import Shelf

NAME = "policy-v3.safetensors"
CONTENT = bytes(range(256)) * 3000


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    folder = tmp_path / "from"
    (folder / "policy-v4").mkdir(parents=True)
    (folder / NAME).write_bytes(CONTENT)
    (folder / "policy-v4" / "adapter_config.json").write_text("{}")
    (folder / "policy-v4" / "adapter_model.safetensors").write_bytes(CONTENT)
    (folder / "secret.txt").write_text("not a version")
    (folder / "policy-v4" / "other.bin").write_text("not of an adapter")
    shelf = Shelf(folder)
    with shelf.serving("127.0.0.1:0"):
        yield shelf


def get(shelf: Shelf, path: str, **headers: str) -> httpx2.Response:
    with httpx2.Client(trust_env=False) as client:
        return client.get(f"{shelf.url}/{path}", headers=headers)


def bearer(shelf: Shelf, tmp_path: Path) -> dict[str, str]:
    return {"authorization": f"Bearer {shelf.offer(tmp_path / 'from' / NAME, ()).token}"}


def test_what_is_offered_can_be_taken(shelf: Shelf, tmp_path: Path) -> None:
    assert shelf.url.startswith("http://127.0.0.1:")
    fetcher = Fetcher(tmp_path / "to")
    path = fetcher.fetch(shelf.offer(tmp_path / "from" / NAME, ()))
    assert path.read_bytes() == CONTENT
    (tmp_path / "from" / "policy-v4" / "other.bin").unlink()
    path = fetcher.fetch(shelf.offer(tmp_path / "from" / "policy-v4", (3,)))
    assert (path / "adapter_model.safetensors").read_bytes() == CONTENT
    assert sorted(each.name for each in (tmp_path / "to").iterdir()) == ["policy-v3.safetensors", "policy-v4"]


def test_a_part_is_given_from_where_it_is_asked(shelf: Shelf, tmp_path: Path) -> None:
    answer = get(shelf, NAME, **bearer(shelf, tmp_path), range=f"bytes={len(CONTENT) - 5}-")
    assert (answer.status_code, answer.content) == (206, CONTENT[-5:])


def test_without_the_token_nothing_is_given(shelf: Shelf, tmp_path: Path) -> None:
    assert get(shelf, NAME).status_code == 401
    assert get(shelf, NAME, authorization="Bearer " + "0" * 64).status_code == 401
    offer = replace(shelf.offer(tmp_path / "from" / NAME, ()), token="0" * 64)
    with pytest.raises(FetchError, match="refused policy-v3.safetensors with status 401".replace(".", r"\.")):
        Fetcher(tmp_path / "to").fetch(offer)


@pytest.mark.parametrize(
    "path",
    [
        "secret.txt",
        "policy-v4",
        "policy-v4/other.bin",
        "..%2fetc",
        "policy-v4/..%2f..%2fsecret.txt",
        "policy-v9.safetensors",
        "",
    ],
)
def test_nothing_but_files_of_versions_is_given(shelf: Shelf, tmp_path: Path, path: str) -> None:
    assert get(shelf, path, **bearer(shelf, tmp_path)).status_code == 404


def test_a_shelf_whose_address_is_taken_says_so(shelf: Shelf, tmp_path: Path) -> None:
    taken = shelf.url.removeprefix("http://")
    with pytest.raises(BadInput, match="cannot be used"), Shelf(tmp_path).serving(taken):
        pass


def test_a_shelf_that_is_closed_answers_no_more(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(CONTENT)
    shelf = Shelf(tmp_path)
    with shelf.serving("127.0.0.1:0"):
        offer = shelf.offer(tmp_path / NAME, ())
    with pytest.raises(FetchError, match="did not come from"):
        Fetcher(tmp_path / "to").fetch(offer)
