"""The models beside the actor: a critic with a trunk of its own, and the frozen reference."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from miles.learn.forward import Compute, Reads, hidden_states
from miles.learn.optim import matching
from miles.learn.parallel import whole
from miles.types import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


M = TypeVar("M", bound=nn.Module)


class Critic(nn.Module):
    """A copy of the actor's trunk and a linear head with zero weights and bias: every value starts at 0."""

    def __init__(self, actor: PreTrainedModel) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(actor.base_model).requires_grad_(True)
        self.value_head = value_head(actor)

    def forward(self, batch: Batch, compute: Compute) -> Tensor:
        return token_values(self.trunk, self.value_head, batch, compute)


def value_head(model: PreTrainedModel) -> nn.Linear:
    """Zero weights and bias, float32: every value starts at 0."""
    weight = model.get_output_embeddings().weight
    head = nn.Linear(weight.shape[1], 1, dtype=torch.float32, device=weight.device)
    zero(head)
    return head


def zero(head: nn.Linear) -> None:
    """Weights and bias 0."""
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)


def token_values(trunk: nn.Module, head: nn.Linear, batch: Batch, compute: Compute) -> Tensor:
    """[T] float32, the value before each trained token, read where the token is predicted from; 0 elsewhere.

    No temperature acts on it.
    """
    reads = Reads.of(batch)
    hidden = hidden_states(trunk, batch, compute)[reads.states]
    return reads.spread(head(hidden.float()).squeeze(1)[reads.rows], batch)


def frozen_copy(model: M) -> M:
    """The model as it is now, without gradients."""
    reference = copy.deepcopy(model)
    for parameter in reference.parameters():
        parameter.grad = None
    return reference.requires_grad_(False)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and kept buffers by name; tied ones once."""
    seen: set[int] = set()
    out = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            out[name] = tensor.detach()
    return out


def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and kept buffers by name, each whole; on several ranks all of them iterate together."""
    return ((name, whole(tensor)) for name, tensor in weights_of(model).items())


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies into the model's own tensors. Raises CheckpointError where one is missing or has another shape."""
    with torch.no_grad():
        for name, tensor in weights_of(model).items():
            tensor.copy_(matching(tensors, name, tensor))
