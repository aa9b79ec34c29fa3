from __future__ import annotations

import pytest
import torch

from miles.learn.critic import Critic
from miles.learn.forward import Compute, Reads, head_of, policy_logprobs
from miles.learn.pack import build_batch, pack
from miles.learn.rows import Layout
from miles.learn.tiny import FAMILIES, tiny_model

VARIANTS = [(family, tied) for family in FAMILIES for tied in (True, False)]
EXACT = 1e-5


def livelier(model):
    """Random weights so large that what a token sees shows in its log-probability."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5)
    return model


def compute_of(groups, model, **keys):
    return Compute.of(groups.recipe(**keys), model)


def coefficients(count):
    return torch.linspace(-1, 2, count)


@pytest.mark.parametrize(("family", "tied"), VARIANTS)
@pytest.mark.parametrize("kind", ["one tree", "tree", "packed", "separate"])
def test_packed_rows_equal_one_sequence_at_a_time(groups, family, tied, kind):
    """Log-probabilities, entropies and every gradient, with second turns, second segments, and windows below the row."""
    model = livelier(tiny_model(family, tied))
    made = groups.draw(count=3, size=4, prompt=14, longest=9)
    step = groups.step(made)
    expected, entropies = groups.plain_table(model, made)
    (coefficients(len(expected)) * expected + 0.3 * entropies).sum().backward()
    wanted = groups.gradients(model)
    model.zero_grad()

    layouts = {"tree": groups.TREE, "packed": groups.PACKED, "separate": groups.SEPARATE}
    if kind == "one tree":
        batches = [build_batch([tuple(part for sample in step.segments for part in sample)], share=True)]
        assert batches[0].width > 4 * 16
    else:
        batches = pack(step, step.samples, layouts[kind])
    outputs = [policy_logprobs(model, batch, compute_of(groups, model)) for batch in batches]
    found = groups.in_table([logprobs for logprobs, _ in outputs], batches, len(expected))
    found_entropies = groups.in_table([entropy for _, entropy in outputs], batches, len(expected))
    (coefficients(len(expected)) * found + 0.3 * found_entropies).sum().backward()
    assert (found - expected).abs().max() < EXACT
    assert (found_entropies - entropies).abs().max() < EXACT
    assert groups.largest_difference(groups.gradients(model), wanted) < EXACT


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_window_measured_in_rows_would_be_seen(groups, family):
    """The control of the test above: with the window ignored the numbers are off by far more than its bound."""
    model = livelier(tiny_model(family))
    made = groups.draw(count=2, size=3, prompt=14, longest=9)
    step = groups.step(made)
    expected, _ = groups.plain_table(model, made)
    compute = compute_of(groups, model)
    wide = Compute(type(compute.attention)(compute.attention.kinds, 10**6))
    batches = pack(step, step.samples, Layout(True, True, 4096))
    found = groups.in_table([policy_logprobs(model, batch, wide)[0] for batch in batches], batches, len(expected))
    assert (found - expected).abs().max() > 1e-3


def test_the_temperature_divides_the_policys_logits_and_not_the_values(groups):
    model = tiny_model("llama")
    made = groups.draw(count=2)
    step = groups.step(made)
    batches = pack(step, step.samples, groups.TREE)
    cold = compute_of(groups, model, rollout__temperature=0.5)
    warm = compute_of(groups, model)
    expected, _ = groups.plain_table(model, made, temperature=0.5)
    found = groups.in_table([policy_logprobs(model, batch, cold)[0] for batch in batches], batches, len(expected))
    assert (found - expected).abs().max() < EXACT
    critic = Critic(model)
    with torch.no_grad():
        critic.value_head.bias.fill_(1.0)
        for batch in batches:
            assert torch.equal(critic(batch, cold), critic(batch, warm))
            assert critic(batch, cold)[batch.loss_mask].tolist() == [1.0] * int(batch.loss_mask.sum())


def test_labels_of_one_state_share_its_logits(groups):
    made = [groups.group(0, [groups.sample(groups.segment([([1, 4, 5], False), ([k], True)])) for k in (7, 8, 7, 9)])]
    step = groups.step(made)
    (batch,) = pack(step, step.samples, groups.TREE)
    reads = Reads.of(batch)
    assert reads.states.tolist() == [2]
    assert reads.rows.tolist() == [0, 0, 0, 0]
    logprobs, _ = policy_logprobs(tiny_model("llama"), batch, Compute.of(groups.recipe(), tiny_model("llama")))
    own = logprobs[batch.loss_mask][batch.slots[batch.loss_mask].argsort()]
    assert own[0] == own[2] != own[1]


def test_bf16_is_for_the_trunk_and_not_for_head_and_log_probabilities(groups):
    model = livelier(tiny_model("llama"))
    made = groups.draw(count=2)
    step = groups.step(made)
    batches = pack(step, step.samples, groups.TREE)
    low = compute_of(groups, model, learner__param_dtype="bf16")
    expected, _ = groups.plain_table(model, made)
    outputs = [policy_logprobs(model, batch, low) for batch in batches]
    found = groups.in_table([logprobs for logprobs, _ in outputs], batches, len(expected))
    assert found.dtype == torch.float32
    assert 1e-4 < (found - expected).abs().max() < 0.5
    found.sum().backward()
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_float32_means_float32_activations(groups):
    model = tiny_model("qwen3")
    seen = set()
    for module in model.modules():
        module.register_forward_hook(lambda _m, _i, out: seen.add(out.dtype) if torch.is_tensor(out) else None)
    step = groups.step(groups.draw(count=2))
    for batch in pack(step, step.samples, groups.TREE):
        policy_logprobs(model, batch, compute_of(groups, model))
    assert seen == {torch.float32}


def test_a_head_is_read_from_the_model(groups):
    model = tiny_model("gpt_neox", tied=False)
    head = head_of(model, 0.5, 7)
    assert head.weight is model.lm_head.weight
    assert (head.temperature, head.chunk, head.scale, head.softcap) == (0.5, 7, 1.0, None)
