from __future__ import annotations

import pytest
import torch

from miles.errors import CheckpointError
from miles.learn.critic import Critic, frozen_copy, load_weights, weights_of
from miles.learn.forward import Compute
from miles.learn.pack import pack
from miles.learn.tiny import FAMILIES, tiny_model


def values(critic, groups, made, layout):
    step = groups.step(made)
    batches = pack(step, step.samples, layout)
    compute = Compute.of(groups.recipe(), tiny_model("llama"))
    return groups.in_table([critic(b, compute) for b in batches], batches, len(step.table.sample_ids))


def test_a_new_critic_is_the_actors_trunk_and_says_zero(groups):
    actor = tiny_model("llama")
    critic = Critic(actor)
    assert values(critic, groups, groups.draw(), groups.TREE).abs().max() == 0
    trunk = dict(actor.base_model.named_parameters())
    for name, parameter in critic.trunk.named_parameters():
        assert torch.equal(parameter, trunk[name])
        assert parameter.data_ptr() != trunk[name].data_ptr()


def test_a_value_is_read_where_its_token_is_predicted(groups):
    actor = tiny_model("llama")
    critic = Critic(actor)
    torch.nn.init.normal_(critic.value_head.weight)
    made = groups.draw(count=2)
    expected = []
    with torch.no_grad():
        for g in made:
            for s in g.samples:
                for part in s.segments:
                    hidden = actor.base_model(input_ids=torch.tensor([part.token_ids])).last_hidden_state[0]
                    every = critic.value_head(hidden).squeeze(1)
                    expected += [every[t - 1] for t, trained in enumerate(part.loss_mask) if trained]
        expected = torch.stack(expected)
        for layout in (groups.TREE, groups.PACKED, groups.SEPARATE):
            assert (values(critic, groups, made, layout) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_critic_has_every_weight_by_name_and_comes_back_equal(groups, family, tied):
    critic = Critic(tiny_model(family, tied))
    torch.nn.init.normal_(critic.value_head.weight)
    saved = {name: tensor.clone() for name, tensor in weights_of(critic).items()}
    assert {"value_head.weight", "value_head.bias"} < saved.keys()
    assert saved.keys() >= {name for name, _ in critic.named_parameters()}
    fresh = Critic(tiny_model(family, tied, seed=9))
    load_weights(fresh, saved)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in weights_of(fresh).items())


def test_a_critic_without_its_head_is_refused(groups):
    critic = Critic(tiny_model("llama"))
    saved = dict(weights_of(critic))
    del saved["value_head.weight"]
    with pytest.raises(CheckpointError, match=r"no tensor value_head\.weight"):
        load_weights(critic, saved)


def test_a_tied_head_stands_once_and_stays_tied(groups):
    model = tiny_model("llama", tied=True)
    saved = {name: tensor + 1 for name, tensor in weights_of(model).items()}
    assert not any("lm_head" in name for name in saved)
    load_weights(model, saved)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, saved["model.embed_tokens.weight"])
    assert any("lm_head" in name for name in weights_of(tiny_model("llama", tied=False)))


def test_a_reference_does_not_move_with_the_model(groups):
    model = tiny_model("qwen3")
    reference = frozen_copy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    untouched = tiny_model("qwen3")
    for a, b in zip(reference.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not a.requires_grad
