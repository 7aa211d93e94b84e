"""Families of classes, found by their route: those of tt-transformers, and those of a Galaxy.

Their doubles stand in packages of the real names, and engines find them as they find the real ones.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest
import torch
from transformers import AutoConfig

from replicas.config import EngineConfig, MeshConfig
from replicas.errors import ConfigError, UnknownGeneratorError
from replicas.generators.model_config import load_hf_config
from replicas.generators.plugin import checkpoints, limits
from replicas.generators.plugin.adapter import adapt
from replicas.generators.plugin.checkpoints import checkpoint_for
from replicas.generators.plugin.find import find_plugin_class
from replicas.generators.plugin.routes import (
    ROUTES,
    check_route,
    class_of_route,
    route_environment,
    route_mesh,
)
from replicas.generators.plugin.sources import PluginPaths
from replicas.generators.ttnn.budget import lane_memory
from tests.engines import engine_core, generate, num_preemptions, num_prefix_hits
from tests.replicas.generators.plugin.conformance import (
    BLOCK_SIZE,
    MAX_SEQ_LEN,
    NUM_SLOTS,
    engine_config,
    expect,
    make_prompt,
    open_doubles,
)
from tests.replicas.generators.plugin.doubles import Chosen, Mesh, Registered

if TYPE_CHECKING:
    from collections.abc import Iterator

HF_ID = "some-org/Tiny-8B-Instruct"
LINKED = "models--some-org--Tiny-8B-Instruct"


@pytest.fixture(autouse=True)
def _own_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Forget what a test imports and where it was found; links go to the test's own folder."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(checkpoints, "user_cache", lambda: tmp_path)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in {"models", "tt_transformers"}:
            del sys.modules[name]


@pytest.fixture
def checkpoint(folder: Path) -> Path:
    """The model, in a folder with the name that Hugging Face has for it."""
    return folder.rename(folder.with_name("Tiny-8B-Instruct"))


@pytest.fixture
def tt_transformers(tmp_path: Path) -> None:
    """A package of that name on Python's path, whose registry has the double."""
    package = tmp_path / "site" / "tt_transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "vllm_registry.py").write_text(
        "from tests.replicas.generators.plugin.doubles import Registered as LlamaForCausalLM\n"
    )
    sys.path.append(str(tmp_path / "site"))


@pytest.fixture
def tt_metal(tmp_path: Path) -> str:
    """Root of a checkout in which a Galaxy's model is the double."""
    module = tmp_path / "tt-metal/models/demos/llama3_70b_galaxy/tt/generator_vllm.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "from tests.replicas.generators.plugin.doubles import Galaxy as LlamaForCausalLM\n"
    )
    return str(tmp_path / "tt-metal")


# --- tt-transformers ------------------------------------------------------------------------------


@pytest.mark.usefixtures("ttnn", "tt_transformers")
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("draws", ["none", "decode_only", "all"])
def test_chosen_model_through_an_engine(
    draws: str, lanes: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One lane's cache is ``[layer][k, v]``, that of two ``[lane][layer]``: each comes back."""
    opened = open_doubles(monkeypatch, 2)
    mesh = MeshConfig(name="N300", sample_on_device=draws)
    prompts = [make_prompt(i * 11, 55 + i) for i in range(5)]
    engine = engine_config(checkpoint, "tt-transformers", mesh, tt_data_parallel=lanes)
    with engine_core(engine) as core:
        assert generate(core, prompts, stagger=3) == [expect(prompt, 12) for prompt in prompts]
        assert lanes == 2 or num_preemptions(core) > 0
        again = [*prompts[-1], 7, 8]
        assert generate(core, [again]) == [expect(again, 12)]
        assert num_prefix_hits(core) > 0
        model = core._executor._worker._generator._model
        assert isinstance(model, Chosen)
    assert model.is_cleaned_up
    assert [mesh.is_closed for _, mesh in opened] == [True]


def test_chosen_model_gets_a_cache_that_kv_transfer_reads(checkpoint: Path) -> None:
    """``[lane][layer]`` for us, whatever it is for the class."""
    generator = adapt(Registered).initialize_vllm_model(
        load_hf_config(checkpoint), Mesh(2), NUM_SLOTS, max_seq_len=MAX_SEQ_LEN
    )
    cache: Any = generator.allocate_kv_cache((9, 2, BLOCK_SIZE, 16), torch.bfloat16, 3)
    assert [len(lane) for lane in cache] == [3]
    assert len(cache[0][0]) == 2
    assert generator.kv_dtype == "bfloat8_b"
    assert generator.model_capabilities["max_device_top_k"] == 32
    assert generator.signature.contract == 1
    generator.close()
    generator.close()


class Kept(Chosen):
    cleaned_up: ClassVar[list[Any]] = []

    def cleanup(self) -> None:
        self.cleaned_up.append(self)


class Unusable(Kept):
    decode_forward = None


@pytest.mark.parametrize(
    ("model", "text_config", "kind", "message"),
    [
        (Unusable, None, ConfigError, "test_families:Unusable lacks decode_forward"),
        (Kept, object(), AttributeError, "vocab_size"),
    ],
    ids=["class", "configuration"],
)
def test_chosen_model_that_will_not_do_is_cleaned_up(
    model: type, text_config: object, kind: type[Exception], message: str,
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(Registered.models, HF_ID, model)
    monkeypatch.setattr(Kept, "cleaned_up", [])
    config = AutoConfig.from_pretrained(checkpoint_for(Registered, str(checkpoint)))
    if text_config is not None:
        config.text_config = text_config
    with pytest.raises(kind, match=message):
        adapt(Registered).initialize_vllm_model(config, Mesh(2), NUM_SLOTS, max_seq_len=MAX_SEQ_LEN)
    assert len(Kept.cleaned_up) == 1


def test_model_whose_package_lacks_another(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_args: object, **_settings: object) -> None:
        raise ModuleNotFoundError("No module named 'loguru'")

    monkeypatch.setattr(Chosen, "initialize_vllm_model", load)
    monkeypatch.setattr(Registered, "get_max_tokens_all_users", load)
    adapted: Any = adapt(Registered)
    with pytest.raises(
        ConfigError, match=r"cannot load its model with .*: No module named 'loguru'; inst"
    ):
        adapted.initialize_vllm_model(
            load_hf_config(checkpoint), Mesh(2), NUM_SLOTS, max_seq_len=MAX_SEQ_LEN
        )
    sizes = {"num_devices": 2, "tt_data_parallel": 1, "max_model_len": 128, "max_num_seqs": 4}
    with pytest.raises(ConfigError, match=r"has no KV budget .* No module named 'loguru'"):
        adapted.get_max_tokens_all_users(model_name=str(checkpoint), **sizes)


@pytest.mark.usefixtures("tt_transformers")
def test_renamed_folder_is_refused_before_a_mesh_is_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_doubles(monkeypatch, 2)
    engine = engine_config(folder, "tt-transformers", MeshConfig(name="N300"))
    refusal = rf"serves {HF_ID}; .*/model is none of these\. .* rename the folder"
    with pytest.raises(ConfigError, match=refusal), engine_core(engine):
        pass
    assert opened == []


@pytest.mark.parametrize("name", ["Tiny-8B-Instruct", "some-org--Tiny-8B-Instruct", LINKED])
def test_folder_with_the_name_of_a_checkpoint_is_linked(name: str, folder: Path) -> None:
    """The link's path contains the checkpoint's name, and is the same every time."""
    named = folder.rename(folder.with_name(name))
    link = checkpoint_for(Registered, str(named))
    assert link.rsplit("/", 3)[1:3] == [LINKED, "snapshots"]
    assert load_hf_config(link).num_hidden_layers == 3
    assert checkpoint_for(Registered, str(named)) == link
    elsewhere = named.parent / "elsewhere" / name
    elsewhere.mkdir(parents=True)
    assert checkpoint_for(Registered, str(elsewhere)) != link


def test_path_that_the_class_knows_is_left_alone(tmp_path: Path) -> None:
    snapshot = str(tmp_path / LINKED / "snapshots" / "0123abcd")
    assert checkpoint_for(Registered, snapshot) == snapshot
    assert checkpoint_for(Chosen, "/any/folder") == "/any/folder"
    assert not (tmp_path / "checkpoints").exists()


def test_budget_is_asked_for_by_the_name_that_the_class_knows(checkpoint: Path) -> None:
    sizes = {"num_devices": 2, "tt_data_parallel": 1, "max_model_len": 128, "max_num_seqs": 4}
    adapted: Any = adapt(Registered)
    assert adapted.get_max_tokens_all_users(model_name=str(checkpoint), **sizes) == 512
    with pytest.raises(ConfigError, match="is none of these"):
        adapted.get_max_tokens_all_users(model_name=str(checkpoint.parent), **sizes)


def test_links_that_cannot_be_made(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot create the link .* use the snapshot"):
        checkpoint_for(Registered, str(checkpoint))


def test_without_the_package() -> None:
    with pytest.raises(UnknownGeneratorError, match="part of tt-transformers, which is missing"):
        find_plugin_class("tt-transformers", PluginPaths(), "LlamaForCausalLM")


# --- Galaxy ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ttnn")
@pytest.mark.parametrize("draws", ["none", "all"])
def test_galaxy_through_an_engine(
    draws: str,
    folder: Path,
    tt_metal: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four columns as lanes, one cache for all; the mesh is opened as the class needs it."""
    opened = open_doubles(monkeypatch, 32)
    judged = []

    def judge(model: Any, spec: Any, mesh: MeshConfig, *args: Any, **sizes: Any) -> Any:
        judged.append(mesh.trace_region_size)
        return lane_memory(model, spec, mesh, *args, **sizes)

    monkeypatch.setattr(limits, "lane_memory", judge)
    mesh = MeshConfig(name="TG", sample_on_device=draws, tt_metal_home=tt_metal)
    engine = engine_config(folder, "llama3_70b_galaxy", mesh, tt_data_parallel=4)
    engine = msgspec.structs.replace(engine, max_batch_size=8, num_blocks=7)
    prompts = [make_prompt(i * 11, 40 + 5 * i) for i in range(10)]
    with engine_core(engine) as core:
        assert generate(core, prompts, stagger=2) == [expect(prompt, 12) for prompt in prompts]
    [(settings, opened_mesh)] = opened
    assert opened_mesh.is_closed
    assert settings.worker_l1_size == 1_344_544
    assert settings.dispatch_core_axis == "col"
    assert settings.trace_region_size == 216_580_672
    assert judged == [settings.trace_region_size], "room is judged beside what is set aside"


@pytest.mark.parametrize(
    ("changes", "architecture", "reason"),
    [
        ({"mesh": MeshConfig(name="T3K")}, "Llama", "of a Galaxy, but mesh T3K has"),
        (
            {"mesh": MeshConfig(name="BHGalaxy")},
            "Llama",
            "BHGalaxy has 8 rows of 4 blackhole chips",
        ),
        (
            {"mesh": MeshConfig(name="(8,4)", arch="blackhole")},
            "Llama",
            r"\(8,4\) has 8 rows of 4 blackhole chips; use a mesh of 8 rows of 4 wormhole",
        ),
        ({"mesh": MeshConfig(name="(4,8)")}, "Llama", "has 4 rows of 8 wormhole chips"),
        ({"mesh": MeshConfig(name="(16,2)")}, "Llama", "has 16 rows of 2 wormhole chips"),
        ({"mesh": MeshConfig(name="(1,32)")}, "Llama", "has 1 rows of 32 wormhole chips"),
        (
            {"mesh": MeshConfig(name="TG", optimizations="accuracy")},
            "Llama",
            "a fixed precision, but mesh.optimizations is 'accuracy'",
        ),
        ({"tt_data_parallel": 8}, "Llama", "a Galaxy's 4 columns, but tt_data_parallel is 8"),
        ({"max_batch_size": 64}, "Llama", "32 rows on a Galaxy, but max_batch_size is 64"),
        ({"kv_connector": "p2p"}, "Llama", "all lanes in one cache, .* 'p2p' cannot"),
        ({}, "Qwen3", "has no class for 'Qwen3ForCausalLM'"),
    ],
)
def test_galaxy_of_another_shape(changes: Any, architecture: str, reason: str) -> None:
    served = EngineConfig(
        model="/models/some", generator="llama3_70b_galaxy", mesh=MeshConfig(name="TG"),
        tt_data_parallel=4, max_batch_size=32,
    )  # fmt: skip
    for name in ("TG", "Galaxy", "(8,4)"):
        galaxy = msgspec.structs.replace(served, mesh=MeshConfig(name=name))
        check_route(galaxy, "LlamaForCausalLM")
    asked, architecture = msgspec.structs.replace(served, **changes), f"{architecture}ForCausalLM"
    with pytest.raises(ConfigError, match=reason):
        check_route(asked, architecture)
    for generator in ("tt-metal", "module:Class", None):
        check_route(msgspec.structs.replace(asked, generator=generator), architecture)


def test_what_the_configuration_says_goes_before_the_route() -> None:
    mesh = MeshConfig(name="TG", trace_region_size=7, dispatch_core_axis="row")
    found = route_mesh("qwen3_32b_galaxy", mesh)
    assert (found.trace_region_size, found.dispatch_core_axis) == (7, "row")
    assert found.worker_l1_size == 1_345_000
    untraced = route_mesh("qwen3_32b_galaxy", MeshConfig(name="TG", trace="none"))
    assert (untraced.trace_region_size, untraced.worker_l1_size) == (None, 1_345_000)
    for name in ("tt-metal", "module:Class", None):
        assert route_mesh(name, mesh) == mesh


# --- routes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "architecture", "target"),
    [
        ("tt-transformers", "Phi3ForCausalLM", "tt_transformers.vllm_registry:Phi3ForCausalLM"),
        (
            "tt-metal", "TTQwen3ForCausalLM",
            "models.tt_transformers.tt.generator_vllm:QwenForCausalLM",
        ),
        (
            "llama3_70b_galaxy", "LlamaForCausalLM",
            "models.demos.llama3_70b_galaxy.tt.generator_vllm:LlamaForCausalLM",
        ),
        (
            "qwen3_32b_galaxy", "Qwen3ForCausalLM",
            "models.demos.llama3_70b_galaxy.tt.generator_vllm:QwenForCausalLM",
        ),
    ],
)  # fmt: skip
def test_class_of_a_route(route: str, architecture: str, target: str) -> None:
    assert class_of_route(route, architecture) == target


def test_the_documents_have_every_route_and_what_it_serves() -> None:
    """A column for each architecture that several routes serve."""
    text = Path(__file__).parents[4].joinpath("docs/tenstorrent.md").read_text()
    [header] = [line for line in text.splitlines() if line.startswith("| `generator` |")]
    columns = [column.strip() for column in header.split("|")]
    for name, route in ROUTES.items():
        [row] = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
        cells = dict(zip(columns, (cell.strip() for cell in row.split("|")), strict=True))
        for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3"):
            assert (cells[family] == "x") == (f"{family}ForCausalLM" in route.classes)


@pytest.mark.parametrize("route", ROUTES)
def test_encoder_decoders_are_refused_by_name(route: str) -> None:
    with pytest.raises(ConfigError, match=r"cross_page_table.*not supported yet"):
        class_of_route(route, "MllamaForConditionalGeneration")


def test_environment_of_a_route() -> None:
    assert route_environment("llama3_70b_galaxy") == {"TT_LLAMA_TEXT_VER": "llama3_70b_galaxy"}
    assert route_environment("qwen3_32b_galaxy") == {"TT_QWEN3_TEXT_VER": "qwen3_32b_galaxy"}
    assert route_environment("tt-metal") == route_environment(None) == {}
