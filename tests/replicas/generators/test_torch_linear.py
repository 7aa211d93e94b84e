"""Products with packed weights are those with plain ones, or the plain ones are taken."""

import pytest
import torch

from replicas.generators.torch import linear
from replicas.generators.torch.linear import (
    PackedLinear,
    PlainLinear,
    SmallLinear,
    gives_the_same,
    make_linear,
)

needs_packing = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor packs no bfloat16"
)


def drawn(*shape):
    stream = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=stream).bfloat16()


@needs_packing
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 64, 300])
@pytest.mark.parametrize("kind", [PackedLinear, SmallLinear])
def test_products_are_within_rounding_of_exact_ones(monkeypatch, kind, num_tokens, has_bias):
    if kind is PackedLinear:
        monkeypatch.setattr(linear, "SMALL_WEIGHTS", 0)
    weight, bias = drawn(96, 64), drawn(96) if has_bias else None
    found = make_linear(weight, bias)
    assert isinstance(found, kind)
    x, other = drawn(num_tokens, 64), drawn(num_tokens, 96)
    exact = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    wanted = (exact, exact + other.double(), exact * other.double(), exact * exact.sigmoid())
    results = (found(x), found.plus(x, other), found.times(x, other), found.swish(x))
    for result, value in zip(results, wanted, strict=True):
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result.double(), value, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("num_tokens", [4, 5])
def test_operands_stay_as_they_are(num_tokens):
    weight, x, other = drawn(96, 64), drawn(num_tokens, 64), drawn(num_tokens, 96)
    copies = x.clone(), other.clone()
    found = make_linear(weight, None)
    found.plus(x, other)
    found.times(x, other)
    assert torch.equal(x, copies[0])
    assert torch.equal(other, copies[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_weights_stay_plain(dtype):
    weight = drawn(8, 4).to(dtype)
    found = make_linear(weight, None)
    assert isinstance(found, PlainLinear)
    assert found.weight is weight


@needs_packing
def test_a_packed_product_that_is_wrong_is_noticed():
    weight, bias = drawn(96, 64), drawn(96)
    plain = PlainLinear(weight, bias)
    assert gives_the_same(PackedLinear(weight, bias), plain)
    one_wrong = weight.clone()
    one_wrong[7] = drawn(64)
    assert not gives_the_same(PackedLinear(one_wrong, bias), plain)
    assert not gives_the_same(PackedLinear(weight, None), plain)


def test_where_packing_fails_the_plain_product_is_taken(monkeypatch):
    def refuse(*_args):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(linear, "_product", refuse)
    monkeypatch.setattr(linear, "_product_with", refuse)
    assert isinstance(make_linear(drawn(8, 4), None).more, PlainLinear)
    monkeypatch.setattr(linear, "SMALL_WEIGHTS", 0)
    assert isinstance(make_linear(drawn(8, 4), None), PlainLinear)
