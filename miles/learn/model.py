"""The models of a learner by role: what asks for log-probabilities or values does not know which weights answer.

    actor          what is trained: the policy                log-probabilities
                   or, for a reward model, a scorer           scores in their place
    ref            the frozen reference                       log-probabilities
    critic         a value for each trained token             values
    ref_critic     the critic as the run began                values
    reward_model   a frozen scorer, on one base only          values, of which the one after the last token is read

Every forward goes through the forward of a root, one `nn.Module` that holds all the weights it reads, so that what hangs
on modules (gathered shards, compiled blocks, recomputation) is at work in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor, nn

from miles.learn.critic import Critic, frozen_copy, load_weights, token_values, weights_of
from miles.learn.forward import Compute, policy_logprobs
from miles.learn.onebase import AdapterRoles
from miles.learn.parallel import parallelize
from miles.learn.saved import load_critic, saved_critic
from miles.learn.scorer import scorer_head
from miles.learn.stream import fill, fill_critic, with_memory
from miles.types import Batch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from miles.algo.build import Objective
    from miles.config.schema import Recipe
    from miles.learn.shards import Stored

Role = Literal["actor", "critic", "ref", "ref_critic", "reward_model"]


class Roles(Protocol):
    """What a learner asks of its models."""

    actor: PreTrainedModel  # engines in this process sample with it

    @property
    def names(self) -> tuple[Role, ...]:
        """The roles that there are."""
        ...

    @property
    def roots(self) -> tuple[nn.Module, ...]:
        """The modules whose forwards are called, each parameter in one of them."""
        ...

    @property
    def trunks(self) -> tuple[PreTrainedModel, ...]:
        """The stacks of blocks that gradients go through."""
        ...

    def logprobs(
        self, role: Role, batch: Batch, with_entropy: bool = True, temperature: float | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[T] float32 of actor or ref, and [T] entropies; see `forward.policy_logprobs`. Of a scorer its scores.

        temperature: None: of the sampling.
        """
        ...

    def values(self, role: Role, batch: Batch) -> Tensor:
        """[T] float32 of critic, ref_critic or reward_model; see `critic.token_values`."""
        ...

    def trained(self, role: Role) -> dict[str, nn.Parameter]:
        """By name, what the optimizer of actor or critic moves."""
        ...

    def shard(self, mesh: DeviceMesh) -> None:
        """Spreads the weights over the mesh, before optimizers are made of them."""
        ...

    def fill(self, weights: Mapping[str, Stored], device: torch.device) -> None:
        """Gives models without memory theirs, and each rank's part of the weights they start from."""
        ...

    def begin(self) -> None:
        """Reads what the recipe's roles start from out of their folders, each rank its part. Raises ModelError."""
        ...

    def renew_reference(self) -> None:
        """The reference becomes the actor as it is now."""
        ...

    def rest(self) -> None:
        """Between steps: the actor is what `actor` computes."""
        ...

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds of the weights, by file and name: the models' own tensors, not copies."""
        ...

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Back into the models. Raises CheckpointError where something is missing or has another shape."""
        ...


class Policy(nn.Module):
    """A causal language model as a root."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, compute: Compute, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        return policy_logprobs(self.model, batch, compute, with_entropy)


class Scorer(nn.Module):
    """A sequence classifier as a root: the score of a sequence stands at its one trained place, after its last token."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, compute: Compute, with_entropy: bool) -> tuple[Tensor, None]:
        return token_values(self.model.base_model, scorer_head(self.model), batch, compute), None


class SeparateModels:
    """Full weights: a model for each role. Critic and reference start as copies of the actor."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe, objective: Objective, compute: Compute) -> None:
        self.actor = model.requires_grad_(True)
        self._compute = compute
        self._offload = recipe.parallel.offload_reference
        self._reference_moves = recipe.algorithm.ref_update_every is not None
        self._saved_critic = saved_critic(recipe)
        root = Scorer if objective.row.scorer else Policy
        self.policies: dict[Role, Policy | Scorer] = {"actor": root(model)}
        self.critics: dict[Role, Critic] = {}
        if objective.needs_critic:
            self.critics["critic"] = Critic(model)
        if objective.needs_ref_values:
            self.critics["ref_critic"] = frozen_copy(self.critics["critic"])
        if objective.needs_ref:
            self.policies["ref"] = Policy(frozen_copy(model))

    @property
    def names(self) -> tuple[Role, ...]:
        return (*self.policies, *self.critics)

    @property
    def roots(self) -> tuple[nn.Module, ...]:
        return (*self.policies.values(), *self.critics.values())

    @property
    def trunks(self) -> tuple[PreTrainedModel, ...]:
        return (self.actor.base_model, *(self.critics[role].trunk for role in self.critics if role == "critic"))

    def logprobs(
        self, role: Role, batch: Batch, with_entropy: bool = True, temperature: float | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return self.policies[role](batch, self._compute.at(temperature), with_entropy)

    def values(self, role: Role, batch: Batch) -> Tensor:
        return self.critics[role](batch, self._compute)

    def trained(self, role: Role) -> dict[str, nn.Parameter]:
        return dict((self.actor if role == "actor" else self.critics[role]).named_parameters())

    def shard(self, mesh: DeviceMesh) -> None:
        offload = self._offload
        for role, policy in self.policies.items():
            trunk = policy.model.base_model
            parallelize(policy, trunk, mesh, dtype=self._compute.dtype, offload=offload and role == "ref")
        for critic in self.critics.values():
            parallelize(critic, critic.trunk, mesh, dtype=self._compute.dtype)
        self._compute = replace(self._compute, dtype=torch.float32)  # blocks are gathered in their type: no autocast

    def fill(self, weights: Mapping[str, Stored], device: torch.device) -> None:
        for policy in self.policies.values():
            with_memory(policy, policy.model, device)
            fill(policy.model, weights)
        for critic in self.critics.values():
            fill_critic(critic, self.actor, weights, device)

    def begin(self) -> None:
        if self._saved_critic is not None:
            for critic in self.critics.values():
                load_critic(critic, self.actor.base_model_prefix, self._saved_critic)

    def renew_reference(self) -> None:
        load_weights(self.policies["ref"].model, weights_of(self.actor))

    def rest(self) -> None:
        """Nothing to do: each role has its own model."""

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        return {file: weights_of(model) for file, model in self._stored.items()}

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        for file, model in self._stored.items():
            load_weights(model, tensors.get(file, {}))

    @property
    def _stored(self) -> dict[str, nn.Module]:
        """A reference that never moves is the model that the run starts from, so it is not stored again."""
        moves = self._reference_moves and "ref" in self.policies
        return {
            "model": self.actor,
            **({"critic": self.critics["critic"]} if "critic" in self.critics else {}),
            **({"reference": self.policies["ref"].model} if moves else {}),
        }


def build_roles(model: PreTrainedModel, recipe: Recipe, objective: Objective, compute: Compute) -> Roles:
    """The arrangement that the recipe asks for, with the roles that the algorithm needs."""
    made = SeparateModels if recipe.lora.rank is None else AdapterRoles
    return made(model, recipe, objective, compute)
