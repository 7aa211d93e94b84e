"""Products with packed weights are those with plain ones, or the plain ones are taken."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replicas.generators.torch import linear, native
from replicas.generators.torch.linear import (
    PackedLinear,
    PlainLinear,
    gives_the_same,
    make_linear,
)
from replicas.generators.torch.native import Feature
from replicas.generators.torch.panels import PanelLinear

needs_packing = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor packs no bfloat16"
)
# The kernels of processors with all features of this one, and of those that lack some.
WITHOUT = {
    "all": Feature(0),
    "no tiles": Feature.AMX,
    "no pairs": Feature.AMX | Feature.AVX512,
    "none": Feature.AMX | Feature.AVX512 | Feature.AVX2,
}


def panels(name):
    """A function that packs a weight for the kernels of one instruction set."""
    return lambda weight, bias: PanelLinear(weight, bias, native.kernel_set(WITHOUT[name]))


KINDS = [
    pytest.param(PackedLinear, marks=needs_packing, id="oneDNN"),
    *(pytest.param(panels(name), id=name) for name in WITHOUT),
]


def drawn(*shape):
    stream = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=stream).bfloat16()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 64, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_within_rounding_of_exact_ones(kind, num_tokens, has_bias):
    check_products(kind, num_tokens, 64, 96, has_bias)


@given(
    st.sampled_from(list(WITHOUT)),
    st.integers(1, 70),
    st.integers(1, 80).map(lambda half: 2 * half) | st.integers(1, 5).map(lambda n: 32 * n),
    st.integers(1, 200),
    st.booleans(),
)
def test_panels_have_any_number_of_rows_features_and_columns(
    without, num_tokens, num_in, num_out, has_bias
):
    check_products(panels(without), num_tokens, num_in, num_out, has_bias)


def check_products(kind, num_tokens, num_in, num_out, has_bias):
    weight, bias = drawn(num_out, num_in), drawn(num_out) if has_bias else None
    found = kind(weight, bias)
    x, other = drawn(num_tokens, num_in), drawn(num_tokens, num_out)
    exact = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    wanted = (exact, exact + other.double(), exact * other.double(), exact * exact.sigmoid())
    results = (found(x), found.plus(x, other), found.times(x, other), found.swish(x))
    for result, value in zip(results, wanted, strict=True):
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result.double(), value, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("num_in", [62, 64], ids=["pairs", "tiles where there are any"])
@pytest.mark.parametrize(
    ("num_threads", "without"), [(1, "all"), (2, "no tiles"), (5, "all"), (2, "no pairs")]
)
def test_a_row_of_panels_is_the_same_whatever_is_beside_it(num_threads, without, num_in):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        found, x = panels(without)(drawn(150, num_in), drawn(150)), drawn(80, num_in)
        whole = found(x)
        for first in range(40):
            for last in (*range(first + 1, first + 9), first + 33, first + 40):
                assert torch.equal(found(x[first:last]), whole[first:last])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("without", WITHOUT)
def test_a_number_that_is_none_stays_in_its_row(without):
    x = drawn(7, 64)
    x[3, 5] = torch.nan
    found = panels(without)(drawn(96, 64), None)
    for result in (found(x), found.swish(x)):
        assert result[3].isnan().all()
        assert not result[[0, 1, 2, 4, 5, 6]].isnan().any()


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_product_that_is_wrong_is_noticed(kind):
    weight, bias = drawn(96, 64), drawn(96)
    plain = PlainLinear(weight, bias)
    assert gives_the_same(kind(weight, bias), plain)
    one_wrong = weight.clone()
    one_wrong[7] = drawn(64)
    assert not gives_the_same(kind(one_wrong, bias), plain)
    assert not gives_the_same(kind(weight, None), plain)


def test_where_packing_fails_the_plain_product_is_taken(monkeypatch):
    def refuse(*_args):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(native, "kernel_set", refuse)
    monkeypatch.setattr(linear, "_product", refuse)
    monkeypatch.setattr(linear, "_product_with", refuse)
    assert isinstance(make_linear(drawn(8, 4), None), PlainLinear)


def test_weights_are_panels_unless_their_features_are_odd():
    assert isinstance(make_linear(drawn(8, 4), None), PanelLinear)
    assert not isinstance(make_linear(drawn(8, 5), None), PanelLinear)


def test_great_sums_are_gated_without_overflow():
    found = PanelLinear(torch.tensor([[3e38, 0.0], [0.0, 3e38]]).bfloat16(), None)
    result = found.swish(torch.tensor([[1.0, -1.0]]).bfloat16())
    assert result.isfinite().all()


@pytest.mark.parametrize(
    ("x", "other"),
    [
        (torch.zeros(2, 6).bfloat16(), None),
        (torch.zeros(2, 4), None),
        (torch.zeros(4, 2).bfloat16().T, None),
        (torch.zeros(2, 4).bfloat16(), torch.zeros(1, 8).bfloat16()),
        (torch.zeros(2, 4).bfloat16(), torch.zeros(2, 8)),
    ],
    ids=["features", "dtype", "columns", "rows of the summand", "dtype of the summand"],
)
def test_operands_of_another_shape_or_dtype_are_refused(x, other):
    found = PanelLinear(drawn(8, 4), None)
    with pytest.raises(ValueError, match=r"product of|in a row"):
        found.plus(x, other) if other is not None else found(x)
