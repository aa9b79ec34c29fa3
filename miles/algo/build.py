"""The objective of a run: a row of the table made callable, with the recipe's settings.

The learner asks it, in this order: what to score (`needs_*`), for the step's `signal`, for the loss weights of each
update, and for the loss of each batch. Nothing here knows ranks, models or optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from miles.algo import AlgorithmRow, advantage, credit, find, losses, reduce
from miles.algo.advantage import Advantages, StepScores
from miles.algo.binding import bind
from miles.algo.correction import TOKEN_KINDS, sequence_weights, token_weights
from miles.algo.losses import TokenLoss, bounded_exp
from miles.algo.metrics import explained_variance
from miles.algo.own import held
from miles.algo.regularize import k1, k3, kl_loss, value_regularizer
from miles.algo.rules import correction_mode, settings_of, updates_per_step
from miles.algo.tokens import TokenSignal, gather, gather_tokens, select
from miles.types import Batch, LossOutput, Signal, StepTable

if TYPE_CHECKING:
    from miles.config.schema import Recipe

__all__ = ["Objective", "TokenSignal", "gather", "gather_tokens"]


@dataclass(frozen=True)
class Objective:
    """Pure functions of tensors. N trained tokens and S samples of a step, T tokens of a batch."""

    row: AlgorithmRow
    settings: Mapping[str, Any]  # the [algorithm] section, the row's defaults filled in
    correction_mode: str  # none, bypass or decoupled
    updates: int  # per step
    max_new_tokens: int
    credit: Callable[..., Tensor]
    advantage: Callable[..., Any]
    token_loss: Callable[..., Any]
    token_value_loss: Callable[..., Any] | None

    @classmethod
    def build(cls, recipe: Recipe, row: AlgorithmRow | None = None) -> Objective:
        """row: None finds it by `algorithm.name`. Raises ConfigError where the row's functions cannot be resolved."""
        row = find(recipe.algorithm.name) if row is None else row
        settings = settings_of(row, recipe)

        def bound(kind: str, module: ModuleType) -> Callable[..., Any]:
            given = getattr(row, kind)
            function = bind(given, module, settings, kind, row.name)
            return function if isinstance(given, str) else held(function, given, kind, row.name)

        return cls(
            row=row,
            settings=settings,
            correction_mode=correction_mode(row, recipe),
            updates=updates_per_step(recipe),
            max_new_tokens=recipe.rollout.max_new_tokens,
            credit=bound("credit", credit),
            advantage=bound("advantage", advantage),
            token_loss=bound("policy_loss", losses),
            token_value_loss=None if row.value_loss is None else bound("value_loss", losses),
        )

    @property
    def beta(self) -> float:
        """Strength of the KL at the start of the run."""
        return self.settings["beta"]

    @property
    def kl_in_reward(self) -> bool:
        return self.beta > 0 and self.settings["kl_place"] == "reward"

    @property
    def kl_in_loss(self) -> bool:
        return self.beta > 0 and self.settings["kl_place"] == "loss"

    @property
    def needs_old(self) -> bool:
        """A scoring pass at the start of the step; else old is the behavior policy, or the update's own forward."""
        if self.correction_mode == "bypass" or self.row.recorded:
            return False
        whole_sequences = self.correction_mode == "decoupled" and self.settings["correction"].kind not in TOKEN_KINDS
        return self.updates > 1 or whole_sequences or self.kl_in_reward

    @property
    def needs_ref(self) -> bool:
        return self.beta > 0

    @property
    def needs_critic(self) -> bool:
        return self.row.has_critic

    @property
    def needs_ref_values(self) -> bool:
        return self.row.has_critic and self.settings["value_ref"] > 0

    @property
    def needs_entropy(self) -> bool:
        """Entropy with gradient; without, it is only measured."""
        return self.settings["entropy_coef"] > 0

    @property
    def needs_nll(self) -> bool:
        return self.settings["nll_coef"] > 0

    def signal(
        self,
        table: StepTable,
        old_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        values: Tensor | None = None,
        ref_values: Tensor | None = None,
        beta: float | None = None,
    ) -> Signal:
        """Credit and advantage over the whole step: all samples, all ranks. Every tensor is [N] float32.

        beta: the current strength of the KL; None: the recipe's. Under bypass old is the behavior policy. Raises
        ValueError where something that `needs_*` asks for is missing.
        """
        for needed, given, name in (
            (self.needs_old, old_logprobs, "old_logprobs"),
            (self.needs_ref, ref_logprobs, "ref_logprobs"),
            (self.needs_critic, values, "values"),
            (self.needs_ref_values, ref_values, "ref_values"),
        ):
            if needed and given is None:
                raise ValueError(f"{self.row.name} needs {name} of the step's table")
        if self.correction_mode == "bypass":
            old_logprobs = table.behavior_logprobs
        scores = self._scores(old_logprobs, ref_logprobs, values, beta)
        sample_credit = self.credit(table.rewards, table.group_ids, table.lengths, table.baseline_rewards)
        result = self.advantage(table, sample_credit, scores)
        made = result if isinstance(result, Advantages) else Advantages(result)
        return Signal(
            table=table,
            advantages=made.advantages,
            credit=sample_credit,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            correction_weights=self._step_weights(table, old_logprobs),
            values=values,
            returns=made.returns,
            ref_values=ref_values,
        )

    def weights(self, table: StepTable, update: Tensor) -> Tensor:
        """[N] float32, each token's weight in the policy loss of one update; 0 for tokens of other updates.

        update: [S'] int64, the update's samples.
        """
        return reduce.loss_weights(
            table.sample_ids, table.lengths, update, self.settings["reduction"], self.max_new_tokens
        )

    def value_weights(self, table: StepTable, update: Tensor) -> Tensor:
        """[N] float32, each token's weight in the value loss of one update: always the mean over its tokens."""
        return reduce.loss_weights(table.sample_ids, table.lengths, update, "token_mean", self.max_new_tokens)

    def nll_weights(self, table: StepTable, update: Tensor) -> Tensor:
        """[N] float32, 1 / (trained tokens of the update's correct samples) on those tokens, 0 on the others.

        VAPO, arXiv:2504.05118, section 4.3. Correct: an unshaped reward of at least 0.5.
        """
        correct = update[reduce.correct_samples(table.unshaped_rewards[update])]
        return reduce.loss_weights(table.sample_ids, table.lengths, correct, "token_mean", self.max_new_tokens)

    def policy_loss(
        self,
        logprobs: Tensor,
        entropy: Tensor | None,
        ref_logprobs: Tensor | None,
        batch: Batch,
        gathered: TokenSignal,
        weights: Tensor,
        beta: float | None = None,
        nll_weights: Tensor | None = None,
    ) -> LossOutput:
        """One batch's share of policy + beta * KL - entropy_coef * entropy + nll_coef * NLL of the update.

        logprobs: [T] with gradient (the scores of a scorer in their place); entropy: [T], with gradient where `needs_entropy`; ref_logprobs: [T], None takes
        the signal's; weights, nll_weights: [T], gathered from `weights` and `nll_weights` of the update. What any of them
        holds off the batch's mask is not read. Metrics: [T], detached; `loss_*` are weighted shares to be summed, the
        others per-token values (`miles.algo.metrics`). Raises ValueError where something needed is missing.
        """
        mask = batch.loss_mask
        logprobs = select(logprobs.float(), mask)
        entropy = None if entropy is None else select(entropy.float(), mask)
        if self.row.recorded:
            return self._recorded_loss(logprobs, entropy, gathered, select(weights, mask))
        ref = gathered.ref_logprobs if ref_logprobs is None else select(ref_logprobs.float(), mask)
        beta = self.beta if beta is None else beta
        old = self._old(gathered, logprobs)
        gathered = replace(gathered, old_logprobs=old)
        token = _token_loss(self.token_loss(logprobs, gathered))
        correction = self._token_weights(gathered, old)
        policy = token.loss if correction is None else token.loss * correction
        total = policy
        if self.settings["kl_place"] == "loss" and beta > 0:
            if ref is None:
                raise ValueError("a KL in the loss needs ref_logprobs")
            total = total + beta * kl_loss(self.settings["kl_estimator"], logprobs, ref, old)
        if self.needs_entropy:
            if entropy is None:
                raise ValueError("entropy_coef > 0 needs the entropy of each token")
            total = total - self.settings["entropy_coef"] * entropy
        weights = select(weights, mask)
        share = select(total, mask) * weights
        metrics = {
            "loss_policy": select(policy, mask) * weights,
            **self._policy_metrics(logprobs, entropy, ref, old, gathered, token, correction),
        }
        if self.needs_nll:
            if nll_weights is None:
                raise ValueError("nll_coef > 0 needs nll_weights, gathered from Objective.nll_weights")
            nll = -self.settings["nll_coef"] * logprobs * select(nll_weights, mask)
            share, metrics["loss_nll"] = share + nll, nll
        metrics["loss_total"] = share
        return LossOutput(share.sum(), {name: value.detach().float() for name, value in metrics.items()})

    def _recorded_loss(
        self, values: Tensor, entropy: Tensor | None, gathered: TokenSignal, weights: Tensor
    ) -> LossOutput:
        """Recorded answers have no behavior policy, so there are no ratios, corrections or distances to measure."""
        token = _token_loss(self.token_loss(values, gathered))
        share = select(token.loss, gathered.mask) * weights
        metrics = {"loss_total": share, **token.metrics, **({} if entropy is None else {"entropy": entropy})}
        return LossOutput(
            share.sum(), {name: select(value.detach().float(), gathered.mask) for name, value in metrics.items()}
        )

    def value_loss(self, values: Tensor, gathered: TokenSignal, weights: Tensor) -> LossOutput:
        """One batch's share of the critic's loss. values: [T] with gradient; weights: [T] from `value_weights`."""
        if self.token_value_loss is None:
            raise ValueError(f"{self.row.name} has no critic")
        if values.shape != gathered.mask.shape:
            raise ValueError(f"values have shape {tuple(values.shape)}, the batch {tuple(gathered.mask.shape)}")
        values = select(values.float(), gathered.mask)
        token = _token_loss(self.token_value_loss(values, gathered))
        loss, metrics = token.loss, {"value": values, **token.metrics}
        if self.needs_ref_values:
            if gathered.ref_values is None:
                raise ValueError("value_ref > 0 needs ref_values")
            loss = loss + self.settings["value_ref"] * value_regularizer(values, gathered.ref_values)
            metrics["value_ref_gap"] = (values - gathered.ref_values).abs()
        share = select(loss, gathered.mask) * select(weights, gathered.mask)
        metrics["loss_value"] = share
        return LossOutput(share.sum(), {name: value.detach().float() for name, value in metrics.items()})

    def rows_with_gradient(self, signal: Signal) -> Tensor | None:
        """[S] bool, False on samples whose every advantage is 0 and which may be left out of the forward; None: no
        sample may be, because a KL, an entropy, a likelihood, a critic or a user's own loss reaches it too.

        The loss weights do not change with it.
        """
        whole = self.row.recorded or self.kl_in_loss or self.needs_entropy or self.needs_nll or self.needs_critic
        if whole or not isinstance(self.row.policy_loss, str):
            return None
        table = signal.table
        moved = (signal.advantages != 0).to(torch.int64)
        return table.lengths.new_zeros(len(table.lengths)).index_add(0, table.sample_ids, moved) > 0

    def monte_carlo_returns(self, signal: Signal, beta: float | None = None) -> Tensor:
        """[N] float32, what the samples really got from each token on; no value enters it."""
        scores = self._scores(signal.old_logprobs, signal.ref_logprobs, None, beta)
        return advantage.monte_carlo_returns(signal.table, signal.credit, scores, self.settings.get("gamma", 1.0))

    def explained_variance(self, signal: Signal, beta: float | None = None) -> float | None:
        """Of the critic's values at the start of the step; None without a critic, or where returns hardly vary."""
        if signal.values is None:
            return None
        return explained_variance(self.monte_carlo_returns(signal, beta), signal.values)

    def _scores(self, old: Tensor | None, ref: Tensor | None, values: Tensor | None, beta: float | None) -> StepScores:
        strength = self.beta if beta is None else beta
        return StepScores(old, ref, values, strength if self.settings["kl_place"] == "reward" else 0.0)

    def _step_weights(self, table: StepTable, old_logprobs: Tensor | None) -> Tensor | None:
        """[N] correction weights where they can be had before the update's forward."""
        if self.correction_mode != "decoupled" or old_logprobs is None:
            return None
        c, behavior = self.settings["correction"], table.behavior_logprobs
        if c.kind in TOKEN_KINDS:
            return token_weights(old_logprobs, behavior, c.kind, c.cap, c.low, c.high)
        return sequence_weights(old_logprobs, behavior, table.sample_ids, table.lengths, c.kind, c.cap, c.low, c.high)

    def _old(self, gathered: TokenSignal, logprobs: Tensor) -> Tensor:
        """With one update the policy at the start of the step is the update's own, so its own forward is old."""
        if gathered.old_logprobs is not None:
            return gathered.old_logprobs
        if self.needs_old:
            raise ValueError(
                f"{self.row.name} needs old_logprobs in its signal: several updates, or a KL in the reward"
            )
        return logprobs.detach()

    def _token_weights(self, gathered: TokenSignal, old: Tensor) -> Tensor | None:
        if self.correction_mode != "decoupled":
            return None
        if gathered.correction_weights is not None:
            return gathered.correction_weights
        c = self.settings["correction"]
        return token_weights(old, gathered.behavior_logprobs, c.kind, c.cap, c.low, c.high)

    def _policy_metrics(
        self,
        logprobs: Tensor,
        entropy: Tensor | None,
        ref: Tensor | None,
        old: Tensor,
        gathered: TokenSignal,
        token: TokenLoss,
        correction: Tensor | None,
    ) -> dict[str, Tensor]:
        """kl_ref: k1 of pi to ref. kl_old: k3 of old to pi. kl_behavior: k3 of mu to old, so that a gap between engine and
        learner is not mixed with the updates of the step; to pi where old is mu. None of the three is clamped.
        """
        now, behavior = logprobs.detach(), gathered.behavior_logprobs
        policy = now if self.correction_mode == "bypass" else old
        out = {
            "ratio": bounded_exp(now - old),
            **token.metrics,
            "kl_old": k3(old - now),
            "kl_behavior": k3(behavior - policy),
        }
        if ref is not None:
            out["kl_ref"] = k1(now - ref)
        if entropy is not None:
            out["entropy"] = entropy
        if correction is not None:
            out["correction_weight"] = bounded_exp(old - behavior)
            out["correction_masked"] = correction == 0
        return {name: select(value, gathered.mask) for name, value in out.items()}


def _token_loss(result: TokenLoss | Tensor) -> TokenLoss:
    return result if isinstance(result, TokenLoss) else TokenLoss(result)
