"""The engine that `vllm_plugin` registers. Runs inside of vLLM's workers alone: the one module of Miles that imports vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from miles.publish.vllm_plugin import checked_path, root, tensors_of


@dataclass
class FileInit(WeightTransferInitInfo):
    """Nothing is set up: a file needs no connection."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """One whole model: the file, how many tensors it holds, and how many bytes it has."""

    path: str = ""
    tensors: int = 0
    size: int = field(default=0)


class FileTransferEngine(WeightTransferEngine[FileInit, FileUpdate]):
    """Reads checkpoint-format weights from a file, through vLLM's layerwise reload."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        return None

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, without waiting for an accelerator that a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        # Looked at before the first tensor is loaded: a file that is refused must leave the old weights as they are.
        path = checked_path(update_info.path, update_info.tensors, update_info.size, root())
        self.model.load_weights(tensors_of(path))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self._pack_shared_again()

    def _pack_shared_again(self) -> None:
        """Make the packed copy of a tied output head anew.

        A tied head has its embedding's weight and is not loaded itself, so the reload gives it the new numbers but does not
        process them; on a CPU products run on a packed copy, made when weights are processed, which would stay old.
        """
        for layer in self.model.modules():
            weight = getattr(layer, "weight", None)
            if hasattr(layer, "cpu_linear") and isinstance(weight, torch.Tensor) and weight.numel():
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        return None
