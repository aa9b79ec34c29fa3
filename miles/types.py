"""Every noun that crosses a boundary, as frozen dataclasses.

Axis letters: T packed tokens of one batch, N trained tokens of one step (the step's table), S samples of one step,
K tree nodes of one batch, V vocabulary, H hidden size.

The alignment rule: index t is always about token t. `logprobs[t] = log p(token[t] | tokens before t)`, so no other file
shifts left or right. Everything is plain Python until `learn/pack.py` and tensors after it; this module imports no torch.

Glossary: prompt, completion, sample (one trajectory), group (the samples of one prompt), batch (packed), collect
(rollouts into the buffer), learn, publish (weights to engines), credit (one number a sample), advantage (one number a
token), behavior / old / ref log-probabilities (the policy that sampled / at the start of the step / the frozen
reference), version (of the weights), staleness (learner's version minus the oldest version in a group), ordinal (the
number of a prompt in the run's endless stream), manifest (the ordinals that one step trains on), update (one optimizer
step).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

StopReason = Literal["stop", "length"]
"""stop: an end token or a stop string was sampled. length: the token limit was reached (truncated)."""


# --- rollout: plain Python ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one completion is sampled. `temperature == 0` is greedy (evaluation only)."""

    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()  # sampling one of these ends the completion; the token is part of it
    stop: tuple[str, ...] = ()  # the completion ends with the token that completes one of these strings


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a completion were sampled by weights of `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returns for one seed. All of it is whole: a partial answer is never a completion."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # log p of each sampled token at the sampling temperature (at 1 when greedy)
    versions: tuple[VersionSpan, ...]
    stop_reason: StopReason


@dataclass(frozen=True, slots=True)
class Segment:
    """One token sequence of a trajectory. All four have the same length."""

    token_ids: tuple[int, ...]  # prompt, sampled and environment tokens, in order
    loss_mask: tuple[bool, ...]  # True on sampled tokens
    behavior_logprobs: tuple[float, ...]  # 0.0 where the mask is False
    versions: tuple[int, ...]  # weights that sampled the token; -1 where the mask is False

    @property
    def num_trained(self) -> int:
        return sum(self.loss_mask)


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory: one or more segments that share one reward and one stop reason."""

    segments: tuple[Segment, ...]
    stop_reason: StopReason  # of the last generation
    text: str  # what the reward saw: the sampled tokens alone, decoded
    reward: float | None = None  # unshaped, weighted sum of the parts; None: cannot be scored
    reward_parts: Mapping[str, float | None] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)  # named per-token or per-sample data

    @property
    def num_trained(self) -> int:
        return sum(segment.num_trained for segment in self.segments)

    @property
    def truncated(self) -> bool:
        return self.stop_reason == "length"


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one prompt: the unit of credit, of staleness and of storage."""

    ordinal: int
    row: int  # index of the row in the data set
    samples: tuple[Sample, ...]
    prompt_text: str = ""
    baseline_reward: float | None = None  # reward of the greedy completion, where the algorithm asks for it

    @property
    def version_min(self) -> int:
        return min(v for s in self.samples for g in s.segments for v in g.versions if v >= 0)

    @property
    def version_max(self) -> int:
        return max(v for s in self.samples for g in s.segments for v in g.versions)

    @property
    def rewards(self) -> list[float | None]:
        return [sample.reward for sample in self.samples]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One place of the run's endless prompt stream: a pure function of (run seed, ordinal)."""

    ordinal: int
    epoch: int
    row: int


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to collect one ordinal until `expires` (seconds since the epoch)."""

    ordinal: int
    lease_id: str
    expires: float
    min_version: int  # tokens of older weights are not accepted


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """What a step's metrics need of one finished group, trained or dropped; kept in the ledger."""

    ordinal: int
    reason: str | None  # None: trained; otherwise why it was dropped
    rewards: tuple[float | None, ...]
    reward_parts: Mapping[str, tuple[float | None, ...]]
    lengths: tuple[int, ...]  # sampled tokens of each sample
    truncated: tuple[bool, ...]
    unique_fraction: float  # distinct completions / samples
    repeat_fraction: float  # mean over samples of the share of repeated 4-grams (0 for short answers)
    version_min: int


@dataclass(frozen=True, slots=True)
class Collected:
    """Who collected a group and when, by the buffer's clock (seconds since the epoch); no part of what is trained."""

    ordinal: int
    worker: str
    start: float  # leased, the last time
    end: float  # stored, or dropped
    reason: str | None  # why it was dropped. None: it was not


# --- learning: tensors -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTable:
    """The trained tokens and samples of one step, in an order that does not depend on packing.

    Tokens are sorted by (sample, place in the sample); sample i owns rows [starts[i], starts[i] + lengths[i]).
    Samples without a reward, or masked because truncated, are not in it.
    """

    sample_ids: Tensor  # [N] int64, index of the sample that owns the token
    behavior_logprobs: Tensor  # [N] float32, log-prob under the policy that sampled it
    starts: Tensor  # [S] int64
    lengths: Tensor  # [S] int64, trained tokens of the sample, over all of its segments
    group_ids: Tensor  # [S] int64, index of the group in the manifest
    rewards: Tensor  # [S] float32, shaped (after length terms)
    unshaped_rewards: Tensor  # [S] float32, before length terms
    baseline_rewards: Tensor  # [S] float32, NaN where the group has none
    truncated: Tensor  # [S] bool
    margins: Tensor | None = None  # [S] float32, by how much the chosen answer of a recorded pair should lead; None: 0


@dataclass(frozen=True)
class Batch:
    """One micro-batch: R rows of L tokens that the model reads, padded at the end of each row, then tokens that are labels
    only; T = R * L + labels.

    A row is a forest of prefix trees. Token q sees token k when both stand in one row, k's node is q's node or an
    ancestor of it, and position k <= position q. A prefix shared by n sequences is stored once, whether prompt or sampled.
    A trained token that the model need not read (nothing is predicted from it, or another token of the row stands for
    it) is a label only. Example, prompt [5 6], completions [7 8] and [9], L = 3: token_ids 5 6 7 8 9,
    position_ids 0 1 2 3 2, node_ids 0 0 0 -1 -1, parents -1, source -1 0 1 2 1, loss_mask F F T T T.
    """

    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, place of the token in its own sequence
    node_ids: Tensor  # [T] int64, -1 on padding and on labels
    parents: Tensor  # [K] int64, parent node or -1; a parent comes before its children
    source: Tensor  # [T] int64, index in T of the token before this one in its sequence; -1 where there is none
    loss_mask: Tensor  # [T] bool, True on tokens of the step's table
    slots: Tensor  # [T] int64, index of the token in the step's table; -1 where loss_mask is False
    sample_ids: Tensor  # [T] int64, index in the step's samples; -1 where loss_mask is False
    rows: int  # R
    width: int | None = None  # L; None: T / R, no token is a label only


@dataclass(frozen=True)
class Signal:
    """What the update of a step needs beside the tokens, in the order of the step's table; made once by `score`."""

    table: StepTable
    advantages: Tensor  # [N] float32
    credit: Tensor  # [S] float32
    old_logprobs: Tensor | None = None  # [N] float32; None: the update's own forward, detached
    ref_logprobs: Tensor | None = None  # [N] float32, under the frozen reference
    correction_weights: Tensor | None = (
        None  # [N] float32, old/behavior truncated or masked; None: 1, or the update's own
    )
    values: Tensor | None = None  # [N] float32, the critic's at the start of the step
    returns: Tensor | None = None  # [N] float32, the critic's targets
    ref_values: Tensor | None = None  # [N] float32


@dataclass(frozen=True)
class LossOutput:
    """A loss that is already divided by the count of the whole update, and what to log beside it."""

    loss: Tensor  # scalar float32, sum over this batch of weight * token loss
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # [T] float32 per trained token, detached


@dataclass(frozen=True)
class Canary:
    """Tokens that engines are compared with the learner on. `logprobs` is collective, and called after the weights."""

    ids: tuple[int, ...]
    logprobs: Callable[[], Sequence[float]]  # the learner's log p of ids[1:] at temperature 1, computed by the call


@dataclass(frozen=True)
class PolicyUpdate:
    """New weights on their way to the engines. `weights` is collective: every rank iterates it."""

    version: int
    weights: Callable[[], Iterator[tuple[str, Tensor]]]  # Hugging Face names, full tensors
    canary: Canary | None = None
    adapter: Callable[[], Iterator[tuple[str, Tensor]]] | None = None  # peft's names; `weights` are merged then
