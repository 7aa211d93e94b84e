"""A mesh without ttnn: the torch generator as a device that draws and feeds back its tokens.

It checks decode contract 1: inputs that a call does not reload are ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from replicas.generators.model_config import load_hf_config
from replicas.generators.protocol import CpuDevice
from replicas.generators.torch.generator import TorchGenerator
from replicas.platforms import mesh as platform

if TYPE_CHECKING:
    import pytest

    from replicas.config import MeshConfig
    from replicas.generators.protocol import ModelCapabilities


class FakeMesh:
    """A double of an opened mesh.

    Attributes:
        closed: How often it was closed.
        arguments: Those of `open_mesh`.
    """

    def __init__(self, settings: MeshConfig, **arguments: object) -> None:
        self.settings = settings
        self.arguments = arguments
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class MeshGenerator(TorchGenerator):
    """The torch generator on a mesh, in float32; draws the most likely token.

    Attributes:
        log: Names of the calls, in order.
        loads: Of each decode call: whether it reloaded inputs, and the page table.
    """

    model_capabilities: ClassVar[ModelCapabilities] = {
        "supports_prefix_caching": True,
        "supports_chunked_prefill": True,
        "supports_async_decode": True,
        "supports_sample_on_device": True,
        "supports_sample_in_prefill": True,
        "max_device_top_k": 32,
        "fabric_config": {"config": "FABRIC_2D"},
    }

    log: list[str]
    loads: list[tuple[bool, bool]]
    get_max_tokens_all_users = None

    @classmethod
    def initialize_vllm_model(
        cls, hf_config, mesh_device, max_batch_size, *, max_seq_len, tt_data_parallel=1,
        optimizations=None,
    ):  # fmt: skip
        assert isinstance(mesh_device, FakeMesh)
        assert optimizations == mesh_device.settings.optimizations
        device = CpuDevice(
            dtype=torch.float32,
            load_format=mesh_device.arguments["load_format"],
            seed=mesh_device.arguments["seed"],
        )
        made = super().initialize_vllm_model(
            load_hf_config(hf_config.name_or_path), device, max_batch_size,
            max_seq_len=max_seq_len, tt_data_parallel=tt_data_parallel,
        )  # fmt: skip
        made.log, made.loads = [], []
        return made

    def allocate_kv_cache(self, kv_cache_shape, dtype, num_layers):
        assert dtype == torch.bfloat16, "what a mesh computes in"
        return super().allocate_kv_cache(kv_cache_shape, torch.float32, num_layers)

    def warmup_model_prefill(self, *, enable_trace, **kwargs):
        self.log.append(f"prefill {enable_trace}")
        super().warmup_model_prefill(enable_trace=enable_trace, **kwargs)

    def warmup_model_decode(self, *, enable_trace, **kwargs):
        self.log.append(f"decode {enable_trace}")
        super().warmup_model_decode(enable_trace=enable_trace, **kwargs)

    def prefill_forward(self, *, sampling_params=None, **kwargs):
        starts = kwargs["start_pos"]
        block_size = kwargs["kv_cache"].block_size
        ends = kwargs["prompt_lens"]
        assert all(start % block_size == 0 for start in starts.tolist())
        assert (ends > starts).all()
        logits = super().prefill_forward(**kwargs)
        if sampling_params is None:
            return logits
        assert len(sampling_params.seed) == len(logits)
        return logits.argmax(dim=-1).int()

    def decode_forward(
        self, *, tokens, page_table, start_pos, read_from_device, sampling_params=None,
        reload_inputs, reload_page_table, reload_sampling_params, reset_sampling_state, **kwargs,
    ):  # fmt: skip
        self.loads.append((reload_inputs, reload_page_table))
        assert not read_from_device
        assert not (reload_inputs and reload_page_table)
        assert reload_inputs or not reset_sampling_state
        assert reload_inputs or sampling_params is not None
        if reload_inputs:
            self._tokens, self._positions = tokens.clone(), start_pos.clone()
        if reload_inputs or reload_page_table:
            self._page_table = page_table.clone()
        if reload_sampling_params:
            self._params = sampling_params
        logits = super().decode_forward(
            tokens=self._tokens, page_table=self._page_table, start_pos=self._positions, **kwargs
        )
        if sampling_params is None:
            return logits
        live = self._positions >= 0
        assert [t == 0.0 for t in self._params.temperature] == [True] * len(live)
        self._tokens = logits.argmax(dim=-1).int() * live[:, None]
        self._positions = self._positions + live
        return self._tokens

    def read_decode_output(self, tt_out, async_read=True):
        return tt_out.clone(), []

    def process_decode_output_host(self, tt_out, is_tokens=False):
        assert is_tokens == (tt_out.ndim == 2)
        return tt_out

    def close(self):
        self.log.append("close")


class Doubles:
    """The meshes that a test's engines have opened.

    Attributes:
        meshes: In order.
    """

    def __init__(self) -> None:
        self.meshes: list[FakeMesh] = []

    def open_mesh(self, settings: MeshConfig, **arguments: object) -> FakeMesh:
        self.meshes.append(FakeMesh(settings, **arguments))
        return self.meshes[-1]


def install(
    monkeypatch: pytest.MonkeyPatch, generator: type[TorchGenerator] = MeshGenerator
) -> Doubles:
    """Let engines with a mesh open doubles, and use a generator class that runs without ttnn."""
    doubles = Doubles()
    monkeypatch.setattr(platform, "_import_open_mesh", lambda mesh: doubles.open_mesh)
    monkeypatch.setattr(
        platform, "resolve_mesh_generator", lambda _config, _architecture: generator
    )
    return doubles
