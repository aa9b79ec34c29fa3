"""vLLM's IPC engine with handles as JSON: nothing is unpickled. Runs inside of vLLM's workers alone. It has not been run: it needs GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

from miles.publish.vllm_native import handle_from_json


def decoded(update: Mapping[str, Any]) -> dict[str, Any]:
    """An update with its handles as vLLM has them. Raises ValueError for one that holds a pickle, or none."""
    if update.get("ipc_handles_pickled") is not None or not isinstance(update.get("ipc_handles"), dict):
        raise ValueError("this server takes handles of CUDA memory as JSON, and nothing that is pickled")
    return {**update, "ipc_handles": {gpu: handle_from_json(parts) for gpu, parts in update["ipc_handles"].items()}}


class JsonIpcTransferEngine(IPCWeightTransferEngine):
    """As vLLM's, from JSON."""

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        return super().parse_update_info(decoded(update_dict))
