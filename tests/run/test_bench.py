"""`miles bench engine`: what it refuses, and one measurement whose file `auto` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles.errors import BadInput
from miles.learn.export import export
from miles.learn.tiny import tiny_model, tiny_tokenizer
from miles.run.bench import parse_points


def test_points() -> None:
    assert parse_points("8x16, 64x1") == [(8, 16), (64, 1)]
    for wrong in ("", "8", "8x", "0x4", "8x-1", "8x16;4x4", "9999999x1"):
        with pytest.raises(BadInput, match="give SAMPLESxTOKENS"):
            parse_points(wrong)


def test_answers_that_do_not_fit_are_refused_before_a_model_is_loaded(runs, tools) -> None:
    ended = tools.command("bench", "engine", str(runs.recipe), "--points", "4x600")
    assert ended.code == 2
    assert "600 tokens beside a prompt of" in ended.message
    assert "do not fit the context of 512" in ended.message


@pytest.mark.slow
def test_a_measurement_is_written_and_read_by_auto(vllm_python: str, runs, tools, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = export(tiny_model("llama", head_dim=32), tiny_tokenizer(), tmp_path / "model")
    changes = [f"--model.name={model}", f"--engine.python={vllm_python}", "--engine.kv_cache_gib=0.1"]
    ended = tools.command("bench", "engine", str(runs.recipe), *changes, "--points", "4x4,8x16")
    assert ended.code == 0, ended.err
    kept = json.loads((tmp_path / "cache" / "miles" / "engine.json").read_text())
    ((kind, entry),) = kept.items()
    assert kind == f"{model}, fp32, full weights, cpu, 1 threads"
    assert [(point["samples"], point["tokens"]) for point in entry["points"]] == [(4, 4), (8, 16)]
    assert all(point["vllm_s"] > 0 and point["inprocess_s"] > 0 for point in entry["points"])
    trained = runs.train(model__name=str(model), engine__kind="auto", engine__python=vllm_python, algorithm__steps=1)
    assert trained.code == 0
    assert "`miles bench engine` measured it" in trained.out
