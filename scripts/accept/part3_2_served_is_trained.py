"""After three publishes of every parameter, tied and untied, fp32 and bf16, served and learner log-probs agree; a publish that is held back is found."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from common import check, finish, run
from torch import nn

from miles.engine.fleet import Fleet, Server
from miles.engine.inprocess import InProcessEngine
from miles.engine.vllm_flags import ServerPlan, find_python
from miles.engine.vllm_routes import ServerRoutes
from miles.engine.vllm_server import VllmServer
from miles.learn.export import export
from miles.learn.learner import Learner
from miles.learn.load import load_model, load_tokenizer
from miles.learn.locate import locate
from miles.publish.canary import Difference, Tolerance
from miles.publish.carriers import FileCarrier
from miles.publish.files import WeightFiles
from miles.publish.vllm import VllmPublisher
from miles.run.agreement import sample_groups
from miles.run.prepare import Inputs, prepare
from miles.run.recipes import inspect
from miles.run.vllm import DTYPES, canary_ids

MODEL = "smollm2-135m-instruct-q4"
LEARNING_RATE = 1e-3
SETTINGS = {
    "data.source": "task:addition", "data.system_prompt": "You answer with a single number.", "algorithm.name": "grpo",
    "algorithm.steps": 4, "rollout.max_new_tokens": 8, "rollout.group_size": 4, "algorithm.groups_per_step": 2,
    "learner.learning_rate": LEARNING_RATE, "run.threads": 2,
}  # fmt: skip
TOKENS = 160  # that are compared after each publish; the publisher compares 32


class KeepsItsWeights(ServerRoutes):
    """Calls its weights by the new version and does not take them: a publish that was held back."""

    def load_weights(self, file: Path, tensors: int, size: int, version: str) -> None:
        self.name_version(version)


def main() -> None:
    done = run([sys.executable, "-m", "pytest", "-q", "tests/publish/test_vllm_real.py"])
    passed = " passed" in done.stdout and "skipped" not in done.stdout and "failed" not in done.stdout
    check("the short form, and adapters, on tiny models", done.stdout.strip().splitlines()[-1], passed)
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        for tied in (True, False):
            model = start_model(Path(folder), tied)
            for dtype in ("fp32", "bf16"):
                published(Path(folder), model, tied, dtype)
    finish()


def start_model(folder: Path, tied: bool) -> str:
    """A name or folder of the model; untied: its output head is a parameter of its own."""
    if tied:
        return MODEL
    section = inspect([], {**SETTINGS, "model.name": MODEL}, {}).recipe.model
    model = load_model(section, seed=0)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.get_input_embeddings().weight.detach().clone())
    return str(export(model, load_tokenizer(section), folder / "untied"))


def published(folder: Path, name: str, tied: bool, dtype: str) -> None:
    """Three updates of the learner, each published and compared; then one that is held back."""
    resolved = inspect([], {**SETTINGS, "model.name": name}, {})
    inputs = prepare(resolved.recipe, resolved.row)
    learner = Learner(load_model(resolved.recipe.model, seed=0), resolved.recipe, device="cpu")
    learner.canary_ids = canary_ids(inputs)
    ids = compared_ids(inputs)
    title = f"{'tied' if tied else 'untied'}, {dtype}"
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        server = serve(learner, dtype, root, stack)
        routes = stack.enter_context(ServerRoutes(server.url))
        publish = publisher_for(server, root, dtype).publish
        learned = []
        for _ in range(3):
            changed = train(learner, inputs)
            before = routes.logprobs(ids)
            publish(learner.policy_update())
            learned.append(changed)
            found, moved = judge(learner, routes.logprobs(ids), before, ids)
            say(f"{title}, version {learner.version}", found, moved, Tolerance.of(dtype))
        check(f"{title}: parameters that changed at every version", f"{min(learned):.0%}", min(learned) == 1.0)
        train(learner, inputs)
        before = routes.logprobs(ids)
        publisher_for(server, root, dtype, connect=KeepsItsWeights, verify=False).publish(learner.policy_update())
        found, _ = judge(learner, routes.logprobs(ids), before, ids)
        check(f"{title}: a publish that was held back, not verified, is seen here", shown(found), not Tolerance.of(dtype).holds(found))  # fmt: skip


def serve(learner: Learner, dtype: str, root: Path, stack: ExitStack) -> VllmServer:
    source = locate(learner.recipe.model)
    plan = ServerPlan(source.place, source.commit, dtype, 16, 512, 0.5, root, threads=2)
    server = VllmServer(plan, find_python(None), root / "socket", root / "vllm.log")
    stack.callback(server.stop)
    server.start()
    server.wait_ready(600)
    return server


def publisher_for(
    server: VllmServer, root: Path, dtype: str, connect: Any = ServerRoutes, **keys: Any
) -> VllmPublisher:
    fleet = Fleet([Server("vllm-0", server.url, 16)])
    return VllmPublisher(
        fleet, FileCarrier(WeightFiles(root, DTYPES[dtype])), connect, tolerance=Tolerance.of(dtype), **keys
    )


def compared_ids(inputs: Inputs) -> tuple[int, ...]:
    """Prompts of the run, one after the other."""
    ids = [token for row in inputs.train[:8] for token in inputs.renderer.prompt(row).ids]
    return tuple(ids[:TOKENS])


def train(learner: Learner, inputs: Inputs) -> float:
    """One update; the part of the parameters that it changed."""
    before = [parameter.detach().clone() for parameter in learner.model.parameters()]
    engine = InProcessEngine(
        learner.model, inputs.tokenizer, version=lambda: 0, end_token_ids=inputs.sampling.stop_token_ids
    )
    groups = asyncio.run(sample_groups(engine, inputs, 0))
    step = learner.pack(groups)
    learner.update(step, learner.score(step))
    changed = [not torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True)]
    return sum(changed) / len(changed)


def judge(
    learner: Learner, served: Sequence[float], before: Sequence[float], ids: tuple[int, ...]
) -> tuple[Difference, Difference]:
    """(served against learner, served against served before)."""
    with torch.no_grad():
        table = learner.model(torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)
    ours = table[range(len(ids) - 1), list(ids[1:])].tolist()
    return Difference.between(served, ours), Difference.between(served, before)


def say(title: str, found: Difference, moved: Difference, tolerance: Tolerance) -> None:
    check(f"{title}: served against learner", shown(found), tolerance.holds(found))
    enough = moved.mean > 0.3 and moved.mean >= 4 * found.mean
    check(f"{title}: moved on average by > 0.3 and 4 times that", f"{moved.mean:.3f}", enough)


def shown(found: Difference) -> str:
    return f"mean {found.mean:.2g}, 99th percentile {found.high:.2g}, worst {found.worst:.2g}"


if __name__ == "__main__":
    main()
