"""One training step as the learner makes it, with its parts told apart, so that a counter can say what each of them holds.

The parts are the learner's own (roles, blocks, sharding, losses, optimizer); only the numbers of the step are invented.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from miles.algo.build import Objective, gather, gather_tokens
from miles.learn.blocks import Blocks, blocks_of
from miles.learn.forward import Compute
from miles.learn.model import Role, build_roles
from miles.learn.optim import Optimizer, Schedule
from miles.learn.parallel import free_gathered, make_mesh
from miles.learn.step import Step
from miles.plan.counter import GRADIENTS, HOST, OPTIMIZER, PARAMETERS, LiveBytes
from miles.plan.shape import ranks_of
from miles.types import Batch, Signal, StepTable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from miles.config.schema import Recipe

FROZEN = "frozen"


class PlannedStep:
    """The models of a learner on one rank, and the passes of a step over some batches."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe, counter: LiveBytes, device: str) -> None:
        """For a recipe of several ranks there must be a process group of as many."""
        self.counter, self.recipe = counter, recipe
        self.objective = Objective.build(recipe)
        self.compute = Compute.of(recipe, model)
        self.roles = build_roles(model, recipe, self.objective, self.compute)
        self.blocks = Blocks(self.roles.trunks, recipe.learner)
        self._mesh = make_mesh(recipe.parallel, ranks_of(recipe), device)
        if self._mesh is not None:
            self.roles.shard(self._mesh)
        trained = [role for role in ("actor", "critic") if role in self.roles.names]
        self.trained: dict[Role, dict[str, nn.Parameter]] = {role: self.roles.trained(role) for role in trained}
        self.optimizers = {
            role: Optimizer(parameters, recipe.learner, Schedule(recipe.learner.learning_rate))
            for role, parameters in self.trained.items()
        }
        self._backward = False
        self._pass = ""
        self._watch()
        self._label_parameters()

    def run(self, step: Step, batches: Sequence[Batch]) -> None:
        """Scores and updates once. Phases are named `pass/forward/place` or `pass/backward/place`, and `pass/optimizer`."""
        signal = _signal(step.table, self.objective, self.roles.names)
        for name, read in self._scorings():
            self._begin(name, "forward/embedding")
            with torch.no_grad(), self._forwards():
                for batch in batches:
                    read(batch)
        samples = torch.arange(len(step.segments))
        with self._forwards():
            if "critic" in self.trained:
                weights = self.objective.value_weights(step.table, samples)
                self._update("critic", batches, lambda batch: self._value_loss(batch, signal, weights))
            weights = self.objective.weights(step.table, samples)
            nll = self.objective.nll_weights(step.table, samples) if self.objective.needs_nll else None
            self._update("actor", batches, lambda batch: self._policy_loss(batch, signal, weights, nll))

    def _label_parameters(self) -> None:
        """Before the first forward, because a block's weights are whole ones in the middle of one."""
        owned: set[int] = set()
        for role, parameters in self.trained.items():
            self.counter.label(parameters.values(), f"{PARAMETERS}/{role}")
            owned |= {id(parameter) for parameter in parameters.values()}
        rest = [p for root in self.roles.roots for p in root.parameters() if id(p) not in owned]
        offloaded = self.recipe.parallel.offload_reference and self.recipe.lora.rank is None and self._mesh is not None
        self.counter.label(rest, f"{HOST if offloaded else PARAMETERS}/{FROZEN}")

    def _label_gradients(self) -> None:
        """What backwards have made until now."""
        for role, parameters in self.trained.items():
            self.counter.label([parameter.grad for parameter in parameters.values()], f"{GRADIENTS}/{role}")

    @contextmanager
    def _forwards(self) -> Iterator[None]:
        with self.blocks.active():
            yield
        self.roles.rest()
        free_gathered(self.roles.roots)

    # --- passes -----------------------------------------------------------------------------------------------------

    def _scorings(self) -> Iterator[tuple[str, Callable[[Batch], Any]]]:
        """Every forward without gradient: the name of its pass, and the forward."""
        for role in self.roles.names:
            if role in ("critic", "ref_critic", "reward_model"):
                yield f"score {role}", lambda batch, role=role: self.roles.values(role, batch)
            elif role != "actor" or self.objective.needs_old:
                yield f"score {role}", lambda batch, role=role: self.roles.logprobs(role, batch, with_entropy=False)

    def _update(self, role: Role, batches: Sequence[Batch], loss_of: Callable[[Batch], Tensor]) -> None:
        for batch in batches:
            self._begin(f"update {role}", "forward/embedding")
            loss = loss_of(batch)
            self._begin(self._pass, "backward/head")
            with self._backwards():
                loss.backward()
            loss.item()
            self._label_gradients()
        self._begin(self._pass, "optimizer")
        self.optimizers[role].step(0, 0.0)
        self.counter.label(self.optimizers[role].state()[0].values(), f"{OPTIMIZER}/{role}")

    def _policy_loss(self, batch: Batch, signal: Signal, weights: Tensor, nll: Tensor | None) -> Tensor:
        logprobs, entropy = self.roles.logprobs("actor", batch)
        output = self.objective.policy_loss(
            logprobs,
            entropy,
            None,
            batch,
            gather(signal, batch),
            gather_tokens(weights, batch),
            nll_weights=None if nll is None else gather_tokens(nll, batch),
        )
        return output.loss

    def _value_loss(self, batch: Batch, signal: Signal, weights: Tensor) -> Tensor:
        values = self.roles.values("critic", batch)
        return self.objective.value_loss(values, gather(signal, batch), gather_tokens(weights, batch)).loss

    # --- phases -----------------------------------------------------------------------------------------------------

    def _begin(self, name: str, place: str) -> None:
        self._pass = name
        self.counter.begin(f"{name}/{place}")

    @contextmanager
    def _backwards(self) -> Iterator[None]:
        self._backward = True
        try:
            yield
        finally:
            self._backward = False

    def _watch(self) -> None:
        """Blocks tell when their forward starts, and when a gradient reaches their output."""
        seen: set[int] = set()
        for trunk in [module for root in self.roles.roots for module in root.modules() if blocks_of(module)]:
            blocks = blocks_of(trunk)
            if id(blocks[0]) in seen:
                continue
            seen.add(id(blocks[0]))
            for number, block in enumerate(blocks):
                block.register_forward_pre_hook(self._entering(_place(number, len(blocks))))
                block.register_forward_hook(self._leaving(_place(number, len(blocks))))

    def _entering(self, place: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            self._begin(self._pass, f"{'backward' if self._backward else 'forward'}/{place}")

        return hook

    def _leaving(self, place: str) -> Callable[..., None]:
        def reached(gradient: Tensor) -> None:
            self._begin(self._pass, f"backward/{place}")
            self._label_gradients()

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._backward:
                return  # computed again for the backward: its gradient is already there
            if place == "last":
                self._begin(self._pass, "forward/head")
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(reached)

        return hook


def _place(number: int, depth: int) -> str:
    if number == depth - 1:
        return "last"
    return {0: "first", 1: "second"}.get(number, "middle")


def _signal(table: StepTable, objective: Objective, roles: Sequence[Role]) -> Signal:
    """Numbers of the right shape, and not all the same."""
    zeros = torch.zeros_like(table.behavior_logprobs)
    alternating = (table.sample_ids % 2).float() * 2 - 1
    critic = "critic" in roles
    return Signal(
        table=table,
        advantages=alternating,
        credit=table.rewards,
        old_logprobs=zeros if objective.needs_old else None,
        ref_logprobs=zeros if "ref" in roles else None,
        values=zeros if critic else None,
        returns=alternating if critic else None,
        ref_values=zeros if "ref_critic" in roles else None,
    )
