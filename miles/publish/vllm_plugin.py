"""What Miles adds to a vLLM server: a weight-transfer engine that reads files; on a CPU fast adapters, and waiting without work.

vLLM's processes call `register` through the entry point group `vllm.general_plugins`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

BACKEND = "miles_file"
ENGINES = (
    (BACKEND, "miles.publish.vllm_transfer", "FileTransferEngine"),
    ("miles_ipc", "miles.publish.vllm_ipc", "JsonIpcTransferEngine"),
)
ROOT_VARIABLE = "MILES_PUBLISH_ROOT"


def register() -> None:
    """Add the engine to vLLM's registry, and what a CPU needs. May be called more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    for name, module, kind in ENGINES:
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, module, kind)
    if current_platform.is_cpu():
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
        from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

        from miles.publish import vllm_adapters, vllm_waiting

        vllm_adapters.install(PunicaWrapperCPU)
        vllm_waiting.install(SpinCondition)


def checked_path(path: str, tensors: int, size: int, root: str | None) -> Path:
    """The file, if it is the whole one that was announced, below the server's folder. Raises ValueError."""
    from safetensors import safe_open

    if not root:
        raise ValueError(f"this server was started without {ROOT_VARIABLE}, so it takes no weights from files")
    real = Path(path).resolve()
    if not real.is_relative_to(Path(root).resolve()) or real.suffix != ".safetensors":
        raise ValueError(f"{path} is no .safetensors file below {root}, the folder that this server takes weights from")
    found = real.stat().st_size
    if found != size:
        raise ValueError(f"{path} has {found} bytes instead of {size}: it was cut short, or is still being written")
    with safe_open(real, framework="pt") as file:
        held = len(file.keys())
    if held != tensors:
        raise ValueError(f"{path} holds {held} tensors instead of {tensors}")
    return real


def tensors_of(path: Path) -> Iterator[tuple[str, object]]:
    """(name, tensor) of a safetensors file, one after the other."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def root() -> str | None:
    return os.environ.get(ROOT_VARIABLE)
