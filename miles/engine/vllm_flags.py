"""How a vLLM server is started: command line and environment, as a function of what the run needs. Imports no vLLM."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The slot sizes that vLLM offers."""

BACKEND = "miles_file"
"""Name of our weight-transfer engine (publish/vllm_plugin.py) in vLLM's registry."""

ROOT_VARIABLE = "MILES_PUBLISH_ROOT"
"""The one folder below which a server reads published weights."""

CPU_CACHE_GIB = 1.0
"""Key-value cache of a server without a GPU, unless the recipe says more."""

CPU_BLOCK = 32
"""Tokens of a block of the cache, the smallest that vLLM's CPU attention takes: a prompt's whole blocks are read once for all
of its samples, and vLLM's own choice of 128 is longer than many prompts."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class AdapterSlots:
    """Room for LoRA adapters: each of at most `rank`, `count` of them loaded at the same time.

    `targets`: last parts of the names of the layers that have one; (): every layer that vLLM can give one. An output head
    without adapters must not be among them: vLLM on a CPU then ends when a prompt is scored beside samples under way.
    """

    rank: int
    count: int
    targets: tuple[str, ...] = ()

    @property
    def slot_rank(self) -> int:
        """The smallest of vLLM's slot sizes that holds the rank."""
        return min(size for size in ADAPTER_RANKS if size >= self.rank)


@dataclass(frozen=True)
class ServerPlan:
    """What one server is started with."""

    model: str  # folder or hub id
    revision: str | None
    dtype: str  # fp32 or bf16
    max_batch: int  # samples that decode at the same time
    context: int | None  # tokens of prompt and completion together; None: the model's own
    kv_cache_gib: float | None  # None: 1 GiB on a CPU, what vLLM measures on a GPU
    publish_root: Path
    threads: int = 1  # CPU threads of the server
    adapters: AdapterSlots | None = None  # None: full weights are published
    cpu: bool = True
    backend: str = BACKEND  # of weight transfer, where full weights are published
    trust_remote_code: bool = False


def command(plan: ServerPlan, python: str, socket: Path) -> list[str]:
    """The server's command line. It listens on the unix socket alone."""
    adapters = plan.adapters
    cache = plan.kv_cache_gib or (CPU_CACHE_GIB if plan.cpu else None)
    options: dict[str, str | int | None] = {
        "model": plan.model,
        "revision": plan.revision,
        "uds": str(socket),
        "dtype": DTYPES[plan.dtype],
        "max-model-len": plan.context,
        "max-num-seqs": plan.max_batch,
        "logprobs-mode": "processed_logprobs",  # at the sampling temperature, as the learner computes them
        "generation-config": "vllm",  # no sampling settings from the model's folder
        "weight-transfer-config": f'{{"backend": "{plan.backend}"}}' if adapters is None else None,
        "max-lora-rank": adapters.slot_rank if adapters else None,
        "max-loras": adapters.count if adapters else None,
        "max-cpu-loras": adapters.count if adapters else None,
        "block-size": CPU_BLOCK if plan.cpu else None,
        "max-cudagraph-capture-size": None if plan.cpu else plan.max_batch,
        "kv-cache-memory-bytes": int(cache * 2**30) if cache else None,
        "uvicorn-log-level": "warning",
    }
    flags = ["enable-scale-out", "enable-prefix-caching", "disable-uvicorn-access-log"]
    flags += ["enable-lora"] * (adapters is not None)
    # A prompt that is read in two pieces would need a seeded generator that goes back, which ends vLLM's worker on a CPU.
    flags += ["enforce-eager", "no-enable-chunked-prefill"] * plan.cpu
    flags += ["trust-remote-code"] * plan.trust_remote_code
    given = [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
    targets = ["--lora-target-modules", *adapters.targets] if adapters and adapters.targets else []
    return [python, "-m", "vllm.entrypoints.openai.api_server", *given, *targets, *(f"--{flag}" for flag in flags)]


def environment(plan: ServerPlan, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The server's environment: the starter's, with what vLLM reads from it. No insecure serialization, whatever it was."""
    ours = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause, update weights and reset caches
        "VLLM_PLUGINS": "miles",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": environ.get("VLLM_LOGGING_LEVEL", "INFO"),
        "HF_HUB_OFFLINE": environ.get("HF_HUB_OFFLINE", "1" if Path(plan.model).is_dir() else "0"),
        ROOT_VARIABLE: str(plan.publish_root),
    }
    if plan.adapters is not None:
        ours["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if plan.cpu:
        # Learner and server take turns, so both may have every core; vLLM's own choice keeps one back.
        ours["VLLM_CPU_OMP_THREADS_BIND"] = environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        ours["OMP_NUM_THREADS"] = str(plan.threads)  # where it is not set vLLM takes one
    dropped = ("VLLM_ALLOW_INSECURE_SERIALIZATION", "OMP_NUM_THREADS", "VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE")
    kept = {name: value for name, value in environ.items() if name not in dropped}
    return {**kept, **ours}


def find_python(named: str | None) -> str:
    """The interpreter that runs vLLM: `named`, or that of `.venv-vllm` beside this environment, or this one."""
    if named is not None:
        return str(Path(named).expanduser())
    beside = Path(sys.prefix).parent / ".venv-vllm" / "bin" / "python"
    return str(beside) if beside.exists() else sys.executable
