"""A run joins a service, sees whether it fits, and is told what to do where it does not."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import msgspec
import pytest

from miles.engine.joining import Needs, Service, check_fit, misfits, shared_folder
from miles.engine.vllm_flags import AdapterSlots
from miles.engine.vllm_routes import Access
from miles.errors import BadInput, ConfigError, EngineError

behind = sys.modules["miles_engine_behind"]
TOKEN = "0123456789abcdef0123"
NEEDS = Needs("tiny", "d", "fp32", 512, None)


def test_what_fits_and_what_does_not(tmp_path: Path) -> None:
    full = behind.facts_of(tmp_path, "s").servers[0]
    adapters = msgspec.structs.replace(full, slots=3, slot_rank=8, targets=["k_proj", "q_proj"])
    lora = dataclasses.replace(NEEDS, adapters=AdapterSlots(8, 3, ("q_proj",)))
    assert list(misfits(full, NEEDS)) == []
    assert list(misfits(adapters, lora)) == []
    wrong = [
        (full, dataclasses.replace(NEEDS, digest="e"), "has another config"),
        (full, dataclasses.replace(NEEDS, dtype="bf16"), "weights in fp32, and engine.param_dtype is bf16"),
        (full, dataclasses.replace(NEEDS, context=513), "reads 512 tokens, and this run may need 513: set engine.context = 512"),
        (msgspec.structs.replace(full, logprobs_mode="raw_logprobs"), NEEDS, "gives raw_logprobs"),
        (adapters, NEEDS, "takes LoRA adapters, and this run publishes full weights"),
        (full, lora, "takes full weights, and this run publishes adapters of lora.rank = 8"),
        (adapters, dataclasses.replace(NEEDS, adapters=AdapterSlots(9, 3)), "3 slots for adapters of rank 8, and this run needs 3 of rank 9"),
        (adapters, dataclasses.replace(NEEDS, adapters=AdapterSlots(8, 4)), "this run needs 4 of rank 8"),
        (adapters, dataclasses.replace(NEEDS, adapters=AdapterSlots(8, 2, ("o_proj", "q_proj"))), "its adapters have no o_proj,"),
    ]  # fmt: skip
    for facts, needs, message in wrong:
        (problem,) = misfits(facts, needs)
        assert message in problem
    with pytest.raises(ConfigError) as error:
        check_fit("http://h:1", behind.facts_of(tmp_path, "a", "b"), dataclasses.replace(NEEDS, dtype="bf16"))
    assert [problem.split(":")[2] for problem in error.value.problems] == ["1, server a", "1, server b"]


def test_the_folder_must_be_the_same_one(tmp_path: Path) -> None:
    facts = behind.facts_of(tmp_path, "s")
    assert shared_folder("u", facts, None) == shared_folder("u", facts, tmp_path) == tmp_path
    with pytest.raises(ConfigError, match=r"publish.directory = /elsewhere is not the folder"):
        shared_folder("u", facts, Path("/elsewhere"))
    (tmp_path / behind.MARK).unlink()
    with pytest.raises(ConfigError, match=r"does not share that folder: start it with --publish.directory"):
        shared_folder("u", facts, None)


def test_joining_waiting_and_leaving(tmp_path: Path) -> None:
    with behind.port({"s": "unix:/none"}, tmp_path, [TOKEN]) as url:
        first, second = (Service(url, Access(TOKEN, run)) for run in ("one", "two"))
        assert first.join(0).servers[0].name == "s"
        assert first.server_url("s") == f"{url}/servers/s"
        with pytest.raises(EngineError, match=r"belong to another run, .*; end that run, or start another service"):
            second.join(0)
        with pytest.raises(EngineError, match="belong to another run"):
            second.stay()
        first.stay()
        first.leave()
        first.leave()  # again: nothing to give back, and no error
        second.stay()  # as after a service that was started anew: it is joined
        with pytest.raises(EngineError, match="belong to another run"):
            first.join(0)
        for token in (None, TOKEN[:-1] + "x"):
            with pytest.raises(
                BadInput, match=r"asks for a token, .* set MILES_ENGINE_TOKEN or engine.token_file"
            ) as error:
                Service(url, Access(token, "three")).join(0)
            assert token is None or token not in str(error.value)
            assert token is None or token not in repr(Access(token))


def test_what_is_no_service_is_said(tmp_path: Path) -> None:
    stand_in = behind.StandIn(tmp_path / "s.sock")
    with (
        stand_in.serving(),
        behind.port({"s": f"unix:{stand_in.socket}"}, tmp_path) as url,
        pytest.raises(BadInput, match=r"answers, but not as `miles serve` does \(status 404"),
    ):
        Service(f"{url}/other", Access(run="x")).join(0)
    with pytest.raises(EngineError, match=r"nobody answers at engine.url http://127.0.0.1:9 .*start `miles serve"):
        Service("http://127.0.0.1:9", Access(run="x")).join(0)
    with pytest.raises(BadInput, match=r"engine.ca_file .* cannot be used"):
        Service("https://127.0.0.1:9", Access(run="x", ca_file=tmp_path / "none.pem")).join(0)
