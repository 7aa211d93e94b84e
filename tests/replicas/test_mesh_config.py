"""Values of a mesh's configuration that is made in Python, where no decoder has looked at them."""

from pathlib import Path

import pytest

from replicas.config import MeshConfig
from replicas.errors import ConfigError
from replicas.user_cache import user_cache
from tests.hosts import take_home


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("optimizations", "speed", "'speed' is not one of 'performance', 'balanced', 'accuracy'"),
        ("optimizations", None, "None is not one of 'performance', 'balanced', 'accuracy'"),
        ("trace", True, "True is not one of 'none', 'decode_only', 'all'"),
        ("sample_on_device", "off", "'off' is not one of 'none', 'decode_only', 'all'"),
        ("dispatch_core_axis", "rows", "'rows' is not one of 'row', 'col', None"),
    ],
)
def test_a_value_that_is_none_of_the_choices_is_refused(name, value, message):
    with pytest.raises(ConfigError, match=f"mesh.{name} {message}"):
        MeshConfig(name="N150", **{name: value}).validate()


@pytest.mark.parametrize("name", ["weight_cache", "tt_metal_home", "extra_models_dir"])
@pytest.mark.parametrize("folder", ["~/weights", "", "relative/x"])
def test_a_folder_that_depends_on_where_an_engine_starts_is_refused(name, folder):
    with pytest.raises(ConfigError, match=f'mesh.{name} .*is not an absolute.*"/home/me/{name}"'):
        MeshConfig(name="N150", **{name: folder}).validate()
    MeshConfig(name="N150", **{name: "/weights"}).validate()


@pytest.mark.parametrize("name", ["N150", "P150"])
def test_a_trace_region_leaves_something_of_a_chip(name):
    memory = MeshConfig(name=name).spec.dram_bytes_per_chip
    with pytest.raises(ConfigError, match=rf"trace_region_size {memory} leaves no memory .*{name}"):
        MeshConfig(name=name, trace_region_size=memory).validate()
    MeshConfig(name=name, trace_region_size=memory - 1).validate()


@pytest.mark.parametrize("mode", ["none", "decode_only", "all"])
@pytest.mark.parametrize("axis", ["row", "col", None])
def test_every_choice_is_taken(mode, axis):
    MeshConfig(name="N150", trace=mode, sample_on_device=mode, dispatch_core_axis=axis).validate()


def test_an_empty_weight_cache_is_the_users_own(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    usual = tmp_path / ".cache" / "ttserve" / "weights"
    assert MeshConfig(name="N150").weight_cache_folder == usual
    assert MeshConfig(name="N150", weight_cache="").weight_cache_folder == usual
    assert MeshConfig(name="N150", weight_cache="/kept").weight_cache_folder == Path("/kept")


def test_a_user_without_a_home_has_no_weight_cache_of_his_own(monkeypatch):
    take_home(monkeypatch)
    assert MeshConfig(name="N150").weight_cache_folder is None
    assert MeshConfig(name="N150", weight_cache="/kept").weight_cache_folder == Path("/kept")
    assert user_cache() is None
    assert user_cache("/home/other") == Path("/home/other/.cache/ttserve")
