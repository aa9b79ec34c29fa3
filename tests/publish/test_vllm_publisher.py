"""What the publisher makes of servers that are slow, wrong, gone or late, and of versions that are still in use."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from safetensors.torch import load_file

from miles.engine.fleet import Fleet, Server
from miles.errors import EngineError, ServerFault
from miles.publish.canary import Tolerance
from miles.publish.carriers import FileCarrier, ShelfCarrier
from miles.publish.fetch import Fetcher, FetchError, Offer
from miles.publish.files import WeightFiles
from miles.publish.following import FollowingPublisher
from miles.publish.shelf import Shelf
from miles.publish.vllm import VllmPublisher
from miles.types import Canary, PolicyUpdate

IDS = (3, 5, 8)
CONFIG = {"r": 2, "lora_alpha": 4}


class FakeRoutes:
    """A server that "computes" one number: the mean of the tensor it has loaded, for each token."""

    def __init__(self) -> None:
        self.named, self.loaded, self.folders = "default", 0.0, {}
        self.calls: list[str] = []
        self.fault: ServerFault | None = None
        self.error_added = 0.0
        self.fetcher: Fetcher | None = None

    def __call__(self, url: str) -> FakeRoutes:
        return self

    def fetch(self, offer: Mapping[str, Any], size: int) -> Path:
        """As a service does; what it answers to an offer that it cannot take is a fault of its server."""
        self._call("fetch")
        assert self.fetcher is not None
        try:
            return self.fetcher.fetch(Offer.parse(offer))
        except FetchError as error:
            raise ServerFault(str(error)) from error

    def version(self) -> str:
        self._call("version")
        return self.named

    def name_version(self, version: str) -> None:
        self._call("name_version")
        self.named = version

    def prepare_weights(self) -> None:
        self._call("prepare_weights")

    def load_weights(self, file: Path, tensors: int, size: int, version: str) -> None:
        self._call("load_weights")
        assert file.stat().st_size == size
        self.loaded, self.named = float(load_file(file)["w"].mean()), version

    def load_adapter(self, version: int, folder: Path) -> None:
        self._call("load_adapter")
        assert json.loads((folder / "adapter_config.json").read_text()) == CONFIG
        self.folders[version] = float(load_file(folder / "adapter_model.safetensors")["w"].mean())

    def unload_adapter(self, version: int) -> None:
        self._call("unload_adapter")
        del self.folders[version]

    def adapters(self) -> list[int]:
        self._call("adapters")
        return sorted(self.folders)

    def logprobs(self, ids: Sequence[int], adapter_version: int | None = None) -> list[float]:
        self._call("logprobs")
        value = self.loaded if adapter_version is None else self.folders[adapter_version]
        return [value + self.error_added] * (len(ids) - 1)

    def close(self) -> None:
        return None

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fault is not None:
            raise self.fault


class Bench:
    """A publisher over fake servers."""

    def __init__(
        self, folder: Path, servers: int = 2, adapters: bool = False, shelf: Shelf | None = None, **keys: Any
    ) -> None:
        self.routes = [FakeRoutes() for _ in range(servers)]
        self.fleet = Fleet([Server(f"server {i}", str(i), 8) for i in range(servers)])
        self.lost: list[str] = []
        self.fleet.on_failure = lambda server: self.lost.append(server.name)
        self.adapters = adapters
        self.scored: list[threading.Thread] = []
        files = WeightFiles(folder, torch.float32, CONFIG if adapters else None)
        carrier = FileCarrier(files) if shelf is None else ShelfCarrier(files, shelf)
        self.publisher = VllmPublisher(
            self.fleet, carrier, lambda url: self.routes[int(url)], tolerance=Tolerance.of("fp32"), **keys
        )

    def publish(self, version: int, learner: float | None = None) -> None:
        """A version whose only number is its own; `learner`: what the learner computes instead."""
        tensors = {"w": torch.full((2,), float(version))}

        def logprobs() -> list[float]:
            self.scored.append(threading.current_thread())
            return [float(version) if learner is None else learner] * (len(IDS) - 1)

        adapter = (lambda: iter(tensors.items())) if self.adapters else None
        self.publisher.publish(PolicyUpdate(version, lambda: iter(tensors.items()), Canary(IDS, logprobs), adapter))

    @property
    def serving(self) -> list[int | None]:
        return [server.version if server.ready else None for server in self.fleet.servers]


@pytest.mark.parametrize("adapters", [False, True])
def test_every_server_is_compared_with_one_forward_of_the_learner_in_its_own_thread(
    tmp_path: Path, adapters: bool
) -> None:
    bench = Bench(tmp_path, adapters=adapters)
    bench.publish(1)
    bench.publish(2)
    assert bench.serving == [2, 2]
    assert bench.scored == [threading.main_thread()] * 2
    assert bench.publisher.worst_difference == 0.0
    assert all(routes.calls.count("logprobs") == 2 for routes in bench.routes)
    assert [routes.calls.count("prepare_weights") for routes in bench.routes] == [0 if adapters else 1] * 2


def test_without_verification_nothing_is_scored_and_a_wrong_server_serves(tmp_path: Path) -> None:
    bench = Bench(tmp_path, verify=False)
    bench.routes[0].error_added = 9.0
    bench.publish(1)
    assert bench.serving == [1, 1]
    assert bench.scored == []
    assert "logprobs" not in bench.routes[0].calls


def test_a_server_that_dies_does_not_stop_the_other_and_joins_later_at_the_newest_version(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.publish(1)
    bench.routes[1].fault = ServerFault("it was killed", gone=True)
    bench.publish(2)
    assert bench.serving == [2, None]
    assert bench.lost == ["server 1"]
    assert not bench.publisher.refresh(bench.fleet.servers[1])
    bench.routes[1] = FakeRoutes()  # started again
    assert bench.publisher.refresh(bench.fleet.servers[1])
    assert bench.serving == [2, 2]
    assert bench.routes[1].loaded == 2.0
    assert len(bench.scored) == 2  # the newcomer is compared with what the learner said then


def test_a_server_that_computes_something_else_is_held_back_until_it_agrees(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.routes[0].error_added = 0.5
    bench.publish(1)
    assert bench.serving == [None, 1]
    assert "by 0.5 nat on average" in bench.fleet.servers[0].reason
    assert bench.routes[0].named == "unverified-1"
    bench.routes[1].error_added = 0.5
    with pytest.raises(EngineError, match=r"could be published to no server: server 0: .* server 1: its log-prob"):
        bench.publish(2)
    bench.routes[0].error_added = bench.routes[1].error_added = 0.0
    bench.publish(3)
    assert bench.serving == [3, 3]


def test_an_error_of_the_learner_ends_the_publish(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def fails() -> list[float]:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        bench.publisher.publish(PolicyUpdate(1, lambda: iter([("w", torch.ones(2))]), Canary(IDS, fails)))
    assert bench.serving == [None, None]


def test_adapters_that_are_in_use_stay_and_others_go_with_their_files(tmp_path: Path) -> None:
    bench = Bench(tmp_path, servers=1, adapters=True, max_staleness=1)
    (server,) = bench.fleet.servers
    for version in (1, 2):
        bench.publish(version)
    server.using[1] += 1
    for version in (3, 4):
        bench.publish(version)
    assert sorted(bench.routes[0].folders) == [1, 3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy-v1", "policy-v3", "policy-v4"]
    server.using.clear()
    bench.publish(5)
    assert sorted(bench.routes[0].folders) == [4, 5]


def test_other_ranks_put_tensors_together_and_score_as_rank_0_does() -> None:
    calls: list[str] = []

    def tensors() -> Any:
        calls.append("weights")
        yield "w", torch.ones(1)

    def logprobs() -> list[float]:
        calls.append("canary")
        return [0.0, 0.0]

    update = PolicyUpdate(1, tensors, Canary(IDS, logprobs))
    FollowingPublisher(verify=True).publish(update)
    FollowingPublisher(verify=False).publish(update)
    assert calls == ["weights", "canary", "weights"]


@pytest.mark.parametrize("adapters", [False, True])
def test_services_without_a_common_disk_take_versions_off_the_shelf(tmp_path: Path, adapters: bool) -> None:
    shelf = Shelf(tmp_path / "here")
    bench = Bench(tmp_path / "here", adapters=adapters, shelf=shelf, max_staleness=1)
    for number, routes in enumerate(bench.routes):
        routes.fetcher = Fetcher(tmp_path / f"there-{number}")
    with shelf.serving("127.0.0.1:0"):
        for version in (1, 2):
            bench.publish(version)
        bench.routes[1].fault = ServerFault("it was killed", gone=True)
        for version in (3, 4, 5):
            bench.publish(version)
        assert bench.serving == [5, None]
        bench.routes[1] = FakeRoutes()  # another machine, in the middle: its disk is empty
        bench.routes[1].fetcher = Fetcher(tmp_path / "there-2")
        assert bench.publisher.refresh(bench.fleet.servers[1])
    assert bench.serving == [5, 5]
    end = "" if adapters else ".safetensors"
    assert sorted(path.name for path in (tmp_path / "there-0").iterdir()) == [f"policy-v{v}{end}" for v in (3, 4, 5)]
    assert [path.name for path in (tmp_path / "there-2").iterdir()] == [f"policy-v5{end}"]
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == [f"policy-v{v}{end}" for v in (4, 5)]


def test_a_version_that_was_altered_on_its_way_is_served_by_nobody(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "here")
    bench = Bench(tmp_path / "here", servers=1, shelf=shelf)

    def altered(request: httpx2.Request) -> httpx2.Response:
        content = bytearray((tmp_path / "here" / request.url.path.removeprefix("/")).read_bytes())
        content[-1] ^= 1
        return httpx2.Response(206, stream=httpx2.ByteStream(bytes(content)))

    bench.routes[0].fetcher = Fetcher(tmp_path / "there", httpx2.MockTransport(altered))
    with shelf.serving("127.0.0.1:0"):
        with pytest.raises(
            EngineError, match=r"published to no server: server 0: policy-v1.safetensors came with SHA-256"
        ):
            bench.publish(1)
        assert "load_weights" not in bench.routes[0].calls
        bench.routes[0].fetcher = Fetcher(tmp_path / "there")
        bench.publish(2)
    assert bench.serving == [2]
