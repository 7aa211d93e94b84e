"""The places where classes are found, and the errors when they are not."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from replicas.errors import ConfigError, UnknownGeneratorError
from replicas.generators.plugin.find import find_plugin_class
from replicas.generators.plugin.routes import ROUTES
from replicas.generators.plugin.sources import (
    METADATA,
    PluginPaths,
    find_bundles,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOWHERE = PluginPaths()


@pytest.fixture(autouse=True)
def _own_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what a test imports and where it was found."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in {"models", "my_model", "other_model", "tt_transformers"}:
            del sys.modules[name]


def make_bundle(root: Path, name: str, source: str, **metadata: object) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / f"{name}.py").write_text(source)
    (folder / METADATA).write_text(json.dumps(metadata))
    return folder / METADATA


def make_tt_metal(root: Path, source: str) -> PluginPaths:
    package = root / "models" / "tt_transformers" / "tt"
    package.mkdir(parents=True)
    (package / "generator_vllm.py").write_text(source)
    return PluginPaths(tt_metal_home=str(root))


def test_class_on_the_path() -> None:
    found = find_plugin_class("tests.replicas.generators.plugin.doubles:Seed", NOWHERE)
    assert found.__name__ == "Seed"


def test_class_of_tt_metal(tmp_path: Path) -> None:
    """It is found by architecture, with and without the plugin's prefix, and by its own name."""
    paths = make_tt_metal(tmp_path, "class LlamaForCausalLM: ...\nclass QwenForCausalLM: ...")
    llama = find_plugin_class("LlamaForCausalLM", paths)
    assert llama.__module__ == "models.tt_transformers.tt.generator_vllm"
    assert find_plugin_class("TTLlamaForCausalLM", paths) is llama
    assert find_plugin_class(ROUTES["tt-metal"].classes["LlamaForCausalLM"], paths) is llama
    assert find_plugin_class("Qwen3ForCausalLM", paths).__name__ == "QwenForCausalLM"
    assert sys.path[-1] == str(tmp_path), "an installed package must go first"


def test_without_tt_metal() -> None:
    with pytest.raises(UnknownGeneratorError, match="set TT_METAL_HOME"):
        find_plugin_class("LlamaForCausalLM", NOWHERE)


def test_tt_metal_home_is_something_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a tt-metal checkout: it has no folder models"):
        find_plugin_class("LlamaForCausalLM", PluginPaths(tt_metal_home=str(tmp_path)))


def test_other_package_of_that_name(tmp_path: Path) -> None:
    """``models`` is a common name, and the first package on the path wins."""
    make_tt_metal(tmp_path / "other", "class LlamaForCausalLM: ...")
    paths = make_tt_metal(tmp_path / "tt-metal", "class LlamaForCausalLM: ...")
    sys.path.insert(0, str(tmp_path / "other"))
    with pytest.raises(ConfigError, match=r"tt-metal, but .*other.* comes first"):
        find_plugin_class("LlamaForCausalLM", paths)


def test_unknown_architecture() -> None:
    with pytest.raises(UnknownGeneratorError, match=r"'GPT2LMHeadModel'.*known: DeepseekV3"):
        find_plugin_class("GPT2LMHeadModel", NOWHERE)


def test_bundle(tmp_path: Path) -> None:
    """It serves its architecture, though tt-metal would too, and is found by its class."""
    make_bundle(
        tmp_path, "my_model", "class Model: ...", arch="LlamaForCausalLM",
        main_class="my_model:Model",
    )  # fmt: skip
    (tmp_path / "no_bundle").mkdir()
    paths = PluginPaths(extra_models_dir=str(tmp_path))
    found = find_plugin_class("LlamaForCausalLM", paths)
    assert found.__module__ == "my_model"
    assert find_plugin_class("my_model:Model", paths) is found
    assert set(find_bundles(str(tmp_path))) == {"LlamaForCausalLM"}
    assert find_bundles(None) == {}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", "has no string 'arch'"),
        ('{"arch": "X"}', "has no string 'main_class'"),
        ('{"arch": 3, "main_class": "m:C"}', "has no string 'arch'"),
        ('{"arch": "X", "main_class": "m.C"}', "is not of the form"),
    ],
)
def test_broken_metadata(content: str, reason: str, tmp_path: Path) -> None:
    """Names the file."""
    path = make_bundle(tmp_path, "my_model", "")
    path.write_text(content)
    with pytest.raises(ConfigError, match=reason) as error:
        find_bundles(str(tmp_path))
    assert str(path) in str(error.value)


def test_two_bundles_of_one_architecture(tmp_path: Path) -> None:
    make_bundle(tmp_path, "my_model", "", arch="Gemma3", main_class="my_model:Model")
    make_bundle(tmp_path, "other_model", "", arch="TTGemma3", main_class="other_model:Model")
    with pytest.raises(ConfigError, match=r"my_model.*other_model.*both serve Gemma3"):
        find_bundles(str(tmp_path))


def test_no_folder_of_bundles(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        find_bundles(str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("source", "kind", "reason"),
    [
        ("def broken(:", ConfigError, r"my_model\.py\) cannot be imported: line 1"),
        ("1 / 0", ConfigError, r"my_model\.py\) cannot be imported: ZeroDivisionError"),
        ("import not_there", ConfigError, "it imports the missing 'not_there'"),
        ("from vllm.inputs import Oops", ConfigError, r"stand-in has no vllm\.inputs\.Oops"),
        ("import vllm.oops", ConfigError, "it imports the missing 'vllm.oops'"),
        ("Model = 3", UnknownGeneratorError, r"my_model\.py has no class 'Model'"),
    ],
)
def test_broken_class(source: str, kind: type[Exception], reason: str, tmp_path: Path) -> None:
    """Names the metadata, the module's file and the reason; leaves no stand-in behind."""
    path = make_bundle(tmp_path, "my_model", source, arch="X", main_class="my_model:Model")
    with pytest.raises(kind, match=reason) as error:
        find_plugin_class("X", PluginPaths(extra_models_dir=str(tmp_path)))
    assert str(path) in str(error.value)
    assert "vllm" not in sys.modules


def test_absent_module() -> None:
    with pytest.raises(UnknownGeneratorError, match="there is no module 'my_model'"):
        find_plugin_class("my_model.tt.generator:Model", NOWHERE)
    with pytest.raises(ConfigError, match="'my_model:' is not of the form"):
        find_plugin_class("my_model:", NOWHERE)
