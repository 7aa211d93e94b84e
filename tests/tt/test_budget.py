"""The budget's sizes are those that ttnn allocates, measured on its mock device.

ttnn records every buffer of a call in a graph; buffers in a chip's DRAM at the same time are added
up here. After a change of a chunk's programs, copy the new sizes into `budget`.
"""

from __future__ import annotations

import pytest
import ttnn

from replicas.generators.ttnn.budget import activation_bytes_per_chip, weight_bytes_per_chip
from replicas.generators.ttnn.profiles import PROFILES
from replicas.generators.ttnn.weights import load_lane_weights
from tests.replicas.generators.test_ttnn_budget import OFFERED
from tests.tt.test_model import LaneUnderTest, make_config, on_board

NUM_TOKENS = 2048


def dram_bytes(call, num_banks):
    """Return the bytes that a call adds in one chip's DRAM: the peak, and after the call.

    Every chip has the same. A tensor in stripes has as much in every bank as in the fullest.
    """
    ttnn.graph.begin_graph_capture(ttnn.graph.RunMode.NORMAL)
    try:
        kept = call()
    finally:
        graph = ttnn.graph.end_graph_capture()
    now, peak = {}, {}
    for node in graph:
        sign = {"buffer_allocate": 1, "buffer_deallocate": -1}.get(node["node_type"], 0)
        if not sign or node["params"]["type"] != "DRAM":
            continue
        params = node["params"]
        chip, size = params["device_id"], int(params["size"])
        if params["layout"] != "INTERLEAVED":
            size = num_banks * int(params["max_size_per_bank"])
        now[chip] = now.get(chip, 0) + sign * size
        peak[chip] = max(peak.get(chip, 0), now[chip])
    del kept
    [most], [after] = set(peak.values()), set(now.values())
    return most, after


def prefill_peak(mesh, config, monkeypatch):
    """Return the peak of a first chunk of 2,048 tokens, without its inputs."""
    lane = LaneUnderTest(mesh, config, max_seq_len=NUM_TOKENS)
    prefill, found, num_banks = lane.model.prefill, [], mesh.spec.chip.dram_banks

    def noted(*arguments):
        logits = []
        found.append(dram_bytes(lambda: logits.append(prefill(*arguments)), num_banks)[0])
        return logits[0]

    monkeypatch.setattr(lane.model, "prefill", noted)
    lane.prefill(0, NUM_TOKENS)
    [peak] = found
    return peak


WIDE_MLP, WIDE_RESIDUAL, MANY_HEADS = (256, 2048, 8), (1024, 256, 8), (256, 256, 32)
"""Hidden size, inner size and heads: another part of a layer has the most in each."""


@pytest.mark.parametrize(
    ("board", "family", "hidden", "inner", "heads"),
    [
        *(
            on_board(board, "llama", *sizes)
            for board in ("N150", "N300", "T3K")
            for sizes in (WIDE_MLP, WIDE_RESIDUAL, MANY_HEADS)
        ),
        on_board("N150", "qwen3", *MANY_HEADS),
        on_board("P150", "llama", *WIDE_MLP),
    ],
)
def test_activations_are_those_that_ttnn_allocates(
    open_mock_mesh, monkeypatch, board, family, hidden, inner, heads
):
    mesh = open_mock_mesh(load_format="random", trace="none")
    config = make_config(
        family, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads,
        num_hidden_layers=1,
    )  # fmt: skip
    reckoned = activation_bytes_per_chip(config, mesh.spec.num_chips, NUM_TOKENS)
    peak = prefill_peak(mesh, config, monkeypatch)
    assert peak == reckoned


@pytest.mark.parametrize("optimizations", list(PROFILES))
@pytest.mark.parametrize(
    ("board", "family"),
    [on_board("N150", "qwen3"), on_board("N300", "llama-biases"), on_board("P150", "llama")],
)
def test_weights_are_those_that_ttnn_allocates(open_mock_mesh, board, family, optimizations):
    mesh = open_mock_mesh(load_format="random", trace="none")
    config, chosen = make_config(family, "large"), PROFILES[optimizations]
    lanes, banks = mesh.lanes(1), mesh.spec.chip.dram_banks
    _, after = dram_bytes(lambda: load_lane_weights(config, mesh, lanes, chosen), banks)
    assert after == weight_bytes_per_chip(config, chosen, mesh.spec.num_chips, banks)


@pytest.mark.board("N150")
def test_a_wormhole_chip_offers_what_the_budgets_tests_take_for_granted(open_mock_mesh):
    mesh = open_mock_mesh(trace="none", trace_region_size=50_000_000)
    (device,) = mesh.lanes(1)
    view = ttnn.get_memory_view(device, ttnn.BufferType.DRAM)
    offered = view.num_banks * view.total_bytes_per_bank + 50_000_000
    assert abs(offered - OFFERED) < 1_000_000
