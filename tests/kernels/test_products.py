"""Products go to the library that suits the processor, and are the same numbers either way."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from miles.kernels import products
from miles.kernels.products import Linear, linear, product, suits_onednn, use_fast_products

WIDE = (256, 192)  # a weight that is large enough for oneDNN
SHAPES = [(5, 192), (2, 3, 192), (1, 192)]

needs_onednn = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this PyTorch was built without oneDNN"
)


@pytest.fixture(params=[False, pytest.param(True, marks=needs_onednn)], ids=["mkl", "onednn"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both libraries in turn, whatever the processor."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: request.param)
    return request.param


def operands(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(s, generator=generator, requires_grad=True) for s in (shape, WIDE, WIDE[:1]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_equals_float64(library: bool, shape: tuple[int, ...], with_bias: bool) -> None:
    x, weight, bias = operands(shape)
    given = [x, weight, bias] if with_bias else [x, weight]
    out = linear(*given)
    wide = [value.detach().double().requires_grad_() for value in given]
    expected = F.linear(*wide)
    assert suits_onednn(weight) == library
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    for got, right in zip(
        torch.autograd.grad(out, given, slope), torch.autograd.grad(expected, wide, slope.double()), strict=True
    ):
        assert got.shape == right.shape
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-4)


def test_gradients_flow_only_where_they_are_asked_for(library: bool) -> None:
    x, weight, _ = operands((4, 192))
    linear(x.detach(), weight).sum().backward()
    assert x.grad is None
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(WIDE), rtol=1e-5, atol=1e-4)
    frozen = weight.detach()
    linear(x, frozen).sum().backward()
    torch.testing.assert_close(x.grad, frozen.sum(0).expand(4, 192), rtol=1e-5, atol=1e-4)
    assert not linear(x.detach(), frozen).requires_grad


def test_product_takes_transposed_and_empty_operands(library: bool) -> None:
    x, weight, _ = (value.detach() for value in operands((3, 192)))
    torch.testing.assert_close(product(x, weight.T), x @ weight.T, rtol=1e-5, atol=1e-4)
    assert product(x[:0], weight.T).shape == (0, 256)
    assert linear(x[:0], weight).shape == (0, 256)


@needs_onednn
def test_small_weights_other_types_and_other_devices_stay_with_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    assert suits_onednn(torch.zeros(WIDE))
    assert not suits_onednn(torch.zeros(16, 16))
    assert not suits_onednn(torch.zeros(WIDE, dtype=torch.bfloat16))
    assert not suits_onednn(torch.zeros(WIDE, device="meta"))


@pytest.mark.parametrize(
    ("vendor", "expected"), [("GenuineIntel", False), ("AuthenticAMD", True), ("HygonGenuine", True), (None, False)]
)
@needs_onednn
def test_the_processor_decides(monkeypatch: pytest.MonkeyPatch, vendor: str | None, expected: bool) -> None:
    monkeypatch.setattr(products, "_vendor", lambda: vendor)
    monkeypatch.setattr(products.platform, "machine", lambda: "x86_64")
    assert products.onednn_is_faster.__wrapped__() is expected
    monkeypatch.setattr(products.platform, "machine", lambda: "arm64")
    assert products.onednn_is_faster.__wrapped__() is False


def test_a_model_keeps_its_names_weights_and_copies() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(192, 256), nn.Linear(256, 2), Own(2, 2))
    names, weight = list(model.state_dict()), model[0].weight
    use_fast_products(model)
    assert [type(module) for module in model] == [Linear, Linear, Own]
    assert list(model.state_dict()) == names
    assert model[0].weight is weight
    assert isinstance(copy.deepcopy(model)[0], Linear)
