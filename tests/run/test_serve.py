"""`miles serve` and runs that join it: refusals before anything starts, and one service that outlives several runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles.errors import BadInput, ConfigError
from miles.learn.export import export
from miles.learn.tiny import tiny_model, tiny_tokenizer
from miles.run.serve import Options, Taker, serve_command
from miles.web.door import Refused

from .test_vllm_run import RECIPE, processes_with

TOKEN = "0123456789abcdef0123"


def test_what_cannot_be_served_is_refused_before_anything_starts(runs) -> None:
    vllm = {"engine.kind": "vllm"}
    with pytest.raises(ConfigError, match=r'engine.kind = "inprocess" samples inside of the learner'):
        serve_command([runs.recipe], {}, Options(), {})
    with pytest.raises(ConfigError, match=r"engine.url = http://h:1 names servers that run already"):
        serve_command([runs.recipe], {**vllm, "engine.url": "http://h:1"}, Options(), {})
    with pytest.raises(
        BadInput, match=r"0.0.0.0:1 is open to other machines, and there is no token: set MILES_ENGINE_TOKEN"
    ):
        serve_command([runs.recipe], vllm, Options("0.0.0.0:1"), {})
    with pytest.raises(BadInput, match=r"without TLS whoever sees the network sees token and data"):
        serve_command([runs.recipe], vllm, Options("0.0.0.0:1"), {"MILES_ENGINE_TOKEN": TOKEN})
    with pytest.raises(ConfigError, match=r"vLLM is not installed for .*make setup-vllm"):
        serve_command([runs.recipe], {**vllm, "engine.python": sys.executable}, Options(), {})


def test_a_port_that_is_taken_is_said(runs, vllm_python: str) -> None:
    from miles.web.listen import listening

    with listening("127.0.0.1", 0) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BadInput, match=rf"--listen {place} cannot be used: .*choose another port"):
            serve_command([runs.recipe], {"engine.kind": "vllm", "engine.python": vllm_python}, Options(place), {})


class Serving:
    """`miles serve` in a process of its own."""

    def __init__(self, recipe: Path, folder: Path) -> None:
        line = [sys.executable, "-m", "miles", "serve", str(recipe), "--listen", "127.0.0.1:0"]
        environ = {**os.environ, "MILES_ENGINE_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1"}
        self.log = folder / "serve.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, env=environ, cwd=folder)

    def url(self) -> str:
        for _ in range(4000):
            if found := re.search(r"--engine.url (\S+)", self.log.read_text()):
                return found[1]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())


def test_offers_that_cannot_be_taken_are_refused_with_the_reason(tmp_path: Path) -> None:
    taker = Taker(tmp_path)
    for body in (b"", b"[]", b"{", b"[" * 100_000):
        with pytest.raises(Refused, match="the body is no offer of a version") as refused:
            taker.take("run-1", body)
        assert refused.value.status == 400
    facts = {"path": "policy-v1.safetensors", "size": 1, "sha256": "0" * 64}
    offer = {"url": "http://127.0.0.1:1", "token": "t", "name": facts["path"], "files": [facts], "keep": []}
    with pytest.raises(Refused, match=r"policy-v1.safetensors did not come from http://127.0.0.1:1") as refused:
        taker.take("run-1", json.dumps(offer).encode())
    assert refused.value.status == 424


@pytest.mark.slow
def test_a_service_outlives_its_runs_and_the_death_of_its_server(
    vllm_python: str, tmp_path: Path, runs, tools, monkeypatch
) -> None:
    export(tiny_model("llama", head_dim=32), tiny_tokenizer(), tmp_path / "model")
    text = RECIPE.format(model=tmp_path / "model", python=vllm_python).replace("servers = 2", "servers = 1")
    runs.recipe.write_text(text, encoding="utf-8")
    service = Serving(runs.recipe, tmp_path)
    try:
        url = service.url()
        given = {"engine__url": url, "algorithm__steps": 2}
        assert "asks for a token" in runs.train("none", **given).message
        monkeypatch.setenv("MILES_ENGINE_TOKEN", TOKEN)
        wrong = runs.train("wrong", **given, lora__rank=64)
        assert wrong.code == 2
        assert "2 slots for adapters of rank 8, and this run needs 2 of rank 64" in wrong.message
        assert runs.train("one", **given).code == 0
        server = next(
            pid
            for pid in processes_with(str(tmp_path / "model"))
            if b"api_server" in (line := Path(f"/proc/{pid}/cmdline").read_bytes()) and b"guardian" not in line
        )
        os.kill(server, signal.SIGKILL)  # between two runs: the service starts it again
        assert runs.train("two", **given, publish__serve="127.0.0.1:0").code == 0  # as one without a common disk
        first, second = (tools.rows(runs[name]) for name in ("one", "two"))
        assert [row["reward/mean"] for row in first] == [row["reward/mean"] for row in second]
        assert "vllm-0 ended with code" in service.log.read_text()
        assert all(abs(row["kl/behavior"]) < 1e-5 for row in first + second if "kl/behavior" in row)
    finally:
        service.process.send_signal(signal.SIGTERM)
        code = service.process.wait(60)
    assert code == 143
    assert not processes_with(str(tmp_path / "model"))
