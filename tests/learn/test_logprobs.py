from __future__ import annotations

import math

import pytest
import torch

from miles.learn.logprobs import Head, token_logprobs


def problem(dtype=torch.float32, states=11, size=8, symbols=23, bias=True):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(states, size, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(symbols, size, generator=generator, requires_grad=True)
    offset = torch.randn(symbols, generator=generator, requires_grad=True) if bias else None
    rows = torch.tensor([0, 0, 0, 1, 2, 4, 4, 7, 9, 10, 10])
    labels = torch.tensor([3, 3, 5, 0, 22, 1, 2, 9, 9, 4, 6])
    return hidden, weight, offset, rows, labels


def plain(head, hidden, labels, rows):
    logits = head.scale * (hidden.float() @ head.weight.T + (0 if head.bias is None else head.bias))
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logp = torch.log_softmax(logits / head.temperature, 1)
    return logp[rows, labels], -(logp.exp() * logp).sum(1)


SHAPES = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 2.0, "temperature": 1.3},
    "scale": {"scale": 0.25, "temperature": 0.5},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [1, 4, 1024])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.7])
def test_values_and_gradients_equal_log_softmax_in_every_chunking(shape, chunk, bias, entropy_weight):
    hidden, weight, offset, rows, labels = problem(bias=bias)
    head = Head(weight, offset, chunk=chunk, **SHAPES[shape])
    inputs = [hidden, weight] + ([offset] if bias else [])
    coefficients = torch.linspace(-1, 2, len(labels))

    def loss(logprobs, entropy):
        total = (coefficients * logprobs).sum()
        return total + entropy_weight * (coefficients * entropy[rows]).sum() if entropy_weight else total

    found = token_logprobs(hidden, head, labels, rows)
    expected = plain(head, hidden, labels, rows)
    torch.testing.assert_close(found[0], expected[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(found[1], expected[1], atol=2e-6, rtol=1e-5)
    for got, want in zip(
        torch.autograd.grad(loss(*found), inputs), torch.autograd.grad(loss(*expected), inputs), strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_only_what_trains_gets_a_gradient():
    hidden, weight, _, rows, labels = problem(bias=False)
    frozen = weight.detach()
    logprobs, entropy = token_logprobs(hidden, Head(frozen), labels, rows, with_entropy=False)
    assert entropy is None
    logprobs.sum().backward()
    assert hidden.grad is not None
    logprobs, _ = token_logprobs(hidden.detach(), Head(weight), labels, rows)
    logprobs.sum().backward()
    assert weight.grad.shape == weight.shape


def test_entropy_alone_has_its_gradient():
    hidden, weight, _, rows, labels = problem(bias=False)
    _, found = token_logprobs(hidden, Head(weight, chunk=3), labels, rows)
    _, expected = plain(Head(weight), hidden, labels, rows)
    got = torch.autograd.grad((found**2).sum(), hidden)[0]
    torch.testing.assert_close(got, torch.autograd.grad((expected**2).sum(), hidden)[0], atol=1e-5, rtol=1e-5)


def test_absent_symbols_have_no_part_in_the_entropy_and_no_gradient():
    """Logits (-inf, 0, 0): entropy ln 2, and finite gradients."""
    hidden = torch.zeros(1, 2, requires_grad=True)
    head = Head(torch.zeros(3, 2), torch.tensor([-math.inf, 0.0, 0.0]))
    logprobs, entropy = token_logprobs(hidden, head, torch.tensor([1]), torch.tensor([0]))
    assert entropy.item() == pytest.approx(0.6931, abs=1e-4)
    assert logprobs.item() == pytest.approx(-math.log(2))
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.isfinite(hidden.grad).all()


def test_low_precision_states_meet_a_float32_head():
    """The same bf16 states twice, in other chunks: the ratio is 1 to 1e-3, and every result is float32."""
    hidden, weight, _, rows, labels = problem(dtype=torch.bfloat16, bias=False)
    a, entropy = token_logprobs(hidden, Head(weight, chunk=2), labels, rows)
    b, _ = token_logprobs(hidden, Head(weight), labels, rows)
    assert a.dtype == entropy.dtype == torch.float32
    assert ((a - b).exp() - 1).abs().max() < 1e-3
    torch.testing.assert_close(a, plain(Head(weight), hidden, labels, rows)[0], atol=1e-5, rtol=1e-5)
    a.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16


def test_nothing_as_large_as_the_logits_is_kept():
    states, symbols = 64, 4096
    hidden = torch.randn(states, 8, requires_grad=True)
    head = Head(torch.randn(symbols, 8, requires_grad=True), chunk=8)
    rows, labels = torch.arange(states), torch.arange(states)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        token_logprobs(hidden, head, labels, rows)[0].sum()
    assert max(kept) < states * symbols / 4
    assert sum(kept) == head.weight.numel() + hidden.numel() + 4 * states
