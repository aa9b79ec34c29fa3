"""The learner: packs a step's groups, scores them, and makes the step's updates. Nothing here depends on how tokens were packed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from miles.algo.build import Objective, gather, gather_tokens
from miles.algo.metrics import Totals
from miles.config.schema import Reward
from miles.errors import TrainingAborted
from miles.learn.adapters import merged_weights, peft_tensors
from miles.learn.attention import use_flex
from miles.learn.blocks import Blocks, blocks_of
from miles.learn.critic import whole_weights
from miles.learn.forward import Compute
from miles.learn.gauges import VisibleFraction
from miles.learn.judge import reading, with_scores
from miles.learn.model import Role, build_roles
from miles.learn.optim import Optimizer, Schedule, Stepped, matching
from miles.learn.pack import empty_batch, move, pack
from miles.learn.parallel import free_gathered
from miles.learn.probe import check_head, probe_packing
from miles.learn.record import StepRecord, over_ranks
from miles.learn.rows import Layout
from miles.learn.shards import Stored
from miles.learn.shares import shares
from miles.learn.spmd import Ranks
from miles.learn.step import Step, build_step, minibatches
from miles.types import Batch, Canary, Group, PolicyUpdate, Sample, Segment, Signal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from miles.config.schema import Recipe

logger = logging.getLogger(__name__)


class Learner:
    """The one implementation of `protocols.Learner`, in one process or on each of several ranks.

    `model` is the actor; engines in this process sample with it. The critic and the reference start as copies of it, so
    a learner that resumes is built on the weights that the run started from, and then given `load_state`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        recipe: Recipe,
        *,
        device: torch.device | str = "cpu",
        total_steps: int | None = None,
        objective: Objective | None = None,
        ranks: Ranks | None = None,
        weights: Mapping[str, Stored] | None = None,
    ) -> None:
        """total_steps: of the run, for schedules; None: `algorithm.steps`. objective: None: the recipe's. ranks: None: all of
        the default process group, each of which makes the same calls with the same groups. weights: of a model on the meta
        device (`load.open_model`), of which each rank reads its part.

        Raises ConfigError and ModelError for what cannot be trained exactly.
        """
        self.recipe, self.version = recipe, 0
        self.device = torch.device(device)
        self.ranks = Ranks.join(recipe.parallel, self.device) if ranks is None else ranks
        self.model = (model if weights is not None else model.to(self.device, torch.float32)).eval()
        self.canary_ids: Sequence[int] | None = None  # scored at each version, for engines to be compared with
        self.objective = Objective.build(recipe) if objective is None else objective
        self.beta = self.objective.beta
        self.judged: Sequence[Group] = ()  # of the step that was scored last
        self.compute = Compute.of(recipe, self.model)
        if not self.objective.row.scorer:
            check_head(self.model)
        self.layout = self._layout()
        if recipe.learner.attention == "flex":
            use_flex(self.model, self.device)
        self.roles = build_roles(self.model, recipe, self.objective, self.compute)
        self._blocks = Blocks(self.roles.trunks, recipe.learner)
        if self.ranks.mesh is not None:
            self.roles.shard(self.ranks.mesh)
        if weights is not None:
            self.roles.fill(weights, self.device)
        self.roles.begin()
        steps = recipe.algorithm.steps if total_steps is None else total_steps
        self._updates_per_step = recipe.learner.epochs * recipe.learner.minibatches
        total = None if steps is None else steps * self._updates_per_step
        settings = recipe.learner
        self.optimizer = self._optimizer("actor", settings.learning_rate, total)
        self.critic_optimizer = None
        if "critic" in self.roles.names:
            rate = settings.critic_learning_rate
            rate = 5 * settings.learning_rate if rate is None else rate
            self.critic_optimizer = self._optimizer("critic", rate, total)
        self._skipped_in_a_row = 0
        rounded = self.compute.dtype is torch.bfloat16 and recipe.lora.rank is None  # adapters are never rounded
        self._visible = VisibleFraction([*self.model.parameters()], self.ranks.sum) if rounded else None

    # --- the three verbs of a step ---------------------------------------------------------------------------------

    def pack(self, groups: Sequence[Group]) -> Step:
        """The step's table and what is trained of each sample; rows are laid out where it is known which are needed."""
        recipe = self.recipe
        return build_step(groups, self.version, recipe.reward, recipe.rollout.max_new_tokens)

    def score(self, step: Step) -> Signal:
        """The forwards that the algorithm asks for, without gradient; then credit and advantage over the whole step.

        Where the reward model is a role of the learner's it scores first; `judged` holds the step's groups with its scores then.
        """
        if self.judges:
            self.judged = self.judge(step.groups)
            step = build_step(self.judged, step.version, self.recipe.reward, self.recipe.rollout.max_new_tokens)
        old = self.logprobs(step) if self.objective.needs_old else None
        ref = self.logprobs(step, "ref") if "ref" in self.roles.names else None
        values, ref_values = (
            self._scored(step, partial(self.roles.values, role)) if role in self.roles.names else None
            for role in ("critic", "ref_critic")
        )
        return self.objective.signal(move(step.table, self.device), old, ref, values, ref_values, beta=self.beta)

    @property
    def judges(self) -> bool:
        """Whether the reward model is one of the roles: groups come without its score."""
        return "reward_model" in self.roles.names

    def judge(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with the reward model's scores in their rewards. Raises RewardError."""
        read = reading(groups, self.version)
        if not len(read.samples):
            return list(groups)
        scores = self._scored(read, partial(self.roles.values, "reward_model"))
        return with_scores(groups, scores.tolist(), self.recipe.reward.model_weight)

    def logprobs(self, step: Step, role: Role = "actor") -> Tensor:
        """[N] float32, of the policy as it is now, at the sampling temperature, in the order of the step's table."""
        return self._scored(step, lambda batch: self.roles.logprobs(role, batch, with_entropy=False)[0])

    def measure(self, groups: Sequence[Group]) -> dict[str, float]:
        """The loss over recorded groups as if they were one update, and what goes with it; nothing is trained."""
        step, objective, total = self.pack(groups), self.objective, Totals()
        signal = objective.signal(move(step.table, self.device))
        weights = objective.weights(signal.table, torch.arange(len(step.segments), device=self.device))
        with torch.no_grad(), self._forwards():
            for batch in self._batches(step, step.samples):
                values, _ = self.roles.logprobs("actor", batch, with_entropy=False)
                gathered = gather(signal, batch)
                output = objective.policy_loss(values, None, None, batch, gathered, gather_tokens(weights, batch))
                total += Totals.of(output.metrics, batch.loss_mask)
        return over_ranks(total, self.ranks).row()

    def update(self, step: Step, signal: Signal) -> dict[str, float]:
        """epochs * minibatches updates, in each the critic first; the version is one higher afterwards.

        Returns the learner's keys of the metrics row, as exact means over tokens. Raises TrainingAborted, the weights as
        they were before, after `run.max_skipped_updates` updates in a row whose loss or gradient was not finite.
        """
        record = StepRecord(signal, self.recipe.learner.epochs)
        aborted = False
        with self._forwards():
            for number, samples in self._updates(step):
                skipped = self._update(step, signal, samples, number, record)
                self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
                aborted = self._skipped_in_a_row >= self.recipe.run.max_skipped_updates
                if aborted:
                    break
        metrics = record.row(self.objective, self.beta, self.device, self._visible, self.ranks)
        self.version += 1
        if aborted:
            raise TrainingAborted(
                f"step {self.version}: the loss or the gradient was not finite in {self._skipped_in_a_row} updates in a row "
                "(run.max_skipped_updates); the weights are those before the first of them. Look at the rewards and "
                "log-probabilities of these groups, or lower learner.learning_rate.",
                metrics,
            )
        self._after_step(metrics, len(step.segments))
        return metrics

    def policy_update(self) -> PolicyUpdate:
        """The actor's weights at this version, under their Hugging Face names; merged in float32 where it is an adapter."""
        if self.recipe.lora.rank is None:
            return PolicyUpdate(self.version, partial(whole_weights, self.model), self._canary())
        weights, adapter = partial(merged_weights, self.model, "actor"), partial(peft_tensors, self.model, "actor")
        return PolicyUpdate(self.version, weights, self._canary(), adapter)

    def _canary(self) -> Canary | None:
        if self.canary_ids is None:
            return None
        ids = tuple(self.canary_ids)
        return Canary(ids, partial(self._plain_logprobs, ids))

    def _plain_logprobs(self, ids: tuple[int, ...]) -> list[float]:
        """log p of ids[1:] at temperature 1."""
        segment = Segment(ids, (False, *(True for _ in ids[1:])), (0.0,) * len(ids), (self.version,) * len(ids))
        group = Group(0, 0, (Sample((segment,), "stop", "", reward=0.0),))
        step = build_step([group], self.version, Reward(), len(ids))
        scored = self._scored(step, lambda batch: self.roles.logprobs("actor", batch, False, temperature=1.0)[0])
        return scored.tolist()

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Tensors by file and name (the learner's own, not copies), and the rest as JSON: all that a resumed run needs."""
        moments, optimizer = self.optimizer.state()
        tensors = {**self.roles.tensors(), "optimizer": moments}
        state: dict[str, Any] = {
            "version": self.version,
            "beta": self.beta,
            "skipped_in_a_row": self._skipped_in_a_row,
            "optimizer": optimizer,
        }
        if self.critic_optimizer is not None:
            tensors["critic_optimizer"], state["critic_optimizer"] = self.critic_optimizer.state()
        if self._visible is not None:
            tensors["start"] = {"coordinates": self._visible.start}
        return tensors, state

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned, to the bit. Raises CheckpointError where something is missing."""
        self.roles.load(tensors)
        self.optimizer.load_state(tensors.get("optimizer", {}), state["optimizer"])
        if self.critic_optimizer is not None:
            self.critic_optimizer.load_state(tensors.get("critic_optimizer", {}), state["critic_optimizer"])
        if self._visible is not None:
            self._visible.start = matching(tensors.get("start", {}), "coordinates", self._visible.start)
        self.version, self.beta = state["version"], state["beta"]
        self._skipped_in_a_row = state["skipped_in_a_row"]

    # --- one update ------------------------------------------------------------------------------------------------

    def _update(self, step: Step, signal: Signal, samples: list[int], number: int, record: StepRecord) -> bool:
        """Whether it was skipped. Where the critic's is, the actor's does not take place."""
        chosen = torch.tensor(samples, dtype=torch.int64, device=self.device)
        if self.critic_optimizer is not None:
            stepped = self._critic_update(step, signal, samples, chosen, number, record)
            if stepped.skipped:
                return True
        if self.version < self._critic_warmup:
            return False
        stepped = self._actor_update(step, signal, samples, chosen, number, record)
        return stepped.skipped

    def _critic_update(
        self, step: Step, signal: Signal, samples: list[int], chosen: Tensor, number: int, record: StepRecord
    ) -> Stepped:
        weights = self.objective.value_weights(signal.table, chosen)
        total, outputs = 0.0, []
        for batch in self._batches(step, samples):
            values = self.roles.values("critic", batch)
            output = self.objective.value_loss(values, gather(signal, batch), gather_tokens(weights, batch))
            output.loss.backward()
            total += output.loss.item()
            outputs.append((batch.loss_mask, output.metrics))
        stepped = self.critic_optimizer.step(number, self.ranks.total(total))
        record.add_values(outputs, stepped)
        return stepped

    def _actor_update(
        self, step: Step, signal: Signal, samples: list[int], chosen: Tensor, number: int, record: StepRecord
    ) -> Stepped:
        objective = self.objective
        weights = objective.weights(signal.table, chosen)
        nll = objective.nll_weights(signal.table, chosen) if objective.needs_nll else None
        moving = objective.rows_with_gradient(signal)
        kept = (
            samples
            if moving is None
            else [i for i, moves in zip(samples, moving[chosen].tolist(), strict=True) if moves]
        )
        total, outputs = 0.0, []
        for batch in self._batches(step, kept):
            logprobs, entropy = self.roles.logprobs("actor", batch)
            output = objective.policy_loss(
                logprobs,
                entropy,
                None,
                batch,
                gather(signal, batch),
                gather_tokens(weights, batch),
                beta=self.beta,
                nll_weights=None if nll is None else gather_tokens(nll, batch),
            )
            output.loss.backward()
            total += output.loss.item()
            outputs.append((batch.loss_mask, output.metrics))
        stepped = self.optimizer.step(number, self.ranks.total(total))
        record.add_policy(outputs, stepped)
        return stepped

    # --- small parts -----------------------------------------------------------------------------------------------

    def _updates(self, step: Step) -> Iterator[tuple[int, list[int]]]:
        """The number of each update in the run, and its samples; one without samples does not take place."""
        settings, seed = self.recipe.learner, self.recipe.run.seed
        for epoch in range(settings.epochs):
            parts = minibatches(seed, self.version, epoch, step.num_groups, settings.minibatches)
            for place, groups in enumerate(parts):
                if samples := step.samples_of(groups):
                    yield self.version * self._updates_per_step + epoch * settings.minibatches + place, samples

    def _batches(self, step: Step, samples: Sequence[int]) -> Iterator[Batch]:
        """This rank's; as many on every rank, so that all of them come to the same forwards."""
        layout = self.layout
        own = shares(step, samples, self.ranks.size, layout.share, layout.whole_groups)[self.ranks.rank]
        batches = pack(step, own, layout)
        batches += [empty_batch()] * (self.ranks.most(len(batches)) - len(batches))
        for batch in batches:
            yield move(batch, self.device)

    def _scored(self, step: Step, read: Callable[[Batch], Tensor]) -> Tensor:
        """[N], from a forward of every batch without gradient that gives [T]."""
        column = torch.zeros(len(step.table.sample_ids), device=self.device)
        with torch.no_grad(), self._forwards():
            for batch in self._batches(step, step.samples):
                column[batch.slots[batch.loss_mask]] = read(batch)[batch.loss_mask]
        return self.ranks.sum(column)

    @contextmanager
    def _forwards(self) -> Iterator[None]:
        """Around forwards and their backwards; afterwards engines may sample with the actor again."""
        with self._blocks.active():
            try:
                yield
            finally:
                self.roles.rest()
                free_gathered(self.roles.roots)

    def _optimizer(self, role: Role, peak: float, total_updates: int | None) -> Optimizer:
        settings = self.recipe.learner
        return Optimizer(self.roles.trained(role), settings, Schedule.of(settings, peak, total_updates))

    def _layout(self) -> Layout:
        packing = probe_packing(self.model)
        if not packing.exact:
            logger.warning(
                "%s is trained on one sequence a row, padded: %s.", type(self.model).__name__, packing.reason
            )
        block = blocks_of(self.model.base_model)[:1]
        return Layout(
            share=packing.exact and self.recipe.learner.prefix_sharing == "auto",
            pack=packing.exact,
            whole_groups=self.objective.row.data == "pairs",
            tokens_per_batch=self.recipe.learner.tokens_per_microbatch,
            attention_half=attention_half(self.model, sum(p.numel() for b in block for p in b.parameters())),
        )

    def _after_step(self, metrics: Mapping[str, float], samples: int) -> None:
        settings = self.recipe.algorithm
        if settings.kl_target is not None and "kl/ref" in metrics:
            error = max(-0.2, min(0.2, metrics["kl/ref"] / settings.kl_target - 1))
            self.beta *= 1 + error * samples / settings.kl_horizon
        every = settings.ref_update_every
        if every is not None and "ref" in self.roles.names and self.version % every == 0:
            self.roles.renew_reference()

    @property
    def _critic_warmup(self) -> int:
        return (self.objective.settings.get("critic_warmup") or 0) if self.critic_optimizer is not None else 0


def attention_half(model: PreTrainedModel, block_weights: int) -> float:
    """Row width at which attention costs as much as a block's products, from their counts.

    A token takes 2 * weights operations in products and 4 * width * heads * head size in attention, which runs at about
    two thirds of the speed (measured on a CPU).
    """
    config = model.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return max(64.0, 0.65 * block_weights / (2 * config.num_attention_heads * head))
