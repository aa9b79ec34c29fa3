"""The roles of LoRA: one frozen base, on which an adapter is switched on for each forward and nothing is copied.

actor       its adapter                     ref           no adapter: the base, bit for bit; a frozen adapter where it moves, or
                                                          where the actor starts from an adapter that was trained before
critic      its adapter and a value head    ref_critic    a frozen adapter and value head
                                            reward_model  a frozen adapter and head

A scorer is an actor with a head: the sequence classifier's own, which is trained beside the adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from miles.learn.adapters import (
    adapter_parameters,
    attach,
    copy_adapter,
    load_parameters,
    name_in_base,
    quantize_base,
    start,
)
from miles.learn.critic import Critic, frozen_copy, load_weights, token_values, value_head, weights_of, zero
from miles.learn.forward import Compute, policy_logprobs
from miles.learn.parallel import parallelize
from miles.learn.saved import load_adapter, load_critic, saved_adapters, saved_critic
from miles.learn.scorer import scorer_head
from miles.learn.stream import fill, fill_critic, with_memory
from miles.types import Batch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from miles.algo.build import Objective
    from miles.config.schema import Recipe
    from miles.learn.model import Role
    from miles.learn.shards import Stored


def role_names(recipe: Recipe, objective: Objective) -> tuple[Role, ...]:
    """The roles that a run on one base has."""
    judged = recipe.reward.model is not None and recipe.reward.model_place == "learner"
    return (
        "actor",
        *(("ref",) if objective.needs_ref else ()),
        *(("critic",) if objective.needs_critic else ()),
        *(("ref_critic",) if objective.needs_ref_values else ()),
        *(("reward_model",) if judged else ()),
    )


class OneBase(nn.Module):
    """The root of a model with adapters, and of the value heads on it."""

    def __init__(self, model: PreTrainedModel, heads: Mapping[str, nn.Linear]) -> None:
        super().__init__()
        self.model, self.heads = model, nn.ModuleDict(heads)

    def forward(
        self, batch: Batch, compute: Compute, head: str | None, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Values and None with a head, otherwise log-probabilities and entropies; of the adapter that is on."""
        if head is None:
            return policy_logprobs(self.model, batch, compute, with_entropy)
        return token_values(self.model.base_model, self.heads[head], batch, compute), None


class AdapterRoles:
    """`model.Roles` on one base. The adapter stays on after a forward, because its backward may compute blocks again."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe, objective: Objective, compute: Compute) -> None:
        self.actor = model
        self._compute = compute
        self._reference_moves = objective.needs_ref and recipe.algorithm.ref_update_every is not None
        self._own_reference = self._reference_moves or (objective.needs_ref and recipe.lora.path is not None)
        self.names = role_names(recipe, objective)
        critics = [role for role in self.names if role in ("critic", "ref_critic")]
        self._full: dict[Role, Critic] = {}  # critics with weights of their own
        if recipe.lora.critic == "full":
            self._full = {
                role: frozen_copy(Critic(model)) if role == "ref_critic" else Critic(model) for role in critics
            }
        with_heads = [role for role in (*critics, "reward_model") if role in self.names and role not in self._full]
        self._adapters: list[Role] = ["actor", *with_heads, *(["ref"] if self._own_reference else [])]
        self._saved = {role: saved for role, saved in saved_adapters(recipe).items() if role in self._adapters}
        self._saved_critic = saved_critic(recipe) if self._full else None
        if compute.dtype is not torch.float32:
            for parameter in model.parameters():
                parameter.data = parameter.data.to(compute.dtype)
        # The base is stored in the type that it computes in; autocast would cast adapters and heads as well.
        self._stored_type = replace(compute, dtype=torch.float32)
        self._seed = recipe.run.seed
        self._switch = attach(model, self._adapters, recipe.lora, self._seed)
        if recipe.lora.base_bits is not None:
            quantize_base(model, recipe.lora.base_bits)
        heads = {role: value_head(model) for role in with_heads}
        if objective.row.scorer:
            heads["actor"] = scorer_head(model).requires_grad_(True)
        self.root = OneBase(model, heads)
        for role in ("ref", "ref_critic", "reward_model"):
            for parameter in self.trained(role).values():
                parameter.requires_grad_(False)

    @property
    def roots(self) -> tuple[nn.Module, ...]:
        return (self.root, *self._full.values())

    @property
    def trunks(self) -> tuple[PreTrainedModel, ...]:
        return (self.actor.base_model, *(self._full[role].trunk for role in self._full if role == "critic"))

    def logprobs(
        self, role: Role, batch: Batch, with_entropy: bool = True, temperature: float | None = None
    ) -> tuple[Tensor, Tensor | None]:
        self._switch.adapter = role if role == "actor" or self._own_reference else None
        head = role if role in self.root.heads else None
        return self.root(batch, self._stored_type.at(temperature), head, with_entropy)

    def values(self, role: Role, batch: Batch) -> Tensor:
        if role in self._full:
            return self._full[role](batch, self._compute)
        self._switch.adapter = role
        return self.root(batch, self._stored_type, role, False)[0]

    def trained(self, role: Role) -> dict[str, nn.Parameter]:
        if role in self._full:
            return dict(self._full[role].named_parameters())
        head = dict(self.root.heads[role].named_parameters("value_head")) if role in self.root.heads else {}
        return {**adapter_parameters(self.actor, role), **head}

    def shard(self, mesh: DeviceMesh) -> None:
        """Base and adapters of a block are gathered together, each in the type that it is stored in."""
        parallelize(self.root, self.actor.base_model, mesh)
        for critic in self._full.values():
            parallelize(critic, critic.trunk, mesh, dtype=self._compute.dtype)
        self._compute = self._stored_type

    def fill(self, weights: Mapping[str, Stored], device: torch.device) -> None:
        with_memory(self.root, self.actor, device)
        fill(self.actor, weights, name_in_base)
        for role in self._adapters:
            start(self.actor, role, self._seed)
            if role in self.root.heads and role != "actor":
                zero(self.root.heads[role])
        for critic in self._full.values():
            fill_critic(critic, self.actor, weights, device)

    def begin(self) -> None:
        for role, saved in self._saved.items():
            head = self.root.heads[role] if role != "actor" else None
            load_adapter(self.actor, role, head, saved)
        if self._saved_critic is not None:
            for critic in self._full.values():
                load_critic(critic, self.actor.base_model_prefix, self._saved_critic)
        if self._own_reference:
            copy_adapter(self.actor, "actor", "ref")
        if "ref_critic" in self._adapters:
            copy_adapter(self.actor, "critic", "ref_critic")
            load_weights(self.root.heads["ref_critic"], weights_of(self.root.heads["critic"]))

    def renew_reference(self) -> None:
        copy_adapter(self.actor, "actor", "ref")

    def rest(self) -> None:
        self._switch.adapter = "actor"

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Adapters and heads; the base is the model that the run starts from and is not stored again."""
        adapters = {file: {name: p.detach() for name, p in held.items()} for file, held in self._stored.items()}
        return {**adapters, "critic": weights_of(self._full["critic"])} if self._full else adapters

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        for file, held in self._stored.items():
            load_parameters(held, tensors.get(file, {}))
        if self._full:
            load_weights(self._full["critic"], tensors.get("critic", {}))

    @property
    def _stored(self) -> dict[str, dict[str, nn.Parameter]]:
        held = {"adapter": self.trained("actor")}
        if "critic" in self.root.heads:
            held["critic"] = self.trained("critic")
        if self._reference_moves:
            held["reference"] = adapter_parameters(self.actor, "ref")
        return held
