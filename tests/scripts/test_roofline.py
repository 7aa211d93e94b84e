"""The roofline page: facts, bytes and arithmetic by hand, properties of any estimate, the text."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.generators.simulated.meshes import MODELS as SIMULATED
from replicas.generators.ttnn import budget
from replicas.generators.ttnn.profiles import PROFILES
from replicas.tt.meshes import mesh_spec
from scripts import roofline_page
from scripts.roofline import page
from scripts.roofline.decode import decode_ops
from scripts.roofline.estimate import SLOWER, STATED, limit_s, timed, total_s
from scripts.roofline.facts import (
    ASSUMPTIONS,
    CORES,
    MESHES,
    MODELS,
    SOURCES,
    collective_s,
    published,
)
from scripts.roofline.ops import ALL_PRODUCTS, UPSTREAM, UPSTREAM_PRECISION, native_precision
from scripts.roofline_page import PAGE

ONCE = replace(UPSTREAM, products=dict.fromkeys(ALL_PRODUCTS, "columns"))
"""Programs that read every weight exactly once."""
SHARES = ("stripes", "interleaved", "cache", "tuned", "unaided")
"""Assumptions that are shares of what the chip could; the others are times."""
every_place = pytest.mark.parametrize("mesh", MESHES)
every_model = pytest.mark.parametrize("model", MODELS)
every_kind = pytest.mark.parametrize("kind", page.KINDS)


def weight_bytes(ops):
    return sum(op.count * op.num_bytes for op in ops if op.program is not None)


def rate(model, mesh, kind):
    return 1 / total_s(page.decode_timed(model, mesh, page.KINDS[kind](model, mesh)))


# --- the page ------------------------------------------------------------------------------------


def test_the_page_is_what_the_script_writes():
    assert PAGE.read_text(encoding="utf-8") == page.text(), "run python -m scripts.roofline_page"


def test_who_asks_the_script_for_help_keeps_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(roofline_page, "PAGE", tmp_path / "roofline.md")
    for asked in (["--help"], ["--unknown"]):
        with pytest.raises(SystemExit):
            roofline_page.main(asked)
    assert not (tmp_path / "roofline.md").exists()
    assert "docs/roofline.md" in capsys.readouterr().out
    roofline_page.main([])
    assert (tmp_path / "roofline.md").read_text(encoding="utf-8") == page.text()


def test_rates_of_one_user_and_of_32_stand_apart():
    _, _, section = page.text().partition("## Decode")
    rows = [line.split("|") for line in section.partition("\n## ")[0].splitlines()]
    [row] = [row for row in rows if row[1:3] == [" Llama-3.1-8B ", " P150 "] and len(row) == 9]
    assert [cell.strip() for cell in row[6:8]] == ["33.1, 32.75, 42.08 (two readers)", "33.6"]


@every_place
@every_model
@every_kind
def test_a_range_begins_with_the_slower_values_and_a_ring_is_no_slower(model, mesh, kind):
    slow, fast = (page.decode_rate(model, mesh, kind, given) for given in (SLOWER, STATED))
    assert slow < fast
    for key in STATED:
        one = page.decode_rate(model, mesh, kind, {**STATED, key: SLOWER[key]})
        assert one <= fast, key
    if mesh == "T3K":
        assert page.decode_rate(model, mesh, kind, topology="ring") > fast


def test_every_source_is_named_and_every_name_is_a_source():
    used = {stated.source for stated in ASSUMPTIONS.values()}
    used |= {stated.other_source for stated in ASSUMPTIONS.values() if stated.other is not None}
    used |= {row.source for row in published()}
    text = page.text().partition("## Sources")[0]
    assert used <= set(SOURCES)
    assert [name for name in SOURCES if not re.search(rf"\b{name}\b", text)] == []


def test_shares_of_a_row_are_the_whole_step():
    _, _, section = page.text().partition("## Shares")
    lines = section.partition("\n## ")[0].splitlines()
    rows = [line.split("|")[4:-1] for line in lines if line.startswith(("| Ll", "| Qw", "| Mi"))]
    assert len(rows) == len(MODELS) * len(MESHES) * len(page.KINDS)
    for row in rows:
        assert abs(sum(map(int, row)) - 100) <= 6  # rounded


def test_bytes_and_arithmetic_by_op_are_in_the_text():
    """Gate of 31 layers in bfloat4_b and of one in bfloat8_b, in 12 stripes of 38 columns."""
    tiles = 128 * 12 * 38
    cell = f"{tiles * (31 * 576 + 1088) / 1e6:.0f}, {32 * 2 * 32**3 * tiles / 1e9:.1f}"
    [row] = [
        line for line in page.text().splitlines() if "| Llama-3.1-8B | N150 | decode |" in line
    ]
    assert row.split("|")[6].strip() == cell


# --- facts ---------------------------------------------------------------------------------------


@every_model
def test_models_are_those_of_the_simulated_mesh(model):
    ours, theirs = MODELS[model], SIMULATED[model]
    for name in ("hidden_size", "intermediate_size", "head_dim", "vocab_size"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.num_hidden_layers == theirs.num_layers
    assert ours.num_attention_heads == theirs.num_heads
    assert ours.num_key_value_heads == theirs.num_kv_heads
    assert ours.qk_norm == (theirs.implementation == "qwen3")


def test_peaks_are_those_that_tenstorrent_says():
    """GEMM_FLOPS.md: 4 TFLOP/s a core at 1 GHz in LoFi, 5.4 at 1.35 GHz; half in HiFi2."""
    assert CORES["wormhole"].flops_per_s(1, "LoFi") == pytest.approx(4.1e12, rel=0.01)
    assert CORES["wormhole"].flops_per_s(1, "HiFi2") == pytest.approx(2.05e12, rel=0.01)
    assert CORES["blackhole"].flops_per_s(1, "LoFi") == pytest.approx(5.5e12, rel=0.01)
    assert CORES["blackhole"].flops_per_s(1, "HiFi4") == pytest.approx(1.38e12, rel=0.01)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(("topology", "chips"), [("line", 2), ("line", 8), ("ring", 8)])
@given(sizes=st.tuples(st.floats(1, 1e10), st.floats(1, 1e10)))
def test_a_larger_tensor_never_takes_less(kind, topology, chips, sizes):
    small, large = sorted(sizes)
    # One measured pair falls, from 512 KiB to 1 MiB; it is not among the points.
    assert (
        0 < collective_s(kind, topology, chips, small) <= collective_s(kind, topology, chips, large)
    )


def test_collectives_go_through_what_was_measured():
    assert collective_s("reduce_scatter", "line", 2, 262144) == pytest.approx(26.01e-6)
    assert collective_s("reduce_scatter", "line", 2, 100) == pytest.approx(6.90e-6)
    half = collective_s("all_gather", "line", 8, (262144 + 1048576) / 2)
    assert half == pytest.approx((39.72e-6 + 101.28e-6) / 2)


def test_measured_rates_are_below_the_limit_of_the_chips():
    rows = [row for row in published() if row.kind == "measured"]
    assert len(rows) == 14
    for row in rows:
        limit = max(page.decode_limit_s(row.model, row.mesh, UPSTREAM_PRECISION))
        assert row.tokens_per_s_per_user < 1 / limit


# --- bytes and arithmetic, by hand ---------------------------------------------------------------


def test_an_8b_model_reads_eight_gigabytes_a_token_in_bfloat8_b():
    """7.50e9 weights of the layers and the output layer; 1,088 bytes for 1,024 of them."""
    layers = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    num_bytes = (layers + 4096 * 128256) * 1088 / 1024
    dram_s, math_s = page.decode_limit_s(
        "Llama-3.1-8B", "N150", native_precision(PROFILES["accuracy"])
    )
    weights = dict.fromkeys(ALL_PRODUCTS, ("bfloat8_b", "HiFi2"))
    eight = replace(UPSTREAM_PRECISION, weights=weights, last={})
    ops = page.decode("Llama-3.1-8B", "N150", (eight, ONCE))
    assert weight_bytes(ops) == num_bytes == pytest.approx(7.97e9, rel=0.001)
    # Beside them K and V of 32 rows and 160 tokens: 8 heads of 128, 32 layers.
    kv = 32 * 160 * 32 * 2 * 8 * 128 * 1088 / 1024
    assert limit_s(ops, mesh_spec("N150"))[0] == pytest.approx((num_bytes + kv) / 288e9)
    # In bfloat16 all of it is 2 bytes; 64 FLOPs a weight, on 64 cores in HiFi4, 1.024e12 each.
    assert dram_s == pytest.approx((num_bytes + kv) * 2048 / 1088 / 288e9)
    attention = 2 * 2 * 32 * 160 * 32 * 8 * 128 * 32
    flops = 64 * (layers + 4096 * 128256) + attention
    assert math_s == pytest.approx(flops / (64 * 1.024e12))


def test_upstreams_four_bit_halves_are_half_the_bytes():
    """6.1 GB: gate and up in bfloat4_b but for the last layer, the rest in bfloat8_b."""
    gates = 2 * 4096 * 14336
    rest = 32 * (4096 * 6144 + 4096 * 4096 + 4096 * 14336) + 4096 * 128256
    num_bytes = (31 * gates * 576 + (gates + rest) * 1088) / 1024
    ops = page.decode("Llama-3.1-8B", "N150", (UPSTREAM_PRECISION, ONCE))
    assert weight_bytes(ops) == num_bytes == pytest.approx(6.15e9, rel=0.01)


def test_a_stripe_is_as_wide_as_the_widest():
    """128 columns of tiles in 12 banks are 11 in the widest: 132 in the time of all."""
    ops = page.decode("Llama-3.1-8B", "N150", (UPSTREAM_PRECISION, UPSTREAM))
    [o] = [op for op in ops if op.part == "o"]
    assert o.num_bytes == 128 * 132 * 1088
    assert o.flops == 2 * 32 * 4096 * 132 * 32


@every_model
@every_place
@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_native_weights_are_those_of_the_budget(model, mesh, profile):
    config, tp = MODELS[model], mesh_spec(mesh).num_chips
    ops = page.decode(model, mesh, (native_precision(profile), ONCE))
    # Other stored weights: the embedding with its zero row, norms in rows of tiles.
    hidden, layers = config.hidden_size, config.num_hidden_layers
    vocab = -(-config.vocab_size // (32 * tp)) * 32
    beside = 2 * ((vocab + 1) * hidden + 32 * hidden)
    beside += layers * 2 * 32 * (2 * hidden + (2 * config.head_dim if config.qk_norm else 0))
    assert weight_bytes(ops) + beside == budget.weight_bytes_per_chip(config, profile, tp)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_chunk_of_a_tile_has_the_arithmetic_of_a_step(mesh):
    chunk = page.chunk("Llama-3.1-8B", mesh, (UPSTREAM_PRECISION, ONCE), 32)
    step = page.decode("Llama-3.1-8B", mesh, (UPSTREAM_PRECISION, ONCE))
    flops = [sum(o.count * o.flops for o in ops if o.program) for ops in (chunk, step)]
    assert flops[0] == flops[1]


def test_a_chunk_attends_to_half_of_what_it_has():
    """Scores and sums of values, 2 FLOPs for each of 4,096 channels and half of the pairs."""
    ops = page.chunk("Llama-3.1-8B", "N150", (UPSTREAM_PRECISION, ONCE), 1024)
    [attention] = [op for op in ops if op.part == "attention"]
    assert attention.flops == 2 * 2 * 4096 * 1024 * 1024 / 2
    assert attention.count == 32
    # Queries and the result in bfloat16, keys and values of 8 heads in bfloat8_b.
    assert attention.num_bytes == 2 * 1024 * 4096 * 2 + 2 * 1024 * 1024 * 1088 / 1024


# --- any estimate --------------------------------------------------------------------------------


@every_model
@every_place
@every_kind
def test_no_step_is_faster_than_the_chip(model, mesh, kind):
    kind = page.KINDS[kind](model, mesh)
    limit = max(page.decode_limit_s(model, mesh, kind[0]))
    assert total_s(page.decode_timed(model, mesh, kind)) > limit
    for num_tokens in page.CHUNKS:
        ops = page.chunk(model, mesh, kind, num_tokens)
        assert total_s(timed(ops, mesh_spec(mesh))) > max(limit_s(ops, mesh_spec(mesh))) * 0.999


@every_model
@every_kind
def test_more_chips_take_less_time_and_never_a_fair_share_of_it(model, kind):
    one, two, eight = (rate(model, mesh, kind) for mesh in ("N150", "N300", "T3K"))
    assert one < two < 2 * one
    assert two < eight < 4 * two


@given(
    layers=st.integers(1, 80),
    hidden=st.integers(1, 64).map(lambda n: 128 * n),
    inner=st.integers(1, 64).map(lambda n: 256 * n),
    context=st.integers(1, 100_000),
    more=st.integers(1, 100_000),
    mesh=st.sampled_from(MESHES),
    precision=st.sampled_from([UPSTREAM_PRECISION, *map(native_precision, PROFILES.values())]),
)
def test_bytes_and_time_grow_with_layers_and_context(
    layers, hidden, inner, context, more, mesh, precision
):
    spec = mesh_spec(mesh)
    model = replace(MODELS["Llama-3.1-8B"], hidden_size=hidden, intermediate_size=inner)

    def ops(num_layers, tokens):
        sized = replace(model, num_hidden_layers=num_layers)
        banks = spec.chip.dram_banks
        return decode_ops(
            sized, spec.num_chips, precision, UPSTREAM, num_banks=banks, context=tokens
        )

    least, deeper, longer = (
        ops(layers, context),
        ops(layers + 1, context),
        ops(layers, context + more),
    )
    assert all(limit_s(deeper, spec)[i] > limit_s(least, spec)[i] for i in (0, 1))
    assert total_s(timed(deeper, spec)) > total_s(timed(least, spec))
    assert total_s(timed(longer, spec)) >= total_s(timed(least, spec))
    assert all(op.num_bytes >= 0 and op.flops >= 0 and op.count > 0 for op in least)


@pytest.mark.parametrize("key", ASSUMPTIONS)
def test_every_assumption_counts_somewhere_and_in_its_sense(key):
    """Halving a share makes a step slower, halving a time makes it faster."""
    changes = []
    for model in ("Llama-3.1-8B", "Qwen3-8B"):
        for mesh in ("N150", "P150"):
            for make in page.KINDS.values():
                spec, kind = mesh_spec(mesh), make(model, mesh)
                for ops in (page.decode(model, mesh, kind), page.chunk(model, mesh, kind, 1024)):
                    halved = timed(ops, spec, {**STATED, key: STATED[key] / 2})
                    changes.append(total_s(halved) - total_s(timed(ops, spec)))
    if key not in SHARES:
        changes = [-change for change in changes]
    assert min(changes) >= 0
    assert max(changes) > 0


def test_a_ring_is_faster_than_a_line():
    ops = page.decode("Llama-3.1-8B", "T3K", (UPSTREAM_PRECISION, UPSTREAM))
    spec = mesh_spec("T3K")
    line, ring = (total_s(timed(ops, spec, topology=joined)) for joined in ("line", "ring"))
    assert ring < line
    assert total_s(timed(ops, spec)) == line


# --- published rates -----------------------------------------------------------------------------


def readme(model, mesh):
    [row] = [r for r in published() if (r.model, r.mesh, r.source) == (model, mesh, "readme")]
    return row.tokens_per_s_per_user


@pytest.mark.parametrize(("model", "mesh"), [("Llama-3.1-8B", "N150"), ("Mistral-7B", "N150")])
def test_upstreams_programs_are_estimated_near_what_is_published(model, mesh):
    """The estimated rate is 0.9 to 1.25 times the published one."""
    assert 0.9 < rate(model, mesh, "*upstream's*") / readme(model, mesh) < 1.25


@pytest.mark.parametrize(("model", "mesh"), [("Llama-3.1-8B", "N150"), ("Mistral-7B", "N150")])
def test_the_native_programs_are_estimated_at_nine_tenths_of_what_is_published_or_more(model, mesh):
    """This holds even if one assumption has its other published value."""
    assert rate(model, mesh, "performance") > 0.9 * readme(model, mesh)
    ops = page.decode(model, mesh, page.native("performance", model, mesh))
    for key, stated in ASSUMPTIONS.items():
        if stated.other is not None:
            found = timed(ops, mesh_spec(mesh), {**STATED, key: stated.other})
            assert 1 / total_s(found) > 0.9 * readme(model, mesh), key


def test_two_cores_beside_each_bank_are_worth_on_a_p150_what_was_measured():
    """From 32.75 to 42.08 tokens/s/user (two-readers)."""
    model, mesh = "Llama-3.1-8B", "P150"
    one, two = (
        1 / total_s(page.decode_timed(model, mesh, (UPSTREAM_PRECISION, design)))
        for design in (UPSTREAM, page.upstream(model, mesh)[1])
    )
    assert 0.9 < one / 32.75 < 1.25
    assert 0.9 < two / 42.08 < 1.25


def test_the_cores_at_the_banks_are_what_holds_a_p150_back():
    found = page.decode_timed("Llama-3.1-8B", "P150", (UPSTREAM_PRECISION, UPSTREAM))
    assert {t.bound for t in found if t.op.part in ("qkv", "o", "down")} == {"arithmetic"}
    on_n150 = page.decode_timed("Llama-3.1-8B", "N150", (UPSTREAM_PRECISION, UPSTREAM))
    assert {t.bound for t in on_n150 if t.op.program is not None} == {"DRAM"}
