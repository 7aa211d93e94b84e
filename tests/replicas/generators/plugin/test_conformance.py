"""Doubles of each generation of the interface, served by a real engine.

The doubles check each call against upstream's documents, and compute tokens from what they got.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from replicas.config import MeshConfig
from tests.engines import engine_core, generate, num_preemptions, num_prefix_hits
from tests.replicas.generators.plugin.conformance import (
    engine_config,
    expect,
    make_prompt,
    open_doubles,
)

if TYPE_CHECKING:
    from pathlib import Path

DOUBLES = "tests.replicas.generators.plugin.doubles"


@pytest.mark.usefixtures("ttnn")
@pytest.mark.parametrize("name", ["Contract1", "Legacy", "Seed"])
def test_through_an_engine(name: str, folder: Path) -> None:
    """Continuous batching with prefix hits, chunks and preemption gives every prompt its tokens."""
    chunks = {"max_num_batched_tokens": 64} if name != "Seed" else {}
    config = engine_config(folder, f"{DOUBLES}:Adapted{name}", None, dtype="bfloat16", **chunks)
    shared = make_prompt(0, 40)
    prompts = [shared, make_prompt(50, 30), [*shared, 7, 8], make_prompt(90, 70), make_prompt(3, 9)]
    with engine_core(config) as core:
        assert generate(core, prompts, stagger=3) == [expect(prompt, 12) for prompt in prompts]
        many = [make_prompt(i * 11, 55 + i) for i in range(5)] + [make_prompt(30, 60)]
        assert generate(core, many) == [expect(prompt, 12) for prompt in many]
        assert num_preemptions(core) > 0
        assert (num_prefix_hits(core) > 0) == (name != "Seed")


@pytest.mark.usefixtures("ttnn")
@pytest.mark.parametrize("draws", ["decode_only", "all"])
@pytest.mark.parametrize("name", ["Contract1", "Legacy"])
def test_through_an_engine_that_draws_on_the_device(
    name: str, draws: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a mesh, found by name as the plugin's classes are: steady steps reload nothing."""
    opened = open_doubles(monkeypatch, 2)
    mesh = MeshConfig(name="N300", sample_on_device=draws)
    config = engine_config(folder, f"{DOUBLES}:{name}", mesh, max_num_batched_tokens=64)
    prompts = [make_prompt(i * 11, 55 + i) for i in range(5)]
    with engine_core(config) as core:
        assert generate(core, prompts, stagger=3) == [expect(prompt, 12) for prompt in prompts]
        assert num_preemptions(core) > 0
        model = core._executor._worker._generator._model
        assert model.num_steady > 0
    assert [mesh.is_closed for _, mesh in opened] == [True]
