"""What a run asks of a Ray cluster, and what is refused before it is joined; no cluster is needed here."""

from __future__ import annotations

import socket

import pytest

from miles.config.load import load
from miles.config.schema import Recipe
from miles.errors import BadInput
from miles.run.cluster import asks_of, prepare


def recipe(**keys) -> Recipe:
    base = {"model.name": "tiny-random:llama", "data.source": "task:echo_digit", "algorithm.steps": 2}
    loaded = load([], {**base, "run.launcher": "ray", **{f"run.{key}": value for key, value in keys.items()}}, env={})
    assert not loaded.problems, loaded.problems
    return loaded.recipe


def test_a_role_asks_for_a_core_and_where_there_are_gpus_for_one() -> None:
    assert asks_of(recipe(), False) == {"learner": {"CPU": 1}, "collector": {"CPU": 1}, "buffer": {}}
    assert asks_of(recipe(), True)["learner"] == {"CPU": 1, "GPU": 1}
    assert asks_of(recipe(device="cpu"), True)["learner"] == {"CPU": 1}
    assert asks_of(recipe(device="cuda"), False)["collector"] == {"CPU": 1, "GPU": 1}


def test_what_the_recipe_asks_for_is_added_or_stands_instead() -> None:
    given = recipe(**{"resources.collector": ["CPU=4", "rollout=0.5"], "resources.learner": ["GPU=2"]})
    assert asks_of(given, True) == {
        "learner": {"CPU": 1, "GPU": 2},
        "collector": {"CPU": 4, "GPU": 1, "rollout": 0.5},
        "buffer": {},
    }


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("ray_address", "ray://head:10001", "run.ray_address = 'ray://head:10001' must look like HOST:PORT"),
        ("resources.learner", ["GPU"], "run.resources.learner holds 'GPU': write NAME=AMOUNT"),
        ("resources.buffer", ["CPU=1.5"], "a whole number, or a part of one"),
    ],
)
def test_malformed_keys(key: str, value, words: str) -> None:
    problems = load([], {"run.launcher": "ray", f"run.{key}": value}, env={}).problems
    assert any(words in problem for problem in problems), problems


def test_a_local_ray_has_a_token_of_its_own_and_tells_its_makers_nothing() -> None:
    one: dict[str, str] = {}
    other: dict[str, str] = {}
    prepare(one, None, pytest.fail)
    prepare(other, None, pytest.fail)
    assert one["RAY_AUTH_MODE"] == "token"
    assert one["RAY_USAGE_STATS_ENABLED"] == "0"
    assert len(one["RAY_AUTH_TOKEN"]) == 64
    assert one["RAY_AUTH_TOKEN"] != other["RAY_AUTH_TOKEN"]


def test_a_cluster_is_joined_with_a_token_or_by_an_explicit_word(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(BadInput, match="holds no token of that cluster"):
            prepare({}, address, pytest.fail)
        environ = {"RAY_AUTH_TOKEN": "t"}
        prepare(environ, address, pytest.fail)
        assert environ["RAY_AUTH_MODE"] == "token"
        said: list[str] = []
        prepare({"RAY_AUTH_MODE": "disabled"}, address, said.append)
        assert "can run programs on it as you" in said[0]


def test_an_address_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(BadInput, match=f"run.ray_address = {address} cannot be reached"):
        prepare({}, address, pytest.fail)
