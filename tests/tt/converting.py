"""A foreign generator class for the mock device, reduced to its cache of converted weights."""

from __future__ import annotations

import os
from pathlib import Path

from replicas.generators.ttnn.generator import TTGenerator


class Converting(TTGenerator):
    """A generator that keeps files as tt_transformers does: beside the model by default."""

    @classmethod
    def initialize_vllm_model(cls, *args, **kwargs):
        beside = os.path.join("model_cache", os.environ["HF_MODEL"])
        folder = Path(os.environ.get("TT_CACHE_PATH") or beside, os.environ["MESH_DEVICE"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "layers.0.wqkv").write_bytes(b"converted")
        return super().initialize_vllm_model(*args, **kwargs)
