"""Weights over NCCL and IPC, as far as that can be seen without a GPU: refusals, handles as JSON, requests, vLLM's signatures."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from miles.errors import ConfigError, ServerFault
from miles.publish import vllm_plugin
from miles.publish.vllm_native import (
    IPC_BACKEND,
    NativeCarrier,
    Source,
    check_possible,
    handle_from_json,
    handle_to_json,
)
from miles.types import PolicyUpdate

HANDLE = (
    torch.Tensor, torch.Size((8, 2)), (2, 1), 0, torch.UntypedStorage, torch.uint8, 0, b"\x00handle\xff", 16, 0, False, b"counter", 0,
    b"event", True,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["nccl", "ipc"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_refused_with_a_way_out(kind: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf'publish.kind = "{kind}" sends weights from GPU to GPU, and this machine has none'
    ):
        check_possible(kind)
    with pytest.raises(ConfigError, match=r"leave publish\.kind out"):
        NativeCarrier(kind, torch.bfloat16)


def test_handles_come_back_from_json_as_they_were() -> None:
    assert handle_from_json(json.loads(json.dumps(handle_to_json(HANDLE)))) == HANDLE


@pytest.mark.parametrize(
    "part",
    [
        {"kind": "os.system"},
        {"dtype": "load"},
        {"bytes": "not base64!"},
        {"sizes": ["1"]},
        {"a": 1, "b": 2},
        "text",
        1.5,
        {},
    ],
)
def test_what_is_no_handle_is_refused(part: Any) -> None:
    with pytest.raises(ValueError, match=r"no part of a handle|[Bb]ase64|padding|base64"):
        handle_from_json([part])


def test_what_no_handle_holds_is_not_sent() -> None:
    with pytest.raises(TypeError, match="a handle of CUDA memory holds a function"):
        handle_to_json([print_nothing])


def print_nothing() -> None:
    return None


class Routes:
    def __init__(self, named: str = "default") -> None:
        self.url, self.named, self.changes = "unix:/a", named, []

    def version(self) -> str:
        return self.named

    @contextmanager
    def changing(self, version: str) -> Iterator[None]:
        yield
        self.named = version
        self.changes.append(version)


class Sender:
    def __init__(self, source: Source) -> None:
        self.source, self.sent = source, []
        self.error: Exception | None = None

    def send_weights(self) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append({name: tensor.clone() for name, tensor in self.source})


def test_a_server_is_met_once_and_anew_after_it_was_started_again_or_failed() -> None:
    senders: list[Sender] = []

    def opened(kind: str, routes: Any, source: Source) -> Sender:
        senders.append(Sender(source))
        return senders[-1]

    carrier, routes = NativeCarrier("nccl", torch.bfloat16, opened), Routes()
    for version in (1, 2):
        published = carrier.write(PolicyUpdate(version, lambda v=version: iter([("w", torch.full((2,), float(v)))])))
        carrier.load(routes, published)
    assert len(senders) == 1
    assert [float(sent["w"][0]) for sent in senders[0].sent] == [1.0, 2.0]
    assert senders[0].sent[0]["w"].dtype == torch.bfloat16
    assert routes.changes == ["unverified-1", "unverified-2"]
    routes.named = "default"
    carrier.load(routes, published)
    assert len(senders) == 2
    senders[1].error = RuntimeError("NCCL error: remote process exited")
    with pytest.raises(ServerFault, match="could not be sent to it over nccl: NCCL error") as fault:
        carrier.load(routes, published)
    assert fault.value.gone
    carrier.load(routes, published)
    assert len(senders) == 3


def test_plugin_and_sender_speak_of_the_same_backend() -> None:
    assert IPC_BACKEND in [name for name, _, _ in vllm_plugin.ENGINES]


@pytest.mark.slow
def test_it_calls_what_the_installed_vllm_has(vllm_python: str) -> None:
    child = Path(__file__).with_name("native_child.py")
    done = subprocess.run([vllm_python, str(child)], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.endswith("as vLLM has it\n"), done.stderr[-3000:]
