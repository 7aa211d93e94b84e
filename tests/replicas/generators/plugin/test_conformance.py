"""The adapter's calls, recorded: each generation of the interface, by hand and by a real engine.

``recordings/*.txt`` hold a double's calls, a line per call. To write them again:
``TTSERVE_WRITE_RECORDINGS=1 pytest tests/replicas/generators/plugin``; then read the difference.
The doubles check each call against upstream's documents.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from replicas.config import MeshConfig
from tests.engines import engine_core, generate, num_preemptions, num_prefix_hits
from tests.replicas.generators.plugin.conformance import (
    engine_config,
    expect,
    make_prompt,
    open_doubles,
    run_by_hand,
)
from tests.replicas.generators.plugin.doubles import (
    GENERATIONS,
    Contract1,
    Legacy,
)

if TYPE_CHECKING:
    from tests.replicas.generators.plugin.doubles import Recording

DOUBLES = "tests.replicas.generators.plugin.doubles"
RECORDINGS = Path(__file__).parent / "recordings"


def compare(name: str, recording: Recording) -> None:
    """Compare a recording with the one of that name."""
    path = RECORDINGS / f"{name}.txt"
    text = "\n".join(recording.lines) + "\n"
    if os.environ.get("TTSERVE_WRITE_RECORDINGS"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; see the module's docstring"


@pytest.mark.usefixtures("ttnn")
@pytest.mark.parametrize("draws_on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("name", ["contract1", "legacy", "seed"])
def test_by_hand(name: str, draws_on_device: bool, folder: Path, recording: Recording) -> None:
    """The life of four requests, step by step."""
    if name == "seed" and draws_on_device:
        assert not GENERATIONS[name].model_capabilities.get("supports_sample_on_device")
        return
    sequences = run_by_hand(GENERATIONS[name], folder, draws_on_device=draws_on_device)
    assert all(sequence.is_right for sequence in sequences)
    compare(f"{name}-{'device' if draws_on_device else 'host'}", recording)


@pytest.mark.usefixtures("ttnn")
@pytest.mark.parametrize("name", ["contract1", "legacy", "seed"])
def test_through_an_engine(name: str, folder: Path, recording: Recording) -> None:
    """Continuous batching with prefix hits, chunks and preemption gives every prompt its tokens."""
    adapted = GENERATIONS[name]
    chunks = {"max_num_batched_tokens": 64} if name != "seed" else {}
    generator = f"{DOUBLES}:Adapted{adapted.__name__}"
    config = engine_config(folder, generator, None, dtype="bfloat16", **chunks)
    shared = make_prompt(0, 40)
    prompts = [shared, make_prompt(50, 30), [*shared, 7, 8], make_prompt(90, 70), make_prompt(3, 9)]
    with engine_core(config) as core:
        assert generate(core, prompts, stagger=3) == [expect(prompt, 12) for prompt in prompts]
        many = [make_prompt(i * 11, 55 + i) for i in range(5)] + [make_prompt(30, 60)]
        assert generate(core, many) == [expect(prompt, 12) for prompt in many]
        assert num_preemptions(core) > 0
        assert (num_prefix_hits(core) > 0) == (name != "seed")
    compare(f"{name}-engine", recording)


@pytest.mark.usefixtures("ttnn")
@pytest.mark.parametrize("draws", ["decode_only", "all"])
@pytest.mark.parametrize("plugin_class", [Contract1, Legacy])
def test_through_an_engine_that_draws_on_the_device(
    plugin_class: type[Contract1 | Legacy],
    draws: str,
    folder: Path,
    recording: Recording,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a mesh, found by name as the plugin's classes are: steady steps reload nothing."""
    opened = open_doubles(monkeypatch, 2)
    mesh = MeshConfig(name="N300", sample_on_device=draws)
    generator = f"{DOUBLES}:{plugin_class.__name__}"
    config = engine_config(folder, generator, mesh, max_num_batched_tokens=64)
    prompts = [make_prompt(i * 11, 55 + i) for i in range(5)]
    with engine_core(config) as core:
        assert generate(core, prompts, stagger=3) == [expect(prompt, 12) for prompt in prompts]
        assert num_preemptions(core) > 0
    assert [mesh.is_closed for _, mesh in opened] == [True]
    compare(f"{plugin_class.__name__.lower()}-engine-{draws}", recording)


@pytest.mark.usefixtures("ttnn", "recording")
@pytest.mark.parametrize("draws", ["none", "all"])
def test_lanes(draws: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lanes of two slots: a block id means another block in each."""
    open_doubles(monkeypatch, 2)
    mesh = MeshConfig(name="N300", sample_on_device=draws)
    config = engine_config(
        folder,
        f"{DOUBLES}:Contract1",
        mesh,
        tt_data_parallel=2,
        num_blocks=7,
        max_num_batched_tokens=64,
    )
    prompts = [make_prompt(i * 11, 20 + 7 * i) for i in range(9)]
    with engine_core(config) as core:
        assert generate(core, prompts, stagger=2) == [expect(prompt, 12) for prompt in prompts]
