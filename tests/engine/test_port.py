"""What a port lets through: by token, by who has joined, by route and by body; and that nothing else reaches a server."""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from miles.engine.port import SILENT_S, Claim
from miles.engine.port_routes import ALLOWED
from miles.engine.vllm_routes import GENERATE, RUN_HEADER, Access, ServerRoutes
from miles.web.door import Refused

behind = sys.modules["miles_engine_behind"]
TOKEN = "0123456789abcdef0123"
JOINED = {RUN_HEADER: "run-1"}


@pytest.fixture
def stand_in() -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="miles-test-") as folder:
        server = behind.StandIn(Path(folder) / "s.sock")
        with server.serving():
            yield server


@pytest.fixture
def client(stand_in: Any, tmp_path: Path) -> Iterator[httpx2.Client]:
    """Of a run that has joined a port without tokens."""
    with (
        behind.port({"s": f"unix:{stand_in.socket}"}, tmp_path) as url,
        httpx2.Client(base_url=url, headers=JOINED) as client,
    ):
        assert client.post("/join", json={"run": "run-1"}).status_code == 200
        yield client


def adapter(folder: Path, name: str, *files: str) -> Path:
    (folder / name).mkdir()
    for file in files or ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name / file).touch()
    return folder / name


def test_a_token_opens_every_route_but_one_and_nothing_near_it_does(stand_in: Any, tmp_path: Path) -> None:
    with (
        behind.port({"s": f"unix:{stand_in.socket}"}, tmp_path, [TOKEN, TOKEN + "2"]) as url,
        httpx2.Client() as client,
    ):
        paths = [f"/servers/s{allowed.path}" for allowed in ALLOWED] + ["/join", "/leave", "/stay", "/servers/s/fetch"]
        near = [
            "",
            "Bearer",
            f"Bearer {TOKEN[:-1]}",
            f"Bearer {TOKEN}x",
            f"Basic {TOKEN}",
            TOKEN,
            f"Bearer {TOKEN.upper()}",
        ]
        for path in paths:
            for shown in near:
                for method in ("GET", "POST"):
                    answer = client.request(method, url + path, headers={"authorization": shown})
                    assert answer.status_code in (401, 405), (path, shown)
                    assert TOKEN not in answer.text
        assert stand_in.requests == []
        assert client.get(f"{url}/livez").status_code == 200
        for token in (TOKEN, TOKEN + "2"):
            answer = client.get(f"{url}/servers/s/health", headers={"authorization": f"bearer {token}"})
            assert answer.json() == {"fine": True}
        assert [request[1] for request in stand_in.requests] == ["/health", "/health"]


def test_without_a_token_only_this_machine_is_answered(client: httpx2.Client, stand_in: Any) -> None:
    assert client.get("/servers/s/health").status_code == 200
    assert client.get("/servers/s/health", headers={"host": "evil.example:80"}).status_code == 421
    assert len(stand_in.requests) == 1


def test_a_version_is_taken_for_the_run_that_has_the_servers(stand_in: Any, tmp_path: Path) -> None:
    taken = []

    def take(run: str, offer: bytes) -> Path:
        taken.append((run, offer))
        if offer == b"bad":
            raise Refused(424, "policy-v1 came with SHA-256 0 instead of 1")
        return tmp_path / run / "policy-v1"

    with (
        behind.port({"s": f"unix:{stand_in.socket}"}, tmp_path, take=take) as url,
        httpx2.Client(base_url=url) as client,
    ):
        assert client.post("/servers/s/fetch", content=b"{}", headers=JOINED).status_code == 409
        client.post("/join", json={"run": "run-1"})
        assert client.post("/servers/s/fetch", content=b"{}", headers={RUN_HEADER: "run-2"}).status_code == 409
        assert client.post("/servers/s/fetch", content=b"{}").status_code == 409
        assert client.post("/servers/s/fetch", content=b"x" * (1 << 17), headers=JOINED).status_code == 413
        assert taken == []
        with ServerRoutes(f"{url}/servers/s", Access(run="run-1")) as routes:
            assert routes.fetch({"name": "policy-v1"}, 10) == tmp_path / "run-1" / "policy-v1"
        assert taken == [("run-1", b'{"name":"policy-v1"}')]
        refused = client.post("/servers/s/fetch", content=b"bad", headers=JOINED)
        assert (refused.status_code, "came with SHA-256" in refused.text) == (424, True)
    assert stand_in.requests == []


REFUSED = (
    "collective_rpc", "sleep", "wake_up", "server_info", "v1/completions", "v1/chat/completions", "tokenize", "docs", "abort_requests",
    "openapi.json", "weight_checker", "shutdown_weight_transfer_engine", "invocations", "start_profile", "v1/files", "",
    "health/", "/health", "Health", "health%2f", "%68ealth", "health/../collective_rpc", "../join", "%2e%2e/join", "health;x",
    "metrics/../v1/completions", "v1//models", "pause%00", "v1%2Fmodels",
)  # fmt: skip


def test_routes_outside_of_the_list_reach_no_server(client: httpx2.Client, stand_in: Any) -> None:
    for path in REFUSED:
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
            connection = http.client.HTTPConnection(
                client.base_url.host, client.base_url.port
            )  # sends the path as it is
            connection.request(method, f"/servers/s/{path}", headers=JOINED)
            assert connection.getresponse().status in (404, 405), (method, path)
            connection.close()
    for allowed in ALLOWED:  # the other method of each
        other = "GET" if allowed.method == "POST" else "POST"
        assert client.request(other, f"/servers/s{allowed.path}").status_code == 404
    assert client.get("/servers/other/health").status_code == 404
    for query in ("mode=abort", "mode=keep&clear_cache=false", "x=1", "mode=keep&mode=abort"):
        assert client.post(f"/servers/s/pause?{query}").status_code == 400
    assert stand_in.requests == []
    assert client.post("/servers/s/pause?mode=keep&clear_cache=true").status_code == 200
    assert stand_in.requests == [("POST", "/pause", "mode=keep&clear_cache=true", b"")]


def test_names_of_adapters_are_those_of_a_policy(client: httpx2.Client, stand_in: Any, tmp_path: Path) -> None:
    path = str(adapter(tmp_path, "policy-v3"))
    names = [
        "policy-v-1",
        "policy-v01",
        "policy-v3 ",
        "policy-v3\n",
        "../policy-v3",
        "base",
        "",
        3,
        None,
        ["policy-v3"],
        "policy-v" + "9" * 40,
    ]
    for name in names:
        assert (
            client.post("/servers/s/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path}).status_code
            == 403
        )
        assert client.post("/servers/s/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 403
    assert stand_in.requests == []
    good = {"lora_name": "policy-v3", "lora_path": path}
    assert client.post("/servers/s/v1/load_lora_adapter", json=good).status_code == 200
    assert json.loads(stand_in.requests[0][3]) == good


def test_paths_of_weights_lie_below_the_folder_of_the_service(
    client: httpx2.Client, stand_in: Any, tmp_path: Path
) -> None:
    outside = Path(tempfile.mkdtemp(prefix="miles-test-"))
    adapter(outside, "policy-v1")
    (outside / "w.safetensors").touch()
    (tmp_path / "link").symlink_to(outside / "policy-v1")
    (tmp_path / "link.safetensors").symlink_to(outside / "w.safetensors")
    (tmp_path / "w.bin").touch()
    adapter(tmp_path, "pickled", "adapter_config.json", "adapter_model.bin")
    adapter(tmp_path, "both", "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
    adapters = [
        str(outside / "policy-v1"), f"{tmp_path}/../{outside.name}/policy-v1", str(tmp_path / "link"), str(tmp_path), "/", "policy-v1",
        "", "some/hub-id", str(tmp_path / "missing"), str(tmp_path / "pickled"), str(tmp_path / "both"), f"{tmp_path}/a\0b", 7, None,
    ]  # fmt: skip
    for path in adapters:
        body = {"lora_name": "policy-v1", "lora_path": path}
        assert client.post("/servers/s/v1/load_lora_adapter", json=body).status_code == 403, path
    files = [
        str(outside / "w.safetensors"),
        str(tmp_path / "link.safetensors"),
        str(tmp_path / "w.bin"),
        "/etc/passwd",
        str(tmp_path),
        1,
    ]
    for path in files:
        body = {"update_info": {"path": path, "tensors": 1, "size": 1}}
        assert client.post("/servers/s/update_weights", json=body).status_code == 403, path
    assert stand_in.requests == []
    good = tmp_path / "policy-v1.safetensors"
    good.touch()
    answer = client.post(
        "/servers/s/update_weights", json={"update_info": {"path": str(good), "tensors": 1, "size": 0}}
    )
    assert answer.status_code == 200


def test_bodies_hold_what_their_route_needs_and_nothing_else(
    client: httpx2.Client, stand_in: Any, tmp_path: Path
) -> None:
    bodies: list[tuple[str, Any]] = [
        ("/resume", {"x": 1}), ("/start_weight_update", {"method": "f"}), ("/finish_weight_update", {"weight_version": "9"}),
        ("/init_weight_transfer_engine", {"init_info": {"master_address": "h"}}), ("/init_weight_transfer_engine", {}),
        ("/update_weight_version", {"new_version": "default"}), ("/update_weight_version", {"new_version": 3}),
        ("/v1/load_lora_adapter", {"lora_name": "policy-v1", "lora_path": str(tmp_path), "load_inplace": True}),
        ("/update_weights", {"update_info": {"path": "/x", "tensors": 1, "size": 1, "serialized": "gASV"}}),
        ("/update_weights", [1]), ("/update_weights", "x"), ("/v1/unload_lora_adapter", {"lora_name": "policy-v1", "lora_int_id": 1}),
    ]  # fmt: skip
    for path, body in bodies:
        assert client.post(f"/servers/s{path}", json=body).status_code in (400, 403), (path, body)
    assert client.post("/servers/s/resume", content=b"\x80\x04}").status_code == 400
    assert client.post("/servers/s/resume", content=b"[" * 60_000).status_code == 400
    assert client.post("/servers/s/resume", content=b" " * 70_000).status_code == 413
    assert (
        client.post(
            "/servers/s/v1/unload_lora_adapter", content=b'{"lora_name": "base", "lora_name": "policy-v1"}'
        ).status_code
        == 200
    )
    assert stand_in.requests == [("POST", "/v1/unload_lora_adapter", "", b'{"lora_name": "policy-v1"}')]


def test_a_body_is_handed_on_while_it_comes(client: httpx2.Client, stand_in: Any) -> None:
    first = threading.Event()

    def pieces() -> Iterator[bytes]:
        yield b'{"token_ids": '
        for _ in range(500):
            if stand_in.pieces:
                first.set()  # the server has the beginning, and the rest has not been sent
                break
            time.sleep(0.01)
        yield b"[1]}"

    stand_in.answer = b"x" * 300_000
    answer = client.post(f"/servers/s{GENERATE}", content=pieces())
    assert answer.content == stand_in.answer
    assert first.is_set()
    assert stand_in.requests == [("POST", GENERATE, "", b'{"token_ids": [1]}')]


def test_the_server_hears_of_a_caller_who_goes_away(client: httpx2.Client, stand_in: Any) -> None:
    stand_in.waits = True
    with pytest.raises(httpx2.ReadTimeout):
        client.post(f"/servers/s{GENERATE}", json={}, timeout=0.3)
    assert stand_in.left.wait(5)


def test_half_an_answer_is_never_a_whole_one(client: httpx2.Client, stand_in: Any) -> None:
    stand_in.breaks = True
    with pytest.raises(httpx2.RemoteProtocolError):
        client.post(f"/servers/s{GENERATE}", json={})


def test_a_server_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with behind.port({"s": f"unix:{tmp_path}/none.sock"}, tmp_path) as url, httpx2.Client(base_url=url) as client:
        assert client.get("/servers/s/health").status_code == 502


def test_one_run_at_a_time_has_the_servers(client: httpx2.Client, stand_in: Any) -> None:
    other = {RUN_HEADER: "run-2"}
    refused = client.post("/join", json={"run": "run-2"})
    assert refused.status_code == 409
    assert "belong to another run" in refused.text
    for path in (GENERATE, "/pause", "/v1/load_lora_adapter"):
        assert client.post(f"/servers/s{path}", headers=other, json={}).status_code == 409
    assert client.get("/servers/s/metrics", headers=other).status_code == 200  # looking on is free
    assert client.post("/leave", headers=other).status_code == 409
    assert client.post("/stay").status_code == 200
    assert client.post("/leave").status_code == 200
    assert client.post(f"/servers/s{GENERATE}", json={}).status_code == 409
    assert client.post("/join", json={"run": "run-2"}).json()["servers"][0]["name"] == "s"
    assert client.post(f"/servers/s{GENERATE}", json={}).status_code == 409
    assert client.post(f"/servers/s{GENERATE}", json={}, headers=other).status_code == 200
    for wrong in ({"run": "../x"}, {"run": ""}, {"run": 3}, {}, {"run": "a", "x": 1}, []):
        assert client.post("/join", json=wrong).status_code == 400


def test_a_silent_run_loses_its_servers_to_whoever_asks() -> None:
    now = [100.0]
    claim = Claim(lambda: now[0])
    claim.take("a")
    now[0] += SILENT_S - 1
    claim.check("a")  # a sign of life
    now[0] += SILENT_S - 1
    with pytest.raises(Refused, match="heard of 59 s ago"):
        claim.take("b")
    now[0] += 1
    claim.take("b")
    with pytest.raises(Refused, match="join first"):
        claim.check("a")
