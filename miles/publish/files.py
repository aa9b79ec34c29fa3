"""Writes a version's weights, or its adapter, where servers read it: whole under its own name, or absent."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from miles.errors import EngineError
from miles.publish.versions import forget, versions
from miles.types import PolicyUpdate


@dataclass(frozen=True)
class Published:
    """One version on disk."""

    version: int
    path: Path  # a .safetensors file of all weights, or the folder of a PEFT adapter
    tensors: int
    size: int  # bytes of the tensors' file
    adapter: Mapping[str, Any] | None  # the adapter's config; None: full weights


class WeightFiles:
    """The folder that servers read new weights from. One run writes there."""

    def __init__(self, folder: Path, dtype: torch.dtype, adapter: Mapping[str, Any] | None = None) -> None:
        """`dtype`: of full weights, as the servers hold them. `adapter`: config of PEFT adapters; None: full weights."""
        self.folder, self._dtype, self._adapter = folder, dtype, adapter
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def write(self, update: PolicyUpdate) -> Published:
        """Write one version. Raises EngineError where the disk is full or cannot be written."""
        name = f"policy-v{update.version}"
        try:
            if self._adapter is not None:
                return self._write_adapter(self.folder / name, update)
            path = self.folder / f"{name}.safetensors"
            count = self._whole(path, update.weights, self._dtype)
            return Published(update.version, path, count, path.stat().st_size, None)
        except (OSError, SafetensorError) as error:
            raise EngineError(
                f"version {update.version} could not be written to {self.folder}: {error}. Free some space there, or name "
                "another folder with publish.directory"
            ) from error

    def newest(self) -> int | None:
        """The highest version that is there, whole."""
        return max(versions(self.folder), default=None)

    def forget_above(self, version: int) -> None:
        """Delete what a learner wrote that went further than this one, which goes on from `version`."""
        self.forget([each for each in versions(self.folder) if each <= version])

    def forget(self, kept: Collection[int]) -> None:
        """Delete every version that is not in `kept`."""
        forget(self.folder, kept)

    def _write_adapter(self, folder: Path, update: PolicyUpdate) -> Published:
        assert update.adapter is not None
        shutil.rmtree(folder, ignore_errors=True)
        partial = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        file = partial / "adapter_model.safetensors"
        try:
            count = self._whole(file, update.adapter, torch.float32)
            (partial / "adapter_config.json").write_text(json.dumps(self._adapter), encoding="utf-8")
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        size = (folder / file.name).stat().st_size
        return Published(update.version, folder, count, size, self._adapter)

    @staticmethod
    def _whole(path: Path, tensors: Callable[[], Iterator[tuple[str, Tensor]]], dtype: torch.dtype) -> int:
        """Write the tensors; their number."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors():
            found[name] = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        partial = path.with_name(f".{path.name}.part")
        try:
            save_file(found, partial)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        return len(found)
