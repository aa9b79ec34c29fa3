from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import errors

from miles.config.schema import Model
from miles.errors import ModelError
from miles.learn import tiny
from miles.learn.hub import Hub, one_line
from miles.learn.locate import Source, locate

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(Hub):
    """Answers with what it was given: file names or an error, and the commit that the cache holds."""

    def __init__(self, answer: object = (), cached: str | None = None, offline: bool = False) -> None:
        self.answer, self.cached, self.off = answer, cached, offline

    @property
    def offline(self) -> bool:
        return self.off

    def files(self, name: str, revision: str | None) -> list[str]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return list(self.answer)

    def config(self, name: str, revision: str | None) -> Path:
        return Path("snapshots") / COMMIT / "config.json"

    def cached_config(self, name: str, revision: str | None) -> Path | None:
        return Path("snapshots") / self.cached / "config.json" if self.cached else None


def answered(kind: type[errors.HfHubHTTPError], text: str = "no") -> errors.HfHubHTTPError:
    return kind(text, response=SimpleNamespace(headers={}, request=None))


def refused(hub: Hub, **section: object) -> str:
    with pytest.raises(ModelError) as caught:
        locate(Model(**{"name": "some/model", **section}), hub=hub)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_name_on_the_hub_becomes_one_commit():
    hub = FakeHub(["config.json", "model.safetensors"], cached="older")
    assert locate(Model(name="some/model"), hub=hub) == Source("some/model", COMMIT, offline=False)


def test_pickled_weights_on_the_hub_are_refused_before_they_are_downloaded():
    hub = FakeHub(["config.json", "pytorch_model.bin"])
    assert "its weights are pickled (pytorch_model.bin)" in refused(hub)
    assert locate(Model(name="some/model"), weights=False, hub=hub).commit == COMMIT


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (answered(errors.RepositoryNotFoundError), "neither a folder here nor a model on the hub (or it is private"),
        (answered(errors.GatedRepoError), "is gated: accept its terms on the hub and log in"),
        (
            answered(errors.RevisionNotFoundError),
            "model.revision = 'v2': 'some/model' has no such branch, tag or commit",
        ),
        (answered(errors.RemoteEntryNotFoundError), "has no config.json on the hub"),
        (errors.HFValidationError("Repo id must\nuse"), "is neither a folder nor a hub id: Repo id must use"),
    ],
)
def test_each_answer_of_the_hub_is_one_paragraph_even_when_a_copy_is_cached(error, message):
    assert message in refused(FakeHub(error, cached=COMMIT), revision="v2")


@pytest.mark.parametrize(
    ("hub", "reason"),
    [
        (FakeHub(offline=True), "the hub is switched off (HF_HUB_OFFLINE)"),
        (
            FakeHub(answered(errors.HfHubHTTPError, "500 Server Error")),
            "the hub answered with an error (500 Server Error)",
        ),
        (FakeHub(errors.HTTPError("Name not known")), "the hub cannot be reached (Name not known)"),
        (FakeHub(TimeoutError("timed out")), "the hub cannot be reached (timed out)"),
    ],
)
def test_without_a_hub_the_cache_is_used_and_said_so(hub, reason, caplog):
    message = refused(hub, name="smollm2-135m-instruct")
    assert f"is no folder here, {reason}, and no copy of it is in the hub's cache on this machine" in message
    assert "Did you mean 'smollm2-135m-instruct-q4'?" in message
    hub.cached = COMMIT
    with caplog.at_level(logging.WARNING):
        assert locate(Model(name="some/model"), hub=hub) == Source("some/model", COMMIT, offline=True)
    assert f"{reason}: some/model comes from the hub's cache on this machine, commit {COMMIT}" in caplog.text


def test_a_pinned_commit_is_enough_to_run_code():
    section = Model(name="some/model", trust_remote_code=True, revision=COMMIT)
    assert locate(section, hub=FakeHub(["model.safetensors"])).commit == COMMIT


def test_long_errors_are_cut():
    assert one_line(ValueError("a\n  b")) == "a b"
    assert one_line(ValueError()) == "ValueError"
    assert one_line(ValueError("x" * 500)) == "x" * 300 + " ..."


# --- the client against a server on this machine -----------------------------------------------------------------

# The hub's client reads its address and caches from the environment when it is imported, hence the processes.
HUB = '''
import hashlib, http.server, json, logging, os, sys, threading
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FOLDER = Path(sys.argv[1])


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's protocol as its client needs for one model at one commit."""

    asked = []

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        Hub.asked.append(self.path)
        path = self.path.partition("?")[0]
        names = sorted(file.name for file in FOLDER.iterdir())
        if path.startswith("/api/models/some/broken"):
            return self.answer(500)
        if not path.startswith(("/api/models/some/model", "/some/model/")):
            return self.answer(404, X_Error_Code="RepoNotFound")
        if "nowhere" in path:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        if path.startswith("/api/models/some/model/tree"):
            tree = [{"type": "file", "path": n, "size": (FOLDER / n).stat().st_size, "oid": "0" * 40} for n in names]
            return self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
        if path.startswith("/api/models/some/model"):
            info = {"id": "some/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            return self.answer(200, json.dumps(info).encode(), Content_Type="application/json")
        file = FOLDER / path.rpartition("/")[2]
        if not file.is_file():
            return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        body = file.read_bytes()
        tag = hashlib.sha256(body).hexdigest()
        return self.answer(200, body, ETag='"' + tag + '"', X_Repo_Commit=COMMIT)

    do_HEAD = do_GET

    def log_message(self, *arguments):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_address[1]}"

from miles.config.schema import Model
from miles.errors import ModelError
from miles.learn.load import describe, load_config, load_generation_config, load_model, load_tokenizer
from miles.learn.locate import locate


def refused(**section):
    try:
        load_model(Model(**section), seed=0)
    except ModelError as error:
        print("REFUSED", error)


section = Model(name="some/model")
print("IDS", load_tokenizer(section).encode("1 + 2"))
assert not any("safetensors" in path for path in Hub.asked), "the tokenizer is loaded before any weight"
print("CONFIG", load_config(section).num_hidden_layers, load_generation_config(section).eos_token_id)
print("HASH", describe(load_model(section, seed=0))["weights_sha256"])
assert {path.rpartition("/")[2] for path in Hub.asked if "/main/" in path} == {"config.json"}, Hub.asked
print("SOURCE", locate(section))
print("COMMIT", describe(load_model(section, seed=0))["commit"])
refused(name="some/model", revision="nowhere")
refused(name="smollm2-135m-instruct")
refused(name="some/broken")
server.shutdown()
server.server_close()
print("AGAIN", describe(load_model(section, seed=0))["weights_sha256"])
print("SOURCE", locate(section))
'''

OFFLINE = """
from miles.config.schema import Model
from miles.errors import ModelError
from miles.learn.load import load_model, load_tokenizer

print("IDS", load_tokenizer(Model(name="some/model")).encode("1 + 2"))
try:
    load_tokenizer(Model(name="some/other"))
except ModelError as error:
    print("REFUSED", error)
"""


def run(script: str, home: Path, *arguments: str, **environment: str) -> tuple[list[str], str]:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.slow
def test_a_hub_id_loads_at_one_commit_then_from_the_cache_and_its_failures_are_explained(tmp_path):
    folder = tmp_path / "served"
    tiny.tiny_model("qwen3", seed=2).save_pretrained(folder)
    tiny.tiny_tokenizer().save_pretrained(folder)

    out, log = run(HUB, tmp_path / "home", str(folder))
    ids, config, digest, source, seen, no_revision, no_model, broken, again, source_again = out
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert ids == f"IDS {tiny.tiny_tokenizer().encode('1 + 2')}"
    assert config == "CONFIG 2 2"
    assert seen == f"COMMIT {commit}"
    assert source == f"SOURCE Source(place='some/model', commit='{commit}', offline=False)"
    assert "model.revision = 'nowhere': 'some/model' has no such branch, tag or commit" in no_revision
    assert "neither a folder here nor a model on the hub" in no_model
    assert "Did you mean 'smollm2-135m-instruct-q4'?" in no_model
    assert "the hub answered with an error" in broken
    assert again == digest.replace("HASH", "AGAIN")
    assert source_again.endswith("offline=True)")
    assert "the hub cannot be reached" in log
    assert f"some/model comes from the hub's cache on this machine, commit {commit}" in log

    out, _ = run(OFFLINE, tmp_path / "home", HF_HUB_OFFLINE="1")
    assert out[0] == ids
    assert "the hub is switched off (HF_HUB_OFFLINE), and no copy of it is in the hub's cache" in out[1]


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
    ran = "own code"
"""

TRUST = """
import sys
from miles.config.schema import Model
from miles.learn.load import load_model

print(load_model(Model(name=sys.argv[1], trust_remote_code=True), seed=0).ran)
"""


@pytest.mark.slow
def test_a_models_own_code_runs_when_the_recipe_says_so(tmp_path):
    folder = tmp_path / "own"
    tiny.tiny_model("llama", seed=2).save_pretrained(folder)
    (folder / "own.py").write_text(CODE)
    places = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": places}))
    out, _ = run(TRUST, tmp_path / "home", str(folder))
    assert out == ["own code"]
