"""One vLLM server's routes as plain calls: generate for the client, versions, weights and adapters for the publisher."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import httpx2

from miles.errors import BadInput, ServerFault
from miles.types import Completion, Sampling, VersionSpan

GENERATE = "/inference/v1/generate"
ADAPTER = "policy-v{version}"
ADAPTER_NAME = re.compile(r"policy-v(0|[1-9][0-9]{0,17})")
RUN_HEADER = "x-miles-run"
"""Names the run that calls, where servers stand behind a port (`engine/port.py`)."""
UNVERIFIED = "unverified-{version}"
"""What a server calls weights until a canary has confirmed them."""

VERSION = re.compile(r"(unverified-)?(0|[1-9][0-9]{0,17})")

_NO_NUMBER = -9000.0  # vLLM sends -9999 where a log-probability is NaN or -inf
SLOWEST_BYTES_PER_S = 4 << 20
"""Of a version on its way to another machine: one that comes more slowly is not waited for."""

_COUNTERS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
_WAITING = "vllm:num_requests_waiting"


class NotANumber(Exception):
    """The model gave NaN or infinity: no other server would do better."""


@dataclass(frozen=True)
class Progress:
    """What a server has done since it started."""

    tokens: float  # prompt and sampled tokens
    waiting: float  # requests that wait for a place


@dataclass(frozen=True)
class Access:
    """What is shown at a port: by a run, and to it. The token is in no repr, log or message."""

    token: str | None = field(default=None, repr=False)
    run: str | None = None
    ca_file: Path | None = None  # certificates to trust. None: those of the system

    @property
    def headers(self) -> dict[str, str]:
        shown = {RUN_HEADER: self.run} if self.run is not None else {}
        return shown | ({"authorization": f"Bearer {self.token}"} if self.token is not None else {})

    def verify(self) -> ssl.SSLContext | bool:
        """For an HTTP client. Raises BadInput."""
        if self.ca_file is None:
            return True
        try:
            return ssl.create_default_context(cafile=str(self.ca_file))
        except OSError as error:
            raise BadInput(f"engine.ca_file {self.ca_file} cannot be used: {error}") from error


NOTHING_TO_SHOW = Access()


def _keywords(url: str, access: Access, timeout: httpx2.Timeout) -> dict[str, Any]:
    """Keywords of an HTTP client for `unix:/path/to.sock` or `http://host:port`."""
    return {
        "base_url": "http://vllm" if url.startswith("unix:") else url,
        "headers": access.headers,
        "timeout": timeout,
        "trust_env": False,  # a proxy has no business between us and our server
    }


def _socket_of(url: str) -> str | None:
    return url.removeprefix("unix:") if url.startswith("unix:") else None


def listening(url: str) -> bool:
    """Whether somebody accepts connections on a unix socket; True for other addresses, which a request finds out about.

    The HTTP client leaves a socket open where a connection is refused.
    """
    if not url.startswith("unix:"):
        return True
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(url.removeprefix("unix:"))
        except OSError:
            return False
    return True


def async_client(url: str, access: Access = NOTHING_TO_SHOW, connections: int = 1024) -> httpx2.AsyncClient:
    """For requests that take as long as they take: whether they move is judged elsewhere."""
    limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
    transport = httpx2.AsyncHTTPTransport(uds=_socket_of(url), limits=limits, verify=access.verify())
    timeout = httpx2.Timeout(10.0, read=None, pool=None)
    return httpx2.AsyncClient(**_keywords(url, access, timeout), transport=transport)


def request_body(
    ids: Sequence[int], sampling: Sampling, seed: int, ends: Sequence[int], model: str | None
) -> dict[str, Any]:
    """The request for one completion. Every setting that changes a distribution is named, so that no default does."""
    params: dict[str, Any] = {
        "n": 1, "max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, "seed": seed, "logprobs": 0,
        "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "ignore_eos": True, "stop_token_ids": sorted({*ends, *sampling.stop_token_ids}), "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "detokenize": bool(sampling.stop),
    }  # fmt: skip
    if sampling.stop:
        params |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    return {"token_ids": list(ids), "sampling_params": params, **({"model": model} if model else {})}


@dataclass(frozen=True)
class Answer:
    """A whole completion; `unverified` is the newest version in it that had not been confirmed when it was sampled from."""

    completion: Completion
    unverified: int | None = None


def parse_answer(body: Mapping[str, Any], adapter_version: int | None) -> Answer:
    """What a server answered. `adapter_version`: of the adapter that was asked for; None: versions are the server's.

    Raises ServerFault for an answer that is not whole, NotANumber for log-probabilities that are none.
    """
    (choice,) = body["choices"]
    reason, ids = choice["finish_reason"], choice["token_ids"] or []
    if reason not in ("stop", "length") or not ids:
        raise ServerFault(f"an answer ended with {reason!r} after {len(ids)} tokens, so it is not whole")
    content = (choice["logprobs"] or {}).get("content") or []
    if [entry["token_id"] for entry in content] != list(ids):
        raise ServerFault(f"an answer of {len(ids)} tokens came with log-probabilities of other tokens")
    logprobs = tuple(float(entry["logprob"]) for entry in content)
    for place, value in enumerate(logprobs):
        if not math.isfinite(value) or value < _NO_NUMBER:
            raise NotANumber(
                f"the log-probability of token {place} of a completion is not finite: the served weights hold NaN or "
                "infinity, or their activations overflow; lower the learning rate, or go back to a checkpoint"
            )
    unverified = None
    spans = [VersionSpan(adapter_version, 0, len(ids))] if adapter_version is not None else []
    if adapter_version is None:
        spans, unverified = _spans(choice["weight_versions"] or [], len(ids))
    return Answer(Completion(tuple(ids), logprobs, tuple(spans), reason), unverified)


def _spans(given: Sequence[Mapping[str, Any]], length: int) -> tuple[list[VersionSpan], int | None]:
    spans: list[VersionSpan] = []
    end, unverified = 0, None
    for span in given:
        match = VERSION.fullmatch(str(span["version"]))
        if match is None:
            raise ServerFault(f"it serves weights that it calls {span['version']!r}, which nobody gave it", gone=True)
        if span["start"] != end or span["end"] <= end:
            raise ServerFault(f"the versions of an answer do not cover its tokens one after the other: {given}")
        end = span["end"]
        spans.append(VersionSpan(int(match[2]), span["start"], end))
        unverified = int(match[2]) if match[1] else unverified
    if end != length:
        raise ServerFault(f"the versions of an answer of {length} tokens end at {end}")
    return spans, unverified


def parse_progress(metrics: str) -> Progress:
    """From a Prometheus page."""
    tokens = waiting = 0.0
    for line in metrics.splitlines():
        name = line.split("{", 1)[0].split(" ", 1)[0]
        if name in _COUNTERS:
            tokens += float(line.rsplit(" ", 1)[1])
        elif name == _WAITING:
            waiting += float(line.rsplit(" ", 1)[1])
    return Progress(tokens, waiting)


class ServerRoutes:
    """The routes that change or ask what a server serves. Blocking; each raises ServerFault with the server's own words."""

    def __init__(
        self,
        url: str,
        access: Access = NOTHING_TO_SHOW,
        timeout_s: float = 60.0,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        """`transport`: None connects to the url."""
        self._listening = functools.partial(listening, url) if transport is None else lambda: True
        found = transport or httpx2.HTTPTransport(uds=_socket_of(url), verify=access.verify())
        self._client = httpx2.Client(**_keywords(url, access, httpx2.Timeout(timeout_s)), transport=found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def healthy(self) -> bool:
        """Whether the server answers at all; says nothing about whether its engine moves."""
        try:
            return self._listening() and self._client.get("/health").status_code == 200
        except httpx2.HTTPError:
            return False

    def settings(self) -> dict[str, Any]:
        """The settings that Miles relies on, as the server reports them."""
        config = self._call("GET", "/server_info", params={"config_format": "json"})["vllm_config"]
        model, lora = config["model_config"], config.get("lora_config") or {}
        return {
            "model": model["model"], "dtype": str(model["dtype"]).removeprefix("torch."),
            "max_model_len": model["max_model_len"], "logprobs_mode": model["logprobs_mode"],
            "max_num_seqs": config["scheduler_config"]["max_num_seqs"], "max_loras": lora.get("max_loras"),
            "max_lora_rank": lora.get("max_lora_rank"),
        }  # fmt: skip

    # --- full weights ----------------------------------------------------------------------------------------------

    def version(self) -> str:
        """What the server calls its full weights; `default` after its start."""
        return str(self._call("GET", "/weight_info")["weight_version"])

    def name_version(self, version: str) -> None:
        self._call("POST", "/update_weight_version", json={"new_version": version})

    def load_weights(self, file: Path, tensors: int, size: int, version: str) -> None:
        """Take all weights from a file, between two tokens of whatever is under way, and forget every cached prefix.

        Requests under way go on with the new weights; their keys and values are computed again.
        """
        with self.changing(version):
            self.start_update()
            self.send_update({"path": str(file), "tensors": tensors, "size": size})
            self.finish_update()

    @contextlib.contextmanager
    def changing(self, version: str) -> Iterator[None]:
        """Nothing is sampled meanwhile; afterwards the weights are called `version`, and every cached prefix is forgotten."""
        self.name_version(version)  # before anything moves, so that no token of theirs goes by an older name
        self._call("POST", "/pause", params={"mode": "keep", "clear_cache": "true"})
        try:
            yield
            forgotten = self._call("POST", "/reset_prefix_cache", params={"reset_running_requests": "true"})
            if not forgotten.get("success"):
                raise ServerFault("its cache of prefixes could not be emptied, so it would mix old and new weights")
        except Exception:
            with contextlib.suppress(ServerFault):  # vLLM ends when a file is refused
                self._call("POST", "/resume")
            raise
        self._call("POST", "/resume")

    def start_update(self) -> None:
        self._call("POST", "/start_weight_update")

    def send_update(self, info: Mapping[str, Any]) -> None:
        self._call("POST", "/update_weights", json={"update_info": info})

    def finish_update(self) -> None:
        self._call("POST", "/finish_weight_update")

    def prepare_weights(self, info: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Once after the server's start, before the first update; `info`: what its backend asks for."""
        self._call("POST", "/init_weight_transfer_engine", json={"init_info": dict(info)})

    def fetch(self, offer: Mapping[str, Any], size: int) -> Path:
        """Have the service before the server take a version off the learner's shelf; where it lies there, whole.

        `size`: bytes, which decide how long that may take.
        """
        timeout = httpx2.Timeout(10.0, read=60.0 + size / SLOWEST_BYTES_PER_S)
        return Path(self._call("POST", "/fetch", json=offer, timeout=timeout)["path"])

    # --- adapters --------------------------------------------------------------------------------------------------

    def load_adapter(self, version: int, folder: Path) -> None:
        name = ADAPTER.format(version=version)
        self._call("POST", "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)})

    def unload_adapter(self, version: int) -> None:
        self._call("POST", "/v1/unload_lora_adapter", json={"lora_name": ADAPTER.format(version=version)})

    def adapters(self) -> list[int]:
        """Versions of the policy's adapters that are loaded, ascending."""
        names = [card["id"] for card in self._call("GET", "/v1/models")["data"]]
        return sorted(int(match[1]) for name in names if (match := ADAPTER_NAME.fullmatch(name)))

    def forget_prefixes(self) -> None:
        """No request reads keys and values that an earlier one has left."""
        self._call("POST", "/reset_prefix_cache", params={"reset_running_requests": "true"})

    # --- what it computes ------------------------------------------------------------------------------------------

    def logprobs(self, ids: Sequence[int], adapter_version: int | None = None) -> list[float]:
        """log p of ids[1:] at temperature 1, each given the tokens before it, never from a cached prefix."""
        model = None if adapter_version is None else ADAPTER.format(version=adapter_version)
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "ignore_eos": True, "detokenize": False}
        body = {"token_ids": list(ids), "sampling_params": params, **({"model": model} if model else {})}
        found = self._call("POST", GENERATE, json=body).get("prompt_logprobs") or []
        try:
            return [float(at[str(token)]["logprob"]) for token, at in zip(ids[1:], found[1:], strict=True)]
        except (KeyError, TypeError, ValueError) as error:
            raise ServerFault(f"it gave no log-probabilities of a prompt of {len(ids)} tokens ({error!r})") from error

    def _call(self, method: str, path: str, **keywords: Any) -> dict[str, Any]:
        if not self._listening():
            raise ServerFault(f"{path} failed: nobody listens there", gone=True)
        try:
            answer = self._client.request(method, path, **keywords)
        except httpx2.HTTPError as error:
            raise ServerFault(f"{path} failed: {type(error).__name__} {error}", gone=True) from error
        if answer.status_code != 200:
            raise ServerFault(f"{path} was refused with status {answer.status_code}: {told(answer.text)}")
        try:
            content = answer.json()
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}


def told(text: str, limit: int = 400) -> str:
    """What a server's error says, on one line."""
    try:
        content = json.loads(text)
        error = content.get("error", content)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass
    text = " ".join(text.split())
    return text if len(text) <= limit else text[:limit].rstrip() + " ..."
