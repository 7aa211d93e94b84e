"""A worker's start, before it has weights."""

import json
import shutil

import pytest

from replicas.config import EngineConfig
from replicas.engine.hooks import NO_HOOKS
from replicas.engine.worker import Worker
from tests.models import model_folder


@pytest.mark.parametrize(
    ("saved", "asked", "is_reported"),
    [
        ("float16", "auto", True),
        ("float16", "float32", False),
        ("bfloat16", "auto", False),
    ],
)
def test_weights_that_lose_precision_are_reported(tmp_path, caplog, saved, asked, is_reported):
    folder = shutil.copytree(model_folder("llama-mha"), tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "dtype": saved}))
    Worker(
        EngineConfig(model=str(folder), dtype=asked), "e.1", lambda: None, lambda *_: None, NO_HOOKS
    ).init_device()
    assert ("float16 weights" in caplog.text) == is_reported


@pytest.mark.parametrize(("asked", "is_reported"), [(None, True), (64, False)])
def test_a_model_that_states_no_longest_sequence_is_reported(tmp_path, caplog, asked, is_reported):
    folder = shutil.copytree(model_folder("llama-mha"), tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    del raw["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(raw))
    config = EngineConfig(model=str(folder), max_model_len=asked)
    Worker(config, "e.1", lambda: None, lambda *_: None, NO_HOOKS).init_device()
    assert ("default of llama models, 2048 tokens" in caplog.text) == is_reported
