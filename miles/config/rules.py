"""Rules between keys that need no algorithm, model or data: what contradicts itself, and what has no effect."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from math import isqrt

from miles.config.names import is_hub_id, is_local
from miles.config.schema import Recipe, Resources

ADAPTER_LEARNING_RATE = 3e-5
"""Below it adapters hardly move; measured on the quickstart, where 1e-5 stayed at a reward of 0.03 and 2e-4 reached 0.98."""
RUN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
HOST_PORT = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}")
URL = re.compile(r"https?://[^/@\s,]+/?(\s*,\s*https?://[^/@\s,]+/?)*")
PASSWORD = re.compile(r"\w+://[^/@]*:[^/@]+@")
COMMIT = re.compile(r"[0-9a-f]{40}")


def rule_problems(recipe: Recipe, given: Collection[str] = ()) -> list[str]:
    """One sentence for each contradiction. `given` names keys whose value is a Python object beside the recipe."""
    return [problem for rule in PROBLEM_RULES for problem in rule(recipe) if not _about(problem, given)]


def rule_warnings(recipe: Recipe, chosen: Collection[str], given: Collection[str] = ()) -> list[str]:
    """One sentence for each key of `chosen` (those that the user set) that does nothing, and for settings rarely meant."""
    unused = [f"{key} has no effect: {why}." for key, why in _unused(recipe, given) if key in chosen]
    return unused + [warning for rule in WARNING_RULES for warning in rule(recipe)]


def _about(problem: str, given: Collection[str]) -> bool:
    if "reward.functions" in given and problem.startswith("reward.weights has"):
        return True  # the functions are counted where they are built
    return any(problem.startswith(f"{key} is not set") for key in given)


def _required(recipe: Recipe) -> Iterator[str]:
    if not recipe.model.name:
        yield "model.name is not set: give a hub id, a folder, or tiny-random:llama."
    if not recipe.data.source:
        yield "data.source is not set: give a .jsonl, .parquet or .csv file, a hub id, or task:NAME."


def _length(recipe: Recipe) -> Iterator[str]:
    steps, epochs = recipe.algorithm.steps, recipe.data.epochs
    if steps is None and epochs is None:
        yield "Neither algorithm.steps nor data.epochs is set: set one of them, it says when training ends."
    if steps is not None and epochs is not None:
        yield (
            f"algorithm.steps = {steps} and data.epochs = {epochs} both say when training ends: "
            'leave one of them out (or set it to "none").'
        )


def _minibatches(recipe: Recipe) -> Iterator[str]:
    groups, parts = recipe.algorithm.groups_per_step, recipe.learner.minibatches
    if groups % parts == 0:
        return
    divisors = _divisors(groups)
    lower, higher = max(n for n in divisors if n < parts), [n for n in divisors if n > parts]
    legal = f"{lower} or {higher[0]}" if higher else f"{lower}"
    multiples = [n for n in (groups // parts * parts, (groups // parts + 1) * parts) if n]
    yield (
        f"learner.minibatches = {parts} does not divide algorithm.groups_per_step = {groups}: set learner.minibatches to "
        f"{legal}, or algorithm.groups_per_step to {' or '.join(map(str, multiples))}."
    )


def _divisors(number: int) -> list[int]:
    """In ascending order; of absurdly large numbers only some."""
    small = [n for n in range(1, min(isqrt(number), 10**5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _rewards(recipe: Recipe) -> Iterator[str]:
    functions, weights = recipe.reward.functions, recipe.reward.weights
    if weights and len(weights) != len(functions):
        yield (
            f"reward.weights has {len(weights)} numbers and reward.functions {len(functions)} functions: "
            "give one weight for each function, or leave reward.weights out."
        )
    elif weights and not any(weights):
        yield "reward.weights are all 0, so that every reward is 0: give one of them another value."


def _overlong(recipe: Recipe) -> Iterator[str]:
    limit = recipe.rollout.max_new_tokens
    if recipe.reward.overlong and recipe.reward.overlong_buffer is None and limit < 4:
        yield (
            f"reward.overlong needs a buffer of tokens, and a quarter of rollout.max_new_tokens = {limit} is less than one: "
            "set reward.overlong_buffer, or raise rollout.max_new_tokens."
        )


def _sampling(recipe: Recipe) -> Iterator[str]:
    if "" in recipe.rollout.stop:
        yield "rollout.stop holds an empty text, which would end every completion at once: remove it."


def _remote_code(recipe: Recipe) -> Iterator[str]:
    model = recipe.model
    if model.trust_remote_code and not is_local(model.name) and not COMMIT.fullmatch(model.revision or ""):
        yield (
            f"model.trust_remote_code runs code from the hub, and model.revision = {model.revision or 'none'} does not pin it: "
            "set model.revision to a commit of 40 hexadecimal digits that you have read, or model.trust_remote_code to false."
        )


def _evaluation(recipe: Recipe) -> Iterator[str]:
    rows, run = recipe.eval.rows, recipe.run
    if rows == 0 and recipe.eval.source is not None:
        yield (
            f"eval.rows = 0 turns evaluation off, and eval.source = {recipe.eval.source} names rows for it: leave one of them out."
        )
    if rows == 0 and run.keep_best:
        yield "run.keep_best needs evaluations, and eval.rows = 0 turns them off: set eval.rows above 0."
    if run.stop_at_reward is not None and (rows == 0 or recipe.eval.every is None):
        yield (
            f"run.stop_at_reward = {run.stop_at_reward} needs evaluations during training: set eval.every, and eval.rows above 0."
        )


def _rows(recipe: Recipe) -> Iterator[str]:
    rows, groups = recipe.data.max_rows, recipe.algorithm.groups_per_step
    if rows is not None and rows < groups:
        yield (
            f"data.max_rows = {rows} is fewer than algorithm.groups_per_step = {groups}, and a prompt stands at most once in a step: "
            f"lower algorithm.groups_per_step to at most {rows}, or raise data.max_rows."
        )


def _adapters(recipe: Recipe) -> Iterator[str]:
    lora = recipe.lora
    if lora.rank is not None and not lora.targets:
        yield 'lora.targets is empty, so that nothing would be trained: name layers, or leave it out for ["all-linear"].'
    if lora.path is not None and lora.rank is None:
        yield f"lora.path = {lora.path} needs lora.rank, the rank of that adapter: set it, or leave lora.path out."
    yield from _few_bits(recipe)
    if recipe.reward.model_place == "learner":
        if recipe.reward.model is None:
            yield 'reward.model_place = "learner" needs reward.model: name the reward model, or leave reward.model_place out.'
        elif lora.rank is None:
            yield (
                'reward.model_place = "learner" puts the reward model on the frozen base of adapters, and lora.rank is not set: set '
                "lora.rank, or leave reward.model_place out, so that it scores with weights of its own."
            )


def _few_bits(recipe: Recipe) -> Iterator[str]:
    bits = recipe.lora.base_bits
    if bits is None:
        return
    if recipe.lora.rank is None:
        yield f"lora.base_bits = {bits} stores the frozen base of adapters, and lora.rank is not set: set it, or leave lora.base_bits out."
    if recipe.engine.kind == "vllm":
        yield (
            f'lora.base_bits = {bits} with engine.kind = "vllm": servers hold the base as it is, so they would sample from another '
            'policy than the one that is trained: use engine.kind = "inprocess", or leave lora.base_bits out.'
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        yield (
            f"lora.base_bits = {bits} needs the package bitsandbytes: pip install 'miles-rl[quantized]', or leave lora.base_bits out."
        )


def _ranks(recipe: Recipe) -> Iterator[str]:
    learner = recipe.learner
    if learner.compile and learner.gradient_checkpointing == "selective":
        yield (
            'learner.gradient_checkpointing = "selective" picks operations one by one, which learner.compile = true fuses: use '
            "true with it, or leave one of them out."
        )
    if recipe.parallel.context > 1:
        yield (
            f"parallel.context = {recipe.parallel.context}: one sequence cannot be split over ranks yet: leave it at 1. Long "
            "sequences fit with learner.gradient_checkpointing = true and more ranks in parallel.shard."
        )


def _apart(recipe: Recipe) -> bool:
    """Whether collectors may be other processes than the learner, which then brings its weights to their engines."""
    return recipe.buffer.url is not None or recipe.run.launcher != "local"


MOST_SERVED_RANK = 512
"""Of LoRA adapters on vLLM."""


NATIVE = ("nccl", "ipc")


def _native(recipe: Recipe) -> Iterator[str]:
    kind, ranks = recipe.publish.kind, recipe.parallel.shard * recipe.parallel.replicate
    if recipe.lora.rank is not None:
        yield f'publish.kind = "{kind}" sends all weights, and lora.rank = {recipe.lora.rank} trains an adapter: leave publish.kind out.'
    if recipe.engine.url:
        yield f'publish.kind = "{kind}" is for servers that the run starts, and engine.url names others: leave publish.kind out.'
    if ranks > 1:
        yield f'publish.kind = "{kind}" sends from one rank, and the recipe has {ranks}: leave publish.kind out, which gathers them.'


def _shelf(recipe: Recipe, place: str) -> Iterator[str]:
    host, _, port = place.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        yield f"publish.serve = {place!r}: write HOST:PORT, an address of this machine that the services of engine.url reach."
    if not recipe.engine.url:
        yield (
            f"publish.serve = {place!r} is for services on other machines, and engine.url names none: leave it out; servers of this "
            "machine read its files."
        )
    if recipe.publish.directory is not None:
        yield (
            f"publish.serve = {place!r} and publish.directory = {recipe.publish.directory!r} are two ways to bring weights to "
            "services: keep publish.directory where they share a disk with this machine, and publish.serve where they do not."
        )


def _servers(recipe: Recipe) -> Iterator[str]:
    engine, publish = recipe.engine, recipe.publish
    if engine.kind == "inprocess":
        if publish.kind in NATIVE or (publish.kind in ("files", "adapter") and not _apart(recipe)):
            yield (
                f'publish.kind = "{publish.kind}" brings weights to servers, and engine.kind = "{engine.kind}" has none: leave '
                'publish.kind out, or set engine.kind = "vllm".'
            )
        return
    if engine.kind == "auto":
        yield from _handed_over(recipe)
    elif publish.kind == "inprocess":
        yield 'publish.kind = "inprocess" shares weights, which a server of engine.kind = "vllm" cannot: leave publish.kind out.'
    if publish.kind == "adapter" and recipe.lora.rank is None:
        yield 'publish.kind = "adapter" needs adapters: set lora.rank, or leave publish.kind out.'
    if publish.kind == "files" and recipe.lora.rank is not None:
        yield (
            f'publish.kind = "files" would merge the adapter of lora.rank = {recipe.lora.rank} into the served weights, where '
            "rounding loses most of it: leave publish.kind out, which publishes the adapter itself."
        )
    if publish.kind in NATIVE:
        yield from _native(recipe)
    if publish.serve is not None:
        yield from _shelf(recipe, publish.serve)
    if recipe.lora.rank is not None and recipe.lora.rank > MOST_SERVED_RANK:
        yield f"lora.rank = {recipe.lora.rank} is more than vLLM's largest slot of {MOST_SERVED_RANK}: lower it."
    if engine.context is not None and engine.context <= recipe.rollout.max_new_tokens:
        yield (
            f"engine.context = {engine.context} leaves no room for a prompt beside rollout.max_new_tokens = "
            f"{recipe.rollout.max_new_tokens}: raise engine.context, or leave it out for as many as the model reads."
        )
    for url in engine.url:
        if not URL.fullmatch(url):
            yield f"engine.url holds {url!r}: write http://HOST:PORT or https://HOST:PORT, as `miles serve` prints it."
    if len(set(engine.url)) < len(engine.url):
        yield "engine.url names a service twice: name each once."


def _handed_over(recipe: Recipe) -> Iterator[str]:
    """What `auto`, which has two engines, cannot work with."""
    if recipe.publish.kind != "auto":
        yield (
            f'publish.kind = "{recipe.publish.kind}" is one way, and engine.kind = "auto" goes from one engine to another: leave '
            "publish.kind out."
        )
    if recipe.parallel.shard * recipe.parallel.replicate > 1 or recipe.run.launcher != "local" or _apart(recipe):
        yield (
            'engine.kind = "auto" hands over within one process, and this run may have several (ranks, or collectors at buffer.url): use "vllm", or "inprocess".'
        )


def _buffer(recipe: Recipe) -> Iterator[str]:
    buffer = recipe.buffer
    if buffer.run is not None and not RUN_NAME.fullmatch(buffer.run):
        yield f"buffer.run = {buffer.run!r} must match {RUN_NAME.pattern}: letters, digits, '.', '_' and '-' only."
    if buffer.run is None and (buffer.url is not None or buffer.ledger != "sqlite"):
        yield "buffer.run is not set, and the buffer holds the runs of others too: give this run a name."
    if buffer.url is not None and not URL.fullmatch(buffer.url):
        yield f"buffer.url = {buffer.url!r} must look like http://HOST:PORT or https://HOST:PORT."
    if buffer.ledger != "sqlite" and not buffer.ledger.startswith(("postgresql://", "postgres://")):
        yield f"buffer.ledger = {buffer.ledger!r} must be sqlite or postgresql://USER@HOST/DATABASE."
    elif PASSWORD.match(buffer.ledger):
        yield "buffer.ledger holds a password, which config.toml would show: leave it out and set PGPASSWORD, or use ~/.pgpass."
    if buffer.payloads != "local" and not re.fullmatch(r"s3://[^/]+(/.*)?", buffer.payloads):
        yield f"buffer.payloads = {buffer.payloads!r} must be local or s3://BUCKET/PREFIX."


def _processes(recipe: Recipe) -> Iterator[str]:
    if recipe.run.parts is not None and (recipe.eval.rows or recipe.parallel.shard * recipe.parallel.replicate > 1):
        yield (
            f"run.parts = {recipe.run.parts} has a learner of one's own, which Miles neither evaluates nor spreads over ranks: set "
            "eval.rows to 0, and leave parallel.shard and parallel.replicate at 1."
        )
    if recipe.run.launcher == "local":
        if recipe.run.parts is not None and recipe.buffer.url is None:
            yield (
                f"run.parts = {recipe.run.parts} needs collectors and learner to be processes of their own: set run.launcher to "
                '"processes", or start each role by hand (buffer.url, miles learn, miles collect).'
            )
        return
    if recipe.buffer.url is not None:
        yield (
            f'buffer.url = {recipe.buffer.url!r} names a service, and run.launcher = "{recipe.run.launcher}" starts one of its own: '
            "leave buffer.url out, or start each role by hand (miles learn, miles collect)."
        )
    if recipe.engine.kind != "inprocess":
        yield (
            f'engine.kind = "{recipe.engine.kind}" cannot be collected with by run.launcher = "{recipe.run.launcher}" yet: leave '
            'run.launcher at "local", whose collector asks the servers while the learner waits, or set engine.kind = "inprocess".'
        )


RESOURCE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*=(\d+|0?\.\d+)")


def _ray(recipe: Recipe) -> Iterator[str]:
    run = recipe.run
    if run.ray_address is not None and not HOST_PORT.fullmatch(run.ray_address):
        yield (
            f"run.ray_address = {run.ray_address!r} must look like HOST:PORT, the address that `ray start --head` prints: the command "
            "is given on a node of the cluster, so that neither ray:// nor auto is needed."
        )
    for role in Resources.model_fields:
        for text in getattr(run.resources, role):
            if not RESOURCE.fullmatch(text):
                yield (
                    f"run.resources.{role} holds {text!r}: write NAME=AMOUNT, such as CPU=4, GPU=1 or big=0.5: a whole number, or a "
                    "part of one."
                )


PROBLEM_RULES: tuple[Callable[[Recipe], Iterable[str]], ...] = (
    _required, _length, _minibatches, _rewards, _overlong, _sampling, _remote_code, _evaluation, _rows, _buffer,
    _adapters, _ranks, _servers, _processes, _ray,
)  # fmt: skip


def _unused(recipe: Recipe, given: Collection[str]) -> Iterator[tuple[str, str]]:
    yield from _unused_inputs(recipe, given)
    yield from _unused_training(recipe)
    yield from _unused_buffer(recipe)
    yield from _unused_engine(recipe)
    if not recipe.eval.rows:
        yield from ((f"eval.{name}", "eval.rows = 0 turns evaluation off") for name in ("every", "samples", "greedy"))
    if recipe.log.wandb == "off" and not recipe.log.trackio:
        yield "log.project", "log.wandb and log.trackio are off"


def _unused_inputs(recipe: Recipe, given: Collection[str]) -> Iterator[tuple[str, str]]:
    model, data, reward = recipe.model, recipe.data, recipe.reward
    if not is_hub_id(model.name):
        yield "model.revision", f"model.name = {model.name} is not a hub id"
    if "data.source" in given or not is_hub_id(data.source):
        yield "data.split", "data.source is not a hub id"
    if not is_hub_id(recipe.eval.source or data.source):
        yield "eval.split", "the held-out rows do not come from the hub"
    if data.source.startswith("task:"):
        yield "data.prompt_column", "a task makes its own prompts"
    if reward.model is None:
        yield "reward.model_weight", "reward.model is not set"
    if reward.truncated != "value":
        yield "reward.truncated_value", f'reward.truncated is "{reward.truncated}"'
    if not reward.overlong:
        yield from ((f"reward.{name}", "reward.overlong is false") for name in ("overlong_factor", "overlong_buffer"))


VLLM_KEYS = (
    "servers",
    "url",
    "token_file",
    "ca_file",
    "python",
    "param_dtype",
    "kv_cache_gib",
    "start_timeout_s",
    "stall_s",
)


def _unused_engine(recipe: Recipe) -> Iterator[tuple[str, str]]:
    engine = recipe.engine
    if engine.kind != "auto":
        yield "engine.crossover", f'engine.kind is "{engine.kind}"'
    if engine.kind == "inprocess":
        yield from ((f"engine.{name}", f'engine.kind is "{engine.kind}"') for name in VLLM_KEYS)
        yield "publish.verify", f'engine.kind is "{engine.kind}"'
        if not _apart(recipe):
            yield from ((f"publish.{name}", f'engine.kind is "{engine.kind}"') for name in ("directory", "serve"))
        return
    if engine.kind == "vllm":
        yield "rollout.deterministic", "a vLLM server's bits depend on what else it computes"
    if not engine.url:
        yield from ((f"engine.{name}", "engine.url is not set") for name in ("token_file", "ca_file"))


def _unused_buffer(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if not _apart(recipe):
        yield "run.collectors", 'run.launcher is "local", so this process collects'
    if recipe.run.launcher == "local":
        yield "run.restarts_per_minute", 'run.launcher is "local"'
    if recipe.run.launcher != "ray":
        keys = ("ray_address", *(f"resources.{role}" for role in Resources.model_fields))
        yield from ((f"run.{key}", f'run.launcher is "{recipe.run.launcher}"') for key in keys)
    if recipe.buffer.url is None:
        yield from ((f"buffer.{name}", "buffer.url is not set") for name in ("token_file", "ca_file"))
    else:
        yield "buffer.ledger", "the service at buffer.url has its own"


def _unused_training(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.algorithm.kl_target is None:
        yield "algorithm.kl_horizon", "algorithm.kl_target is not set"
    if not recipe.algorithm.beta:
        yield from ((f"algorithm.{name}", "algorithm.beta is 0") for name in ("kl_place", "kl_estimator"))
    if recipe.parallel.shard * recipe.parallel.replicate == 1:
        yield "parallel.offload_reference", "one rank shards nothing"
    elif recipe.lora.rank is not None:
        yield "parallel.offload_reference", "with adapters the reference is the base itself"
    if recipe.lora.rank is None:
        yield from ((f"lora.{name}", "lora.rank is not set") for name in ("alpha", "targets", "critic"))
    if recipe.learner.schedule == "constant":
        yield "learner.min_learning_rate_ratio", "learner.schedule is constant"


def _standing_still(recipe: Recipe) -> Iterator[str]:
    learner = recipe.learner
    if learner.learning_rate == 0:
        yield "learner.learning_rate = 0: the policy does not move (useful as a control only)."
    if recipe.algorithm.steps is not None:
        updates = recipe.algorithm.steps * learner.epochs * learner.minibatches
        if learner.warmup_updates > updates:
            yield (
                f"learner.warmup_updates = {learner.warmup_updates} is more than the {updates} updates of the run: "
                "the learning rate never reaches its peak."
            )


def _adapters_that_hardly_move(recipe: Recipe) -> Iterator[str]:
    rate = recipe.learner.learning_rate
    if recipe.lora.rank is not None and 0 < rate < ADAPTER_LEARNING_RATE:
        yield (
            f"lora.rank = {recipe.lora.rank} at learner.learning_rate = {rate:g}: adapters hardly move below "
            f"{ADAPTER_LEARNING_RATE:g}; 2e-4 is a usual rate for them."
        )


def _older_for_nothing(recipe: Recipe) -> Iterator[str]:
    stale = recipe.buffer.max_staleness
    if recipe.engine.kind == "inprocess" and stale > 0 and not _apart(recipe):
        yield (
            f'buffer.max_staleness = {stale} with engine.kind = "inprocess": groups get up to {stale} versions old and nothing '
            "gets faster, since one process collects and learns in turn (useful to try behavior corrections only)."
        )


def _best_without_evaluations(recipe: Recipe) -> Iterator[str]:
    if recipe.run.keep_best and recipe.eval.every is None:
        yield "run.keep_best without eval.every compares only the model before the first step with the last one."


WARNING_RULES: tuple[Callable[[Recipe], Iterable[str]], ...] = (
    _standing_still,
    _adapters_that_hardly_move,
    _older_for_nothing,
    _best_without_evaluations,
)
