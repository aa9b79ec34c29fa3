"""One rank's way from its engine to finished groups and evaluations."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from torch import nn

from miles.algo import AlgorithmRow
from miles.buffer.stream import PromptStream
from miles.config.schema import Recipe
from miles.learn.gathered import gathered
from miles.learn.model import Roles
from miles.protocols import ExperienceSink
from miles.rollout.collect import Collector
from miles.rollout.episode import Episodes
from miles.rollout.evaluate import Evaluation, run_evaluation
from miles.rollout.recorded import Recorded
from miles.run.coroutines import Coroutines
from miles.run.engines import Rollouts
from miles.run.prepare import Inputs

log = logging.getLogger(__name__)


class Collecting:
    """Collects and evaluates with the engine of the run; on several ranks whose engines share their weights, all together."""

    def __init__(
        self, recipe: Recipe, row: AlgorithmRow, inputs: Inputs, rollouts: Rollouts, roles: Roles, loop: Coroutines
    ) -> None:
        self._recipe, self._row, self._inputs, self._rollouts, self._loop = recipe, row, inputs, rollouts, loop
        shares = rollouts.shares_weights and inputs.answers is None
        self._shared = roles.roots[0] if shares else nn.Module()  # the actor's
        self._groups = self._maker()
        self.stream = PromptStream(
            len(inputs.train), recipe.run.seed, recipe.data.shuffle, recipe.algorithm.groups_per_step, recipe.data.epochs
        )  # fmt: skip
        self._told_slow = False

    def _maker(self) -> Episodes | Recorded:
        """Sampled by the run's engine and scored by its rewards, or read from the data."""
        inputs = self._inputs
        if inputs.answers is not None:
            return Recorded(inputs.answers)
        return Episodes(
            inputs.environment, self._rollouts.engine, inputs.rewards, inputs.sampling, inputs.renderer.text
        )

    @property
    def recorded(self) -> Recorded:
        """What reads answers; only where the data hold them."""
        assert isinstance(self._groups, Recorded)
        return self._groups

    def collect(self, sink: ExperienceSink) -> None:
        """Run a collector until the sink has no more leases to give."""
        collector = Collector(sink, self.stream, self._inputs.train, self._groups, recipe=self._recipe, row=self._row)
        with gathered(self._shared):
            self._loop.run(collector.run())
        self._tell_slow()

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run what concerns the samples to its end, on the loop that they come from."""
        self._loop.run(coroutine)

    def evaluate(self, chosen: Sequence[int]) -> Evaluation:
        """The held-out rows at these places."""
        assert isinstance(self._groups, Episodes)
        rows = self._inputs.held_out
        with gathered(self._shared):
            evaluation = self._loop.run(run_evaluation(rows, self._groups, recipe=self._recipe, chosen=chosen))
        self._tell_slow()
        return evaluation

    def _tell_slow(self) -> None:
        reason = self._rollouts.slow_reason()
        if reason is not None and not self._told_slow:
            self._told_slow = True
            log.warning("%s is sampled from slowly, one prompt after another: %s", self._recipe.model.name, reason)
