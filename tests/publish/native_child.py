"""Runs in the environment that has vLLM: what `vllm_native` calls is what vLLM has, as far as that can be seen without a GPU."""

from __future__ import annotations

import inspect
import json
from contextlib import nullcontext
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerWeightTransferEngine, VLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerWeightTransferEngine, IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

from miles.publish import vllm_native, vllm_plugin
from miles.publish.vllm_ipc import JsonIpcTransferEngine, decoded

WEIGHTS = {"a": torch.ones(2, 3), "b": torch.arange(4.0).reshape(2, 2).T, "n": torch.arange(3)}
MEETING = vllm_native.Meeting("127.0.0.1", 7000, workers=2, bucket=1 << 20)


class Routes:
    """Remembers what reaches a server."""

    url = "unix:/x"

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def version(self) -> str:
        return "default"

    def prepare_weights(self, info: Any = None) -> None:
        self.calls.append(("prepare", dict(info)))

    def changing(self, version: str) -> Any:
        return nullcontext()

    def start_update(self) -> None:
        self.calls.append("start")

    def send_update(self, info: Any) -> None:
        self.calls.append(("send", info))

    def finish_update(self) -> None:
        self.calls.append("finish")


class WithoutNccl(NCCLTrainerWeightTransferEngine):
    """As vLLM's up to the communicator: what it would broadcast is kept."""

    def _broadcast(self, source: Any, meta: Any) -> None:
        self.sent = list(self._checked_iter(source, meta))

    def _post_send_sync(self) -> None:
        return None


def source() -> vllm_native.Source:
    made = vllm_native.Source(torch.bfloat16)
    made.weights = lambda: iter(WEIGHTS.items())
    return made


def nccl_round() -> None:
    routes = Routes()
    engine = WithoutNccl(client=vllm_native.Control(routes), source=source())
    engine.send_weights()
    assert [call if isinstance(call, str) else call[0] for call in routes.calls] == ["start", "send", "finish"], (
        routes.calls
    )
    info = routes.calls[1][1]
    assert info == {
        "names": ["a", "b", "n"], "dtype_names": ["bfloat16", "bfloat16", "int64"], "shapes": [[2, 3], [2, 2], [3]],
    }  # fmt: skip
    assert all(tensor.is_contiguous() for _, tensor in engine.sent)
    assert torch.equal(engine.sent[1][1].float(), WEIGHTS["b"])


def ipc_round() -> None:
    parts = (
        torch.Tensor, (8,), (1,), 0, torch.storage.UntypedStorage, torch.uint8, 0, b"\x00\x01handle", 8, 0, False,
        b"counter", 0, b"event", True,
    )  # fmt: skip
    routes = Routes()
    engine = IPCTrainerWeightTransferEngine.__new__(IPCTrainerWeightTransferEngine)
    engine.is_sender, engine.client = True, vllm_native.Control(routes)
    engine._do_send(["a"], ["float32"], [[2]], {"GPU-1": parts}, [8])
    sent = routes.calls[0][1]
    arrived = json.loads(json.dumps(sent))
    info = JsonIpcTransferEngine.__new__(JsonIpcTransferEngine).parse_update_info(arrived)
    assert isinstance(info, IPCWeightTransferUpdateInfo)
    assert info.ipc_handles == {"GPU-1": parts}
    assert info.tensor_sizes == [8]
    for bad in ({"ipc_handles_pickled": "gAR9lC4="}, {"ipc_handles": None}, {"ipc_handles": [{}]}):
        refused = ""
        try:
            decoded({"names": [], "dtype_names": [], "shapes": [], **bad})
        except ValueError as error:
            refused = str(error)
        assert "nothing that is pickled" in refused, bad


def signatures() -> None:
    for kind, backend in (("nccl", "nccl"), ("ipc", "ipc")):
        info = vllm_native.init_info(kind, MEETING)
        assert info.backend == backend
        assert info.is_sender
        assert info.packed
        assert info.packed_buffer_size_bytes == 1 << 20
        assert backend in WeightTransferTrainerFactory._registry
        found = WeightTransferTrainerFactory._registry[backend]()
        inspect.signature(found.trainer_init).bind(init_info=info, client=None, source=None)
        inspect.signature(found.send_weights).bind(None)
    assert vllm_native.init_info("nccl", MEETING).world_size == 3
    inspect.signature(WeightTransferTrainerFactory.trainer_init).bind(info, client=None, source=None)
    control = vllm_native.Control(Routes())
    assert isinstance(control, VLLMWeightSyncClient)
    for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
        ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (vllm_native.Control, VLLMWeightSyncClient))
        assert list(ours.parameters) == list(theirs.parameters), name
    assert hasattr(TrainerWeightTransferEngine, "send_weights")
    assert source().metadata()[0] == ParamMeta("a", torch.bfloat16, (2, 3))


def registered() -> None:
    vllm_plugin.register()
    vllm_plugin.register()
    for name, _, kind in vllm_plugin.ENGINES:
        assert WeightTransferEngineFactory._registry[name]().__name__ == kind
    assert vllm_native.IPC_BACKEND in WeightTransferEngineFactory._registry


if __name__ == "__main__":
    for check in (signatures, nccl_round, ipc_round, registered):
        check()
    print("as vLLM has it")
