"""Doubles of each generation of the interface, served by a real engine.

The doubles check each call against upstream's documents, and compute tokens from what they got.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from replicas.config import MeshConfig
from replicas.errors import ConfigError
from replicas.messages import AddRequest, EngineRequest
from replicas.sampling_params import SamplingParams
from tests.engines import engine_core, generate, num_preemptions, num_prefix_hits
from tests.replicas.generators.plugin.conformance import (
    MAX_SEQ_LEN,
    engine_config,
    expect,
    make_prompt,
    open_doubles,
)

if TYPE_CHECKING:
    from pathlib import Path

    from replicas.engine.core import EngineCore

DOUBLES = "tests.replicas.generators.plugin.doubles"


@pytest.mark.usefixtures("ttnn")
@pytest.mark.parametrize("name", ["Contract1", "Legacy", "Seed", "SeedV1"])
def test_through_an_engine(name: str, folder: Path) -> None:
    """Continuous batching with prefix hits, chunks and preemption gives every prompt its tokens."""
    is_original = name.startswith("Seed")
    chunks = {} if is_original else {"max_num_batched_tokens": 64}
    config = engine_config(folder, f"{DOUBLES}:Adapted{name}", None, dtype="bfloat16", **chunks)
    shared = make_prompt(0, 40)
    prompts = [shared, make_prompt(50, 30), [*shared, 7, 8], make_prompt(90, 70), make_prompt(3, 9)]
    with engine_core(config) as core:
        assert generate(core, prompts, stagger=3) == [expect(prompt, 12) for prompt in prompts]
        many = [make_prompt(i * 11, 55 + i) for i in range(5)] + [make_prompt(30, 60)]
        assert generate(core, many) == [expect(prompt, 12) for prompt in many]
        assert num_preemptions(core) > 0
        assert (num_prefix_hits(core) > 0) == (not is_original)
        assert not is_original or model_of(core).most_prompts > 1


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
        assert model_of(core).num_steady > 0
    assert [mesh.is_closed for _, mesh in opened] == [True]


@pytest.mark.usefixtures("ttnn")
@pytest.mark.parametrize("name", ["Contract1", "Penalises"])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_rows_of_the_host_beside_others_that_run_ahead(
    name: str, steps_in_flight: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a class does not take by name, or need not draw for, the host draws."""
    open_doubles(monkeypatch, 2)
    mesh = MeshConfig(name="N300", sample_on_device="decode_only")
    config = engine_config(
        folder, f"{DOUBLES}:{name}", mesh, max_num_batched_tokens=64, num_blocks=20,
        steps_in_flight=steps_in_flight,
    )  # fmt: skip
    plain = {"temperature": 0.0, "max_tokens": 12, "seed": 0}
    penalised = {"presence_penalty": 0.5, "repetition_penalty": 1.25}
    sampling = [
        SamplingParams(**plain, **fields)
        for fields in ({"logit_bias": {5: 1.0}}, penalised, {"logprobs": 0}, {}, {})
    ]
    prompts = [make_prompt(i * 11, 15 + i) for i in range(5)]
    with engine_core(config) as core:
        found = generate(core, prompts, sampling, stagger=2)
        assert found == [expect(prompt, 12) for prompt in prompts]
        assert model_of(core).num_steady > 0


@pytest.mark.usefixtures("ttnn")
@pytest.mark.parametrize("draws", ["none", "decode_only"])
def test_a_decode_is_as_wide_as_the_least_captured_width_of_its_rows(
    draws: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_doubles(monkeypatch, 2)
    mesh = MeshConfig(name="N300", sample_on_device=draws)
    config = engine_config(folder, f"{DOUBLES}:Widths", mesh, num_blocks=20)
    prompts = [make_prompt(i * 11, 15 + i) for i in range(6)]
    with engine_core(config) as core:
        widths = model_of(core).widths
        for num_streams, width in ((1, 1), (2, 2), (3, 4), (1, 1)):
            widths.clear()
            some = prompts[:num_streams]
            assert generate(core, some) == [expect(prompt, 12) for prompt in some]
            assert max(widths) == width
        assert set(widths) == {1}
        # Rows come and go at different times.
        assert generate(core, prompts, stagger=3) == [expect(prompt, 12) for prompt in prompts]


@pytest.mark.usefixtures("ttnn")
def test_slots_without_a_captured_width_are_refused_with_both_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_doubles(monkeypatch, 2)
    for changes in ({"max_batch_size": 3}, {"max_batch_size": 12}):
        config = engine_config(folder, f"{DOUBLES}:Widths", MeshConfig(name="N300"), **changes)
        said = f"decodes 1, 2, 4, 8 rows at once, but a lane has {changes['max_batch_size']} slots"
        with pytest.raises(ConfigError, match=said), engine_core(config):
            pass
    assert all(mesh.is_closed for _, mesh in opened)


@pytest.mark.usefixtures("ttnn")
@pytest.mark.parametrize("draws", [None, "decode_only", "all"])
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("name", ["Seed", "SeedV1"])
def test_the_first_interface_on_a_mesh(
    name: str, lanes: int, draws: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its class prefills the prompts of all lanes at once; it draws only if that is asked for."""
    open_doubles(monkeypatch, 2)
    config = engine_config(
        folder, f"{DOUBLES}:{name}", MeshConfig(name="N300", sample_on_device=draws),
        tt_data_parallel=lanes, max_num_batched_tokens=256, num_blocks=20,
    )  # fmt: skip
    prompts = [make_prompt(i * 11, 55 + i) for i in range(4)]
    with engine_core(config) as core:
        assert generate(core, prompts) == [expect(prompt, 12) for prompt in prompts]
        model = model_of(core)
        assert model.num_lanes == lanes
        assert model.most_prompts == 4
        assert model.can_sample_on_device == (draws is not None)
        assert model.num_drawn == {None: 0, "decode_only": 11, "all": 12}[draws]


@pytest.mark.usefixtures("ttnn")
@pytest.mark.parametrize("name", ["Legacy", "Seed"])
def test_a_decode_is_submitted_without_waiting_for_its_output(name: str, folder: Path) -> None:
    """The class copies its output while the engine does other things, and waits at the end."""
    with engine_core(engine_config(folder, f"{DOUBLES}:Adapted{name}", None)) as core:
        request = EngineRequest("r", make_prompt(0, 9), SamplingParams(max_tokens=2, temperature=0))
        core.handle(b"client", AddRequest(request), 0.0)
        core.step(0.0)
        step = core.begin_step(0.0)
        [output] = model_of(core).pending
        assert output.event is not None
        assert not output.event.is_done
        core.collect_step(step)
        assert not model_of(core).pending


@pytest.mark.usefixtures("ttnn")
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("draws", [None, "decode_only"])
def test_several_tokens_a_step(
    draws: str | None, lanes: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of one to four tokens end at stop tokens, and where the next would not fit."""
    open_doubles(monkeypatch, 2)
    mesh = MeshConfig(name="N300", sample_on_device=draws)
    config = engine_config(folder, f"{DOUBLES}:Blocks", mesh, tt_data_parallel=lanes)
    prompts = [make_prompt(i * 11, 55 + i) for i in range(5)]
    with engine_core(config) as core:
        longer = SamplingParams(max_tokens=30, temperature=0)
        assert generate(core, prompts, longer) == [expect(prompt, 30) for prompt in prompts]
        assert (num_preemptions(core) > 0) == (lanes == 1)
        assert model_of(core).lengths == {1, 2, 3, 4}
        assert not core.runs_ahead
        whole = expect(prompts[0], 12)
        for token_id in whole[1:]:
            stop = SamplingParams(
                max_tokens=12, temperature=0, stop_token_ids=frozenset({token_id})
            )
            length = whole.index(token_id) + 1
            assert generate(core, prompts[:1], stop) == [whole[:length]]
        endless = SamplingParams(max_tokens=99, temperature=0)
        [tokens] = generate(core, [make_prompt(3, 100)], endless)
        assert tokens == expect(make_prompt(3, 100), len(tokens))
        assert MAX_SEQ_LEN - 4 < 100 + len(tokens) <= MAX_SEQ_LEN


@pytest.mark.usefixtures("ttnn")
def test_several_tokens_from_prefill_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that serves one request gives a whole run with every call."""
    open_doubles(monkeypatch, 1)
    mesh = MeshConfig(name="N150", sample_on_device="all")
    config = engine_config(folder, f"{DOUBLES}:Canvases", mesh, max_batch_size=1)
    prompts = [make_prompt(0, 40), make_prompt(50, 30), make_prompt(3, 9)]
    with engine_core(config) as core:
        assert generate(core, prompts) == [expect(prompt, 12) for prompt in prompts]
        sampling = SamplingParams(max_tokens=5, temperature=0)
        assert generate(core, prompts, sampling) == [expect(prompt, 5) for prompt in prompts]


@pytest.mark.usefixtures("ttnn")
@pytest.mark.parametrize(
    ("length", "changes", "problem"),
    [
        (9, {"repetition_penalty": 1.5}, "repetition_penalty needs the logits of every token"),
        (9, {"logprobs": 1}, "logprobs"),
        (MAX_SEQ_LEN - 3, {}, "there is no room for output"),
    ],
)
def test_what_needs_logits_is_refused_by_name(
    length: int,
    changes: dict[str, Any],
    problem: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    open_doubles(monkeypatch, 1)
    config = engine_config(folder, f"{DOUBLES}:Blocks", MeshConfig(name="N150"))
    with engine_core(config) as core:
        sampling = SamplingParams(max_tokens=2, temperature=0, seed=0, **changes)
        request = EngineRequest("r", make_prompt(0, length), sampling)
        core.handle(b"client", AddRequest(request), 0.0)
        [event] = core.take_events()[b"client"]
        assert problem in str(event)


def model_of(core: EngineCore) -> Any:
    """Return the double behind an engine."""
    return core._executor._worker._generator._model
