"""Full weights from the learner's GPU to a server's, over NCCL or CUDA IPC, through vLLM's own trainer-side API.

It has not been run: it needs GPUs. What it asks of vLLM is compared with the installed vLLM in the tests, because that API changes
often; nothing else of Miles calls it. vLLM is imported where a sender is opened, never before.
"""

from __future__ import annotations

import base64
import importlib.util
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from miles.errors import ConfigError, ServerFault
from miles.publish.files import Published
from miles.types import PolicyUpdate

BUCKET_BYTES = 256 << 20
"""Weights travel in buckets of this many bytes, or of the largest tensor's, `BUCKETS` of them at a time: what sending needs
beside the weights."""
BUCKETS = 2
IPC_BACKEND = "miles_ipc"
"""vLLM's `ipc` with handles as JSON (`vllm_ipc.py`): vLLM's own are pickled, and a server of ours unpickles nothing."""

Native = Literal["nccl", "ipc"]
Weights = Callable[[], Iterator[tuple[str, Tensor]]]


class TransferRoutes(Protocol):
    """Routes of one server (`engine/vllm_routes.py`)."""

    url: str

    def version(self) -> str: ...
    def prepare_weights(self, info: Mapping[str, Any] = ...) -> None: ...
    def changing(self, version: str) -> AbstractContextManager[None]: ...
    def start_update(self) -> None: ...
    def send_update(self, info: Mapping[str, Any]) -> None: ...
    def finish_update(self) -> None: ...


@dataclass(frozen=True)
class Meeting:
    """Where learner and server's workers meet for NCCL. `workers`: GPUs of the server. `bucket`: bytes."""

    address: str
    port: int
    workers: int
    bucket: int = BUCKET_BYTES


class Control:
    """vLLM's `VLLMWeightSyncClient`, over the routes of one of our servers; what goes through it is JSON."""

    def __init__(self, routes: TransferRoutes) -> None:
        self._routes = routes

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._routes.prepare_weights(init_info)

    def start_weight_update(self) -> None:
        self._routes.start_update()

    def update_weights(self, update_info: Any) -> None:
        """`update_info`: a table, with NCCL of what comes, with IPC also of handles to a bucket."""
        self._routes.send_update({**update_info, **_as_json(update_info)})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The version is named by the publisher, before anything moves and when it is confirmed."""
        self._routes.finish_update()

    def shutdown_weight_transfer_engine(self) -> None:
        return None


class Source:
    """vLLM's `WeightSource`: what is sent each time. `weights` is set before `send`."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: as the servers hold them."""
        self._dtype = dtype
        self.weights: Weights = lambda: iter(())

    def metadata(self) -> list[Any]:
        """Names, types and shapes in the order of the weights."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights():
            yield name, tensor.detach().to(self._dtype if tensor.is_floating_point() else None).contiguous()


class NativeCarrier:
    """Sends each version to one server after the other; satisfies `miles.publish.carriers.Carrier`. For one rank.

    A server that was started anew is met anew.
    """

    def __init__(self, kind: Native, dtype: torch.dtype, open_sender: Callable[..., Any] | None = None) -> None:
        """Raises ConfigError where there is no GPU or no vLLM. `open_sender`: None is vLLM's."""
        if open_sender is None:
            check_possible(kind)
        self._kind, self._open = kind, open_sender or open_native_sender
        self._source = Source(dtype)
        self._senders: dict[str, Any] = {}
        self._one_at_a_time = threading.Lock()

    def write(self, update: PolicyUpdate) -> Published:
        self._source.weights = update.weights
        return Published(update.version, Path(), 0, 0, None)

    def load(self, routes: TransferRoutes, published: Published) -> None:
        """Raises ServerFault."""
        with self._one_at_a_time:
            try:
                if routes.url not in self._senders or routes.version() == "default":
                    self._senders[routes.url] = self._open(self._kind, routes, self._source)
                with routes.changing(f"unverified-{published.version}"):
                    self._senders[routes.url].send_weights()
            except (RuntimeError, OSError, ValueError) as error:  # of NCCL, CUDA and vLLM
                self._senders.pop(routes.url, None)
                raise ServerFault(f"weights could not be sent to it over {self._kind}: {error}", gone=True) from error

    def forget(self, kept: Collection[int]) -> None:
        return None


def check_possible(kind: Native) -> None:
    """Raises ConfigError."""
    way_out = "leave publish.kind out, which sends files, or run it where learner and servers have GPUs"
    if not torch.cuda.is_available():
        raise ConfigError(
            f'publish.kind = "{kind}" sends weights from GPU to GPU, and this machine has none: {way_out}'
        )
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"publish.kind = \"{kind}\" needs vLLM in the learner's own environment (`pip install 'miles-rl[vllm]'`): {way_out}"
        )


def open_native_sender(kind: Native, routes: TransferRoutes, source: Source) -> Any:
    """vLLM's trainer-side engine for one server; `send_weights()` sends what the source holds then. Raises what vLLM raises."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    largest = max((tensor.numel() * tensor.element_size() for _, tensor in source), default=0)
    meeting = Meeting("127.0.0.1", free_port(), workers=1, bucket=max(BUCKET_BYTES, largest))
    return WeightTransferTrainerFactory.trainer_init(init_info(kind, meeting), client=Control(routes), source=source)


def free_port() -> int:
    """Of this machine's loopback. vLLM binds it itself, so another program may come first; the next publish takes another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def init_info(kind: Native, meeting: Meeting) -> Any:
    """What vLLM's trainer side is opened with."""
    if kind == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo(
            master_address=meeting.address, master_port=meeting.port, world_size=1 + meeting.workers, rank=0, packed=True,
            packed_buffer_size_bytes=meeting.bucket, packed_num_buffers=BUCKETS,
        )  # fmt: skip
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    return IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=meeting.bucket)


# --- handles of CUDA memory as JSON ----------------------------------------------------------------------------------


def _as_json(info: Mapping[str, Any]) -> Mapping[str, Any]:
    handles = info.get("ipc_handles")
    if handles is None:
        return {}
    return {"ipc_handles": {gpu: handle_to_json(parts) for gpu, parts in handles.items()}}


def handle_to_json(parts: Sequence[Any]) -> list[Any]:
    """Of what `torch.multiprocessing.reductions.reduce_tensor` gives to rebuild a CUDA tensor. Raises TypeError."""
    return [_to_json(part) for part in parts]


def handle_from_json(parts: Sequence[Any]) -> tuple[Any, ...]:
    """The other way. Raises ValueError for what `handle_to_json` never makes."""
    return tuple(_from_json(part) for part in parts)


_KINDS: Mapping[str, Any] = {
    "tensor": torch.Tensor,
    "storage": torch.storage.TypedStorage,
    "untyped": torch.UntypedStorage,
}


def _to_json(part: Any) -> Any:
    if part is None or isinstance(part, bool | int):
        return part
    if isinstance(part, bytes):
        return {"bytes": base64.b64encode(part).decode("ascii")}
    if isinstance(part, torch.dtype):
        return {"dtype": str(part).removeprefix("torch.")}
    if isinstance(part, tuple | list):
        return {"sizes": [int(size) for size in part]}
    for name, kind in _KINDS.items():
        if part is kind:
            return {"kind": name}
    raise TypeError(f"a handle of CUDA memory holds a {type(part).__name__}, which Miles does not send")


def _from_json(part: Any) -> Any:
    if part is None or isinstance(part, bool | int):
        return part
    if isinstance(part, dict) and len(part) == 1:
        ((name, value),) = part.items()
        if name == "bytes" and isinstance(value, str):
            return base64.b64decode(value, validate=True)
        if name == "dtype" and isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype):
            return getattr(torch, value)
        if name == "sizes" and isinstance(value, list) and all(type(size) is int for size in value):
            return tuple(value)
        if name == "kind" and value in _KINDS:
            return _KINDS[value]
    raise ValueError(f"{str(part)[:80]!r} is no part of a handle of CUDA memory")
