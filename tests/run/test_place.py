"""Where ranks stand: what launchers say in the environment, and what does not fit together."""

from __future__ import annotations

import pytest

from miles.config.schema import Recipe
from miles.errors import ConfigError
from miles.run.place import Machines, Place, check_place


def recipe(shard: int, replicate: int = 1) -> Recipe:
    return Recipe.model_validate({"parallel": {"shard": shard, "replicate": replicate}})


def test_a_process_that_no_launcher_started_is_no_rank():
    assert Place.of({}) is None
    assert Place.of({"RANK": "1"}) is None


def test_a_rank_stands_where_torchrun_says():
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert Place.of(environ) == Place(rank=5, size=8, local=1, local_size=4)
    assert Place.of({"RANK": "0", "WORLD_SIZE": "2"}) == Place(0, 2, 0, 2)
    with pytest.raises(ConfigError, match="the environment variable RANK is 'one': it must be a whole number"):
        Place.of({"RANK": "one", "WORLD_SIZE": "2"})


def test_a_mesh_that_does_not_match_the_number_of_ranks_is_refused():
    check_place(Place(3, 4, 3, 4), recipe(2, 2))
    with pytest.raises(
        ConfigError,
        match=r"3 ranks were started .* the recipe is for 4 ranks \(parallel.shard = 2 x parallel.replicate = 2",
    ):
        check_place(Place(0, 3, 0, 3), recipe(2, 2))


def test_ranks_are_spread_evenly_over_machines():
    assert Machines.of(recipe(4), {}) == Machines(count=1, number=0, per_machine=4)
    several = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert Machines.of(recipe(4, 2), several) == Machines(count=2, number=1, per_machine=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"NNODES": "3"}, "NNODES = 3 machines cannot share 4 ranks"),
        ({"NNODES": "0"}, "NNODES = 0 machines cannot share 4 ranks"),
        ({"NODE_RANK": "2"}, "NODE_RANK = 2, but NNODES = 2: the machines are numbered from 0"),
        (
            {"MASTER_PORT": None},
            "NNODES = 2, but MASTER_PORT is not set: give every machine the address and a free port",
        ),
    ],
)
def test_machines_that_cannot_meet_are_refused(changes, message):
    given = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", **changes}
    with pytest.raises(ConfigError, match=message):
        Machines.of(recipe(4), {name: value for name, value in given.items() if value is not None})
