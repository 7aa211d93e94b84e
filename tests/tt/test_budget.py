"""What the budget reckons with is what ttnn allocates: measured on its mock device.

ttnn notes every buffer of a call in a graph; those that are in a chip's DRAM at once are added up
here. Whoever changes a chunk's programs finds out what it takes, and writes that into `budget`.
"""

from __future__ import annotations

import pytest
import ttnn

from replicas.generators.ttnn.budget import activation_bytes_per_chip
from tests.tt.test_model import LaneUnderTest, make_config

NUM_TOKENS = 2048


def peak_dram_bytes(call):
    """Most bytes that a call has in one chip's DRAM at once, beside what was there before."""
    ttnn.graph.begin_graph_capture(ttnn.graph.RunMode.NORMAL)
    try:
        call()
    finally:
        graph = ttnn.graph.end_graph_capture()
    now, peak = {}, {}
    for node in graph:
        sign = {"buffer_allocate": 1, "buffer_deallocate": -1}.get(node["node_type"], 0)
        if not sign or node["params"]["type"] != "DRAM":
            continue
        chip = node["params"]["device_id"]
        now[chip] = now.get(chip, 0) + sign * int(node["params"]["size"])
        peak[chip] = max(peak.get(chip, 0), now[chip])
    assert peak, "nothing was noted"
    return max(peak.values())


def prefill_peak(mesh, config, monkeypatch):
    """Of a first chunk of 2,048 tokens, without its inputs."""
    lane = LaneUnderTest(mesh, config, max_seq_len=NUM_TOKENS)
    prefill, found = lane.model.prefill, []

    def noted(*arguments):
        logits = []
        found.append(peak_dram_bytes(lambda: logits.append(prefill(*arguments))))
        return logits[0]

    monkeypatch.setattr(lane.model, "prefill", noted)
    lane.prefill(0, NUM_TOKENS)
    [peak] = found
    return peak


WIDE_MLP, WIDE_RESIDUAL, MANY_HEADS = (256, 2048, 8), (1024, 256, 8), (256, 256, 32)
"""Hidden size, inner size and heads: another part of a layer has the most in each."""


def on_board(board, family, sizes):
    return pytest.param(board, family, *sizes, marks=pytest.mark.board(board))


@pytest.mark.parametrize(
    ("board", "family", "hidden", "inner", "heads"),
    [
        *(
            on_board(board, "llama", sizes)
            for board in ("N150", "N300", "T3K")
            for sizes in (WIDE_MLP, WIDE_RESIDUAL, MANY_HEADS)
        ),
        on_board("N150", "qwen3", MANY_HEADS),
        on_board("P150", "llama", WIDE_MLP),
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
    assert prefill_peak(mesh, config, monkeypatch) == reckoned
