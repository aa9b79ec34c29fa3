"""Start, settings, messages and end of server processes; a stand-in command takes vLLM's place where that is enough."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from miles.engine import guardian
from miles.engine.vllm_flags import ROOT_VARIABLE, AdapterSlots, ServerPlan, command, environment, find_python
from miles.engine.vllm_server import VllmServer, check_installed
from miles.errors import ConfigError, EngineError

LONG = "import os, subprocess, sys, time; c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print(os.getpid(), c.pid, flush=True); time.sleep(60)"


def plan(tmp_path: Path, **keys: object) -> ServerPlan:
    return ServerPlan(**{
        "model": "m", "revision": None, "dtype": "fp32", "max_batch": 32, "context": 128, "kv_cache_gib": None,
        "publish_root": tmp_path, **keys,
    })  # fmt: skip


def test_the_command_line_names_every_flag_that_is_relied_on(tmp_path: Path) -> None:
    line = command(plan(tmp_path), "/py", Path("/s.sock"))
    assert line[:3] == ["/py", "-m", "vllm.entrypoints.openai.api_server"]
    options = dict(itertools.pairwise(line))
    assert options["--logprobs-mode"] == "processed_logprobs"
    assert options["--generation-config"] == "vllm"
    assert options["--uds"] == "/s.sock"
    assert options["--kv-cache-memory-bytes"] == str(2**30)
    assert options["--weight-transfer-config"] == '{"backend": "miles_file"}'
    assert "--enable-scale-out" in line
    assert "--host" not in line
    assert "--enable-lora" not in line


def test_adapters_get_the_next_slot_size_and_no_weight_transfer(tmp_path: Path) -> None:
    line = command(plan(tmp_path, adapters=AdapterSlots(17, 3), cpu=False), "/py", Path("/s.sock"))
    options = dict(itertools.pairwise(line))
    assert (options["--max-lora-rank"], options["--max-loras"]) == ("32", "3")
    assert options["--max-cudagraph-capture-size"] == "32"
    assert "--weight-transfer-config" not in line
    assert "--enforce-eager" not in line
    assert [AdapterSlots(rank, 1).slot_rank for rank in (1, 2, 8, 16, 512)] == [1, 8, 8, 16, 512]


def test_the_environment_never_allows_insecure_serialization(tmp_path: Path) -> None:
    given = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "OMP_NUM_THREADS": "7", "HOME": "/h"}
    found = environment(plan(tmp_path, threads=2), given)
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in found
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in found
    assert (found["OMP_NUM_THREADS"], found["HOME"], found["VLLM_PLUGINS"]) == ("2", "/h", "miles")
    assert found[ROOT_VARIABLE] == str(tmp_path)
    assert environment(plan(tmp_path, adapters=AdapterSlots(8, 2)), {})["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_an_interpreter_without_vllm_is_told_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vLLM is not installed for .*make setup-vllm"):
        check_installed(sys.executable)
    with pytest.raises(ConfigError, match=r"is no Python that runs .*make setup-vllm"):
        check_installed(str(tmp_path / "nothing"))
    assert find_python("~/x") == str(Path("~/x").expanduser())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ('[["0.17.0"], ["miles"]]', r"has vLLM 0.17.0; Miles knows the routes of 0.32 and 0.33: run `make setup-vllm`"),
        ('[["0.32.0"], []]', r"has vLLM 0.32.0, but not Miles beside it"),
        ("[[], []]", r"vLLM is not installed for"),
        ("nothing", r"is no Python that runs"),
    ],
)
def test_an_environment_that_cannot_serve_is_told_why(answer: str, message: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{answer}'\n", encoding="utf-8")
    python.chmod(0o700)
    with pytest.raises(ConfigError, match=message):
        check_installed(str(python))


def stand_in(tmp_path: Path, script: str) -> VllmServer:
    """A server whose interpreter is a script that ignores its arguments."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{script}"\n', encoding="utf-8")
    python.chmod(0o700)
    return VllmServer(plan(tmp_path), str(python), tmp_path / "s", tmp_path / "log" / "x.log", "x")


def test_a_server_that_ends_at_its_start_is_an_error_with_its_last_lines_and_a_way_out(tmp_path: Path) -> None:
    server = stand_in(tmp_path, "print('CUDA out of memory'); raise SystemExit(3)")
    server.start()
    with pytest.raises(
        EngineError, match=r"x ended with code 3 .*does not fit: lower .*x.log ends with:\nCUDA out of memory"
    ):
        server.wait_ready(30)


def test_a_server_that_does_not_become_ready_is_ended(tmp_path: Path) -> None:
    server = stand_in(tmp_path, "import time; time.sleep(60)")
    server.start()
    with pytest.raises(EngineError, match=r"was not ready after 0.3 s \(engine.start_timeout_s\)"):
        server.wait_ready(0.3)
    assert server.exit_code is not None


def test_a_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long: set TMPDIR"):
        VllmServer(plan(tmp_path), "p", tmp_path / ("x" * 100), tmp_path / "log")


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state == "Z"


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(400):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen in 20 s")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
@pytest.mark.parametrize(
    "ending", ["starter killed", "starter killed, server frozen", "guardian killed", "server killed"]
)
def test_no_process_outlives_its_starter(ending: str, tmp_path: Path) -> None:
    """A starter, its guardian, the command, and a child of the command: whichever is killed, none stays."""
    code = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-I', {guardian.__file__!r}, sys.executable, '-c', {LONG!r}], stdin=subprocess.PIPE)\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pids = [int(pid) for line in (starter.stdout.readline(), starter.stdout.readline()) for pid in line.split()]
        guard, server, child = pids
        try:
            if ending == "guardian killed":
                os.kill(guard, signal.SIGKILL)
                wait_for(lambda: gone(server))
                os.kill(child, signal.SIGKILL)  # the system ends the command alone then
            elif ending == "server killed":
                os.kill(server, signal.SIGKILL)
            else:
                if "frozen" in ending:
                    os.kill(server, signal.SIGSTOP)
                starter.kill()
            wait_for(lambda: all(gone(pid) for pid in pids))
        finally:
            starter.kill()
