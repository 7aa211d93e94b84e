"""The environment variables of an engine on a mesh."""

import os
import shlex
import shutil
import sys

import msgspec
import pytest

from replicas import mesh_environment as module
from replicas.config import EngineConfig, MeshConfig
from replicas.errors import ConfigError, UnknownGeneratorError
from replicas.mesh_environment import (
    check_generator,
    make_folders,
    mesh_environment,
    with_places,
)
from replicas.tt.triage import COMMAND, TIMEOUT
from replicas.tt.ttnn_package import TtnnPackage
from tests.hosts import take_home

CACHE = "TT_CACHE_PATH"


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model's folder, and a home without anything."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(200_000))
    return folder


def theirs(model, mesh="T3K", lanes=1, **settings):
    return EngineConfig(
        model=str(model), generator="tt-metal", tt_data_parallel=lanes,
        mesh=MeshConfig(name=mesh, **settings),
    )  # fmt: skip


def of(config, **inherited):
    return mesh_environment(config, inherited)


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ("N150", {"ARCH_NAME": "wormhole_b0", "MESH_DEVICE": "N150"}),
        ("N300", {"ARCH_NAME": "wormhole_b0", "MESH_DEVICE": "N300",
                  "WH_ARCH_YAML": "wormhole_b0_80_arch_eth_dispatch.yaml"}),
        ("P150x4", {"ARCH_NAME": "blackhole", "MESH_DEVICE": "P150x4"}),
        ("Galaxy", {"ARCH_NAME": "wormhole_b0", "MESH_DEVICE": "TG", "TT_MM_THROTTLE_PERF": "5"}),
        ("GalaxyT3K", {"ARCH_NAME": "wormhole_b0", "MESH_DEVICE": "T3K",
                       "TT_MM_THROTTLE_PERF": "5",
                       "WH_ARCH_YAML": "wormhole_b0_80_arch_eth_dispatch.yaml"}),
        ("BHGalaxy", {"ARCH_NAME": "blackhole", "MESH_DEVICE": "BH-Galaxy",
                      "TT_MM_THROTTLE_PERF": "5"}),
    ],
)  # fmt: skip
def test_a_foreign_class_gets_tt_inference_servers_environment(model, monkeypatch, mesh, expected):
    monkeypatch.setattr(module, "find_ttnn", lambda: None)
    told = of(theirs(model, mesh))
    for name in ("OMPI_MCA_btl", "TT_METAL_LOGS_PATH", "HF_MODEL", CACHE, TIMEOUT):
        told.pop(name)
    assert told == expected


def test_classes_made_for_a_galaxy_run_at_its_full_rate(model):
    config = msgspec.structs.replace(theirs(model, "Galaxy"), generator="llama3_70b_galaxy")
    told = of(config)
    assert "TT_MM_THROTTLE_PERF" not in told
    assert told["TT_LLAMA_TEXT_VER"] == "llama3_70b_galaxy"


def test_what_the_user_has_set_stays_but_for_model_and_mesh(model):
    own = {
        "ARCH_NAME": "other", "WH_ARCH_YAML": "", "TT_MM_THROTTLE_PERF": "0", CACHE: "/mine",
        "TT_MESH_GRAPH_DESC_PATH": "/own.textproto",
    }  # fmt: skip
    told = of(theirs(model, "GalaxyT3K"), **own, HF_MODEL="old", MESH_DEVICE="N150")
    assert {name: told[name] for name in own} == own
    assert (told["HF_MODEL"], told["MESH_DEVICE"]) == (str(model), "T3K")


def test_our_own_models_get_only_the_boards_variables(model):
    native = EngineConfig(model=str(model), mesh=MeshConfig(name="Galaxy"))
    told = of(native)
    assert told.pop("TT_MM_THROTTLE_PERF") == "5"
    assert set(told) - {COMMAND} == {"OMPI_MCA_btl", "TT_METAL_LOGS_PATH", TIMEOUT}


@pytest.mark.parametrize(
    ("step_s", "timeout", "of_triage"), [(None, "20", "30"), (300.0, "20", "30"), (12.0, "4", "6")]
)
def test_a_hung_device_is_triaged_before_its_engine_is_killed(
    model, tmp_path, monkeypatch, step_s, timeout, of_triage
):
    metal, site = tmp_path / "a metal", tmp_path / "site-packages"
    scripts = [site / "triage/triage.py", metal / "scripts/debugging_scripts/triage.py",
               metal / "tools/triage/triage.py"]  # fmt: skip
    package = TtnnPackage("0.81.1", site / "ttnn")
    monkeypatch.setattr(module, "find_ttnn", lambda: package)
    config = EngineConfig(
        model=str(model), mesh=MeshConfig(name="N150", tt_metal_home=str(metal)),
        step_timeout_s=step_s,
    )  # fmt: skip
    assert COMMAND not in of(config)
    for script in scripts:
        script.parent.mkdir(parents=True)
        script.touch()
        told = of(config)
        assert told[TIMEOUT] == timeout
        assert shlex.split(told[COMMAND])[:4] == [
            "timeout", of_triage, sys.executable, str(script)
        ]  # fmt: skip
    own = {TIMEOUT: "0", COMMAND: "mine"}
    assert of(config, **own).items() >= own.items()


@pytest.mark.parametrize(
    ("mesh", "descriptor"),
    [("P300", "p300"), ("GalaxyT3K", "t3k"), ("T3K", None), ("P300x2", None)],
)
def test_a_part_of_a_machine_has_its_own_descriptor(model, tmp_path, monkeypatch, mesh, descriptor):
    metal, package = tmp_path / "metal", tmp_path / "ttnn"
    for root in (metal, package):
        folder = root / "tt_metal/fabric/mesh_graph_descriptors"
        folder.mkdir(parents=True)
        for name in ("p300", "t3k"):
            (folder / f"{name}_mesh_graph_descriptor.textproto").touch()
    monkeypatch.setattr(module, "find_ttnn", lambda: TtnnPackage("0.81.1", package))
    name = "TT_MESH_GRAPH_DESC_PATH"
    config = theirs(model, mesh)
    if descriptor is None:
        assert name not in of(config)
        return
    end = f"tt_metal/fabric/mesh_graph_descriptors/{descriptor}_mesh_graph_descriptor.textproto"
    assert of(config)[name] == str(package / end)
    assert of(config, TT_METAL_HOME=str(metal))[name] == str(metal / end)
    assert of(config, TT_METAL_HOME=str(tmp_path))[name] == str(package / end)


# --- the cache of converted weights --------------------------------------------------------------


def test_converted_weights_are_kept_for_one_model_mesh_and_precision(model, tmp_path):
    def cache(**changes):
        return of(theirs(model, **changes))[CACHE]

    first = cache()
    assert first.startswith(f"{tmp_path / 'home'}/.cache/ttserve/weights/tt-metal/Llama-3.1-8B-T3K")
    assert cache() == first
    others = {
        cache(mesh="N300"), cache(mesh="(2,4)"), cache(mesh="(2,4)", arch="blackhole"),
        cache(lanes=8), cache(optimizations="accuracy"),
    }  # fmt: skip
    assert len(others | {first}) == 6
    assert cache(weight_cache="/other").startswith("/other/tt-metal/")


def test_each_class_and_checkout_keeps_its_own_conversions(model, tmp_path):
    metal = theirs(model)
    other = msgspec.structs.replace(metal, generator="tt-transformers")
    first = of(metal)[CACHE]
    checkout = of(metal, TT_METAL_HOME="/metal")[CACHE]
    assert len({first, checkout, of(metal, TT_METAL_HOME="/newer")[CACHE], of(other)[CACHE]}) == 4
    # The configuration's goes before the environment's.
    configured = theirs(model, tt_metal_home="/metal")
    told = of(configured, TT_METAL_HOME="/newer")
    assert (told["TT_METAL_HOME"], told[CACHE]) == ("/metal", checkout)


def test_other_weights_under_the_same_name_get_another_folder(model):
    first = of(theirs(model))[CACHE]
    weights = model / "model.safetensors"
    at = weights.stat()
    data = bytearray(weights.read_bytes())
    data[0] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(at.st_atime_ns, at.st_mtime_ns))
    sampled = of(theirs(model))[CACHE]
    assert sampled != first
    os.utime(weights, ns=(at.st_atime_ns, at.st_mtime_ns + 1))
    assert of(theirs(model))[CACHE] not in {sampled, first}


def test_a_renamed_folder_is_another_model_to_classes_that_go_by_names(model):
    first = of(theirs(model))[CACHE]
    renamed = model.rename(model.with_name("mine"))
    assert of(theirs(renamed))[CACHE] != first


def test_a_snapshot_of_hugging_faces_cache_bears_its_models_name(model, tmp_path):
    snapshot = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "b968826d9c46"
    snapshot.parent.mkdir(parents=True)
    model.rename(snapshot)
    config = theirs(snapshot)
    told = of(config)
    assert told["HF_MODEL"].startswith(str(tmp_path / "home"))
    assert told["HF_MODEL"].endswith("/Qwen3-8B")
    assert "/Qwen3-8B-T3K-" in told[CACHE]
    for _ in range(2):
        make_folders(config, told)
    assert os.path.samefile(told["HF_MODEL"], snapshot)
    blocked = tmp_path / "home/.cache/ttserve/names"
    shutil.rmtree(blocked)
    blocked.touch()
    with pytest.raises(ConfigError, match=r"create the link .* folder that is called Qwen3-8B"):
        make_folders(config, told)


def test_a_snapshot_by_a_relative_path_is_linked_to_where_it_lies(model, tmp_path, monkeypatch):
    for place in ("here", "there"):
        snapshot = tmp_path / place / "models--Qwen--Qwen3-8B" / "snapshots" / "b968826d9c46"
        shutil.copytree(model, snapshot)
        monkeypatch.chdir(tmp_path / place)
        config = theirs(snapshot.relative_to(tmp_path / place))
        told = of(config)
        make_folders(config, told)
        assert os.path.samefile(told["HF_MODEL"], snapshot)
        assert told["HF_MODEL"] == of(theirs(snapshot))["HF_MODEL"]


def test_a_model_that_is_not_there_is_the_engines_to_refuse(tmp_path, model):
    assert CACHE not in of(theirs(tmp_path / "none"))


def test_the_folder_is_made_or_it_is_said_what_to_set(model, tmp_path):
    config = theirs(model)
    told = of(config)
    make_folders(config, told)
    assert os.path.isdir(told[CACHE])
    (tmp_path / "file").touch()
    blocked = theirs(model, weight_cache=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"TT_CACHE_PATH .*file.* set mesh\.weight_cache"):
        make_folders(blocked, of(blocked))
    native = EngineConfig(model=str(model), mesh=MeshConfig(name="N150"))
    make_folders(native, {CACHE: str(tmp_path / "file" / "x")})


def test_without_a_home_nothing_is_kept_and_nothing_written_beside_a_model(
    model, tmp_path, monkeypatch
):
    take_home(monkeypatch)
    native = EngineConfig(model=str(model), mesh=MeshConfig(name="N150"))
    assert "TT_METAL_LOGS_PATH" not in of(native)
    make_folders(native, of(native))
    config = theirs(model)
    assert CACHE not in of(config)
    with pytest.raises(ConfigError, match=r"weights: .*set HOME, or set mesh\.weight_cache"):
        make_folders(config, of(config))
    kept = theirs(model, weight_cache=str(tmp_path / "kept"))
    make_folders(kept, of(kept))
    assert of(kept, HOME="/home/me")["TT_METAL_LOGS_PATH"] == "/home/me/.cache/ttserve/ttnn-logs"
    snapshot = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "b968826d9c46"
    snapshot.parent.mkdir(parents=True)
    model.rename(snapshot)
    with pytest.raises(ConfigError, match=r"called Qwen3-8B to .*set HOME"):
        of(theirs(snapshot))


# --- where classes come from ---------------------------------------------------------------------

WHERE = {"TT_METAL_HOME": "/opt/tt-metal", "EXTRA_MODELS_DIR": "/opt/models"}


def test_a_class_is_looked_for_where_the_environment_says(model):
    mesh = with_places(theirs(model, extra_models_dir="/srv/models"), WHERE).mesh
    assert (mesh.tt_metal_home, mesh.extra_models_dir) == ("/opt/tt-metal", "/srv/models")
    native = EngineConfig(model=str(model), mesh=MeshConfig(name="N150"))
    assert with_places(native, WHERE) is native
    on_cpu = EngineConfig(model=str(model), generator="module:Class")
    assert with_places(on_cpu, WHERE) is on_cpu


@pytest.fixture
def llama(model):
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return model


def with_generator(model, name, **settings):
    return msgspec.structs.replace(theirs(model, **settings), generator=name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tt-metal", "set TT_METAL_HOME or mesh.tt_metal_home"),
        ("LlamaForCausalLM", "set TT_METAL_HOME or mesh.tt_metal_home"),
        ("models.mine:Class", "set TT_METAL_HOME or mesh.tt_metal_home"),
        ("tt-mettal", r"no generator class for 'tt-mettal'.*one of tt-metal, tt-transformers"),
        ("tt-transformers", "install github.com/tenstorrent/tt-transformers"),
        ("tests.replicas.no_such:Class", "no module 'tests.replicas.no_such' on this host;"),
        ("no_such_package:Class", "no module 'no_such_package' on this host;"),
    ],
)
def test_a_class_that_is_not_here_is_refused_before_anything_starts(llama, name, message):
    with pytest.raises(UnknownGeneratorError, match=message):
        check_generator(with_generator(llama, name), {})


def test_a_class_that_is_here_is_not_imported(llama, tmp_path):
    metal = tmp_path / "metal"
    file = metal / "models/tt_transformers/tt/generator_vllm.py"
    file.parent.mkdir(parents=True)
    file.write_text("raise AssertionError('imported')")
    check_generator(with_generator(llama, "tt-metal"), {"TT_METAL_HOME": str(metal)})
    check_generator(with_generator(llama, "tt-metal", tt_metal_home=str(metal)), {})
    check_generator(with_generator(llama, "tests.replicas.generators.plugin.doubles:Seed"), {})
    check_generator(with_generator(llama, "json:Class"), {})
    file.unlink()
    with pytest.raises(UnknownGeneratorError, match=r"no module 'models.tt_transformers"):
        check_generator(with_generator(llama, "tt-metal", tt_metal_home=str(metal)), {})
    with pytest.raises(ConfigError, match="is not a tt-metal checkout: it has no folder models"):
        check_generator(with_generator(llama, "tt-metal"), {"TT_METAL_HOME": str(tmp_path)})


def test_a_bundles_class_is_looked_for_in_the_bundle(llama, tmp_path):
    bundle = tmp_path / "bundles" / "mine"
    bundle.mkdir(parents=True)
    metadata = '{"arch": "Mine", "main_class": "mine.tt:Class"}'
    (bundle / "vllm_metadata.json").write_text(metadata)
    where = {"EXTRA_MODELS_DIR": str(bundle.parent)}
    with pytest.raises(UnknownGeneratorError, match=r"no module 'mine\.tt'"):
        check_generator(with_generator(llama, "Mine"), where)
    (bundle / "mine").mkdir()
    (bundle / "mine" / "tt.py").touch()
    check_generator(with_generator(llama, "Mine"), where)


def test_our_own_need_not_be_looked_for(llama):
    native = EngineConfig(model=str(llama), mesh=MeshConfig(name="N150"))
    check_generator(native, {})
    check_generator(EngineConfig(model=str(llama), generator="no_such_package:Class"), {})
