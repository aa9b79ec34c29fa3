"""What a port lets through to a vLLM server: which routes, with which queries, and which bodies. Everything else is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from miles.engine.vllm_routes import ADAPTER_NAME, GENERATE, VERSION
from miles.web.door import Refused

BodyCheck = Callable[[Mapping[str, Any], Path], None]
"""Raises Refused for a body that must not reach a server; the folder is the one that servers read weights from."""


@dataclass(frozen=True)
class Allowed:
    """One route. `check`: None streams the body through as it comes."""

    method: str
    path: str
    check: BodyCheck | None = None
    queries: Mapping[str, str] = field(default_factory=dict)  # name -> the one value that it may have
    watching: bool = False  # may be called by whoever has the token, not only by the run that has joined


def _nothing(body: Mapping[str, Any], folder: Path) -> None:
    _only(body)


def _initialise(body: Mapping[str, Any], folder: Path) -> None:
    _only(body, "init_info")
    _only(_table(body["init_info"]))


def _weights(body: Mapping[str, Any], folder: Path) -> None:
    _only(body, "update_info")
    info = _table(body["update_info"])
    _only(info, "path", "tensors", "size")
    path = _below(info["path"], folder)
    if path.suffix != ".safetensors" or not path.is_file():
        raise Refused(403, f"{info['path']!r} is no .safetensors file")
    if not all(type(info[key]) is int and info[key] >= 0 for key in ("tensors", "size")):
        raise Refused(400, "tensors and size must be whole numbers")


def _name_version(body: Mapping[str, Any], folder: Path) -> None:
    _only(body, "new_version")
    if not isinstance(body["new_version"], str) or not VERSION.fullmatch(body["new_version"]):
        raise Refused(400, f"{str(body['new_version'])[:80]!r} is no name of a version")


def _load_adapter(body: Mapping[str, Any], folder: Path) -> None:
    _only(body, "lora_name", "lora_path")
    _adapter_name(body["lora_name"])
    path = _below(body["lora_path"], folder)
    # Also: a folder that is not there would be taken for a name on the hub, and other kinds of files may hold pickles.
    held = {file.name for file in path.iterdir()} if path.is_dir() else set()
    if held != {"adapter_config.json", "adapter_model.safetensors"}:
        raise Refused(
            403, f"{str(path)!r} is no folder of an adapter_config.json and an adapter_model.safetensors alone"
        )


def _unload_adapter(body: Mapping[str, Any], folder: Path) -> None:
    _only(body, "lora_name")
    _adapter_name(body["lora_name"])


ALLOWED: tuple[Allowed, ...] = (
    Allowed("POST", GENERATE),
    Allowed("GET", "/health", _nothing, watching=True),
    Allowed("GET", "/metrics", _nothing, watching=True),
    Allowed("GET", "/v1/models", _nothing, watching=True),
    Allowed("GET", "/weight_info", _nothing, watching=True),
    Allowed("POST", "/v1/load_lora_adapter", _load_adapter),
    Allowed("POST", "/v1/unload_lora_adapter", _unload_adapter),
    Allowed("POST", "/pause", _nothing, {"mode": "keep", "clear_cache": "true"}),
    Allowed("POST", "/resume", _nothing),
    Allowed("POST", "/init_weight_transfer_engine", _initialise),
    Allowed("POST", "/start_weight_update", _nothing),
    Allowed("POST", "/update_weights", _weights),
    Allowed("POST", "/finish_weight_update", _nothing),
    Allowed("POST", "/update_weight_version", _name_version),
    Allowed("POST", "/reset_prefix_cache", _nothing, {"reset_running_requests": "true"}),
)


def find(method: str, path: str) -> Allowed:
    """The route of exactly that path. Raises Refused."""
    for allowed in ALLOWED:
        if (allowed.method, allowed.path) == (method, path):
            return allowed
    raise Refused(404, "this port does not forward that route")


def check_query(allowed: Allowed, query: str) -> None:
    """Raises Refused for a query that the route may not have."""
    for name, value in parse_qsl(query, keep_blank_values=True):
        if allowed.queries.get(name) != value:
            raise Refused(400, f"the query {name[:80]!r} is not forwarded with that value")


def checked_body(check: BodyCheck, body: bytes, folder: Path) -> bytes:
    """The body as it is forwarded: written anew, so that whoever reads it next reads what was checked. Raises Refused."""
    if not body:
        check({}, folder)
        return b""
    try:
        content = _table(json.loads(body))
    except (ValueError, RecursionError):
        raise Refused(400, "the body is no JSON") from None
    check(content, folder)
    return json.dumps(content).encode()


def _table(content: Any) -> Mapping[str, Any]:
    if not isinstance(content, dict):
        raise Refused(400, "the body must be a JSON object")
    return content


def _only(content: Mapping[str, Any], *keys: str) -> None:
    if set(content) != set(keys):
        raise Refused(400, f"the body must hold exactly: {', '.join(keys) or 'nothing'}")


def _adapter_name(name: Any) -> None:
    if not isinstance(name, str) or not ADAPTER_NAME.fullmatch(name):
        raise Refused(403, f"{str(name)[:80]!r} is no name of a policy's adapter")


def _below(text: Any, folder: Path) -> Path:
    """The real path, links followed. Raises Refused where it lies elsewhere."""
    if not isinstance(text, str) or not text.startswith("/") or "\0" in text:
        raise Refused(403, f"{str(text)[:200]!r} is no absolute path")
    try:
        real = Path(text).resolve()
    except (OSError, RuntimeError):
        raise Refused(403, f"{text[:200]!r} cannot be followed") from None
    if not real.is_relative_to(folder) or real == folder:
        raise Refused(403, f"{text[:200]!r} does not lie below the folder that this service reads weights from")
    return real
