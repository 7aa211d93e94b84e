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

    Its decode applies penalties to the tokens that a reset has given it and those that it has drawn
    since, and returns the log probabilities of eight tokens if any row asks for some.

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
        "supports_device_penalties": True,
        "max_device_logprobs": 8,
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
        reload_inputs, reload_page_table, reload_sampling_params, reset_sampling_state,
        logits_rows=None, prompt_tokens=None, output_tokens=None, **kwargs,
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
        if reset_sampling_state:
            is_penalised = any(p != (0.0, 0.0, 1.0) for p in penalties_of(self._params))
            assert is_penalised == (prompt_tokens is not None) == (output_tokens is not None)
            self._prompts = counts_of(prompt_tokens, len(tokens), self._config.vocab_size)
            self._outputs = counts_of(output_tokens, len(tokens), self._config.vocab_size)
        logits = super().decode_forward(
            tokens=self._tokens, page_table=self._page_table, start_pos=self._positions, **kwargs
        )
        if sampling_params is None:
            return logits
        live = self._positions >= 0
        assert [t == 0.0 for t in self._params.temperature] == [True] * len(live)
        penalised = self._penalised(logits[:, 0])
        self._tokens = penalised.argmax(dim=-1, keepdim=True).int() * live[:, None]
        self._outputs[torch.arange(len(live)), self._tokens[:, 0].long()] += live
        self._positions = self._positions + live
        if logits_rows is not None:
            return self._tokens, logits[logits_rows, 0]
        if any(self._params.enable_log_probs):
            return self._tokens, tuple(logits[:, 0].log_softmax(dim=-1).topk(8))
        return self._tokens

    def _penalised(self, logits):
        presence, frequency, repetition = torch.tensor([*penalties_of(self._params)]).T[..., None]
        is_seen = (self._prompts + self._outputs > 0) & (repetition != 1.0)
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(is_seen, scaled, logits)
        return logits - frequency * self._outputs - presence * (self._outputs > 0)

    def read_decode_output(self, tt_out, async_read=True):
        return copy_of(tt_out), []

    def process_decode_output_host(self, tt_out, is_tokens=False):
        output = tt_out[0] if isinstance(tt_out, tuple) else tt_out
        assert is_tokens == (output.ndim == 2)
        return tt_out

    def close(self):
        self.log.append("close")


def penalties_of(params):
    """Yield presence, frequency and repetition penalty of each row."""
    return zip(
        params.presence_penalty, params.frequency_penalty, params.repetition_penalty, strict=True
    )


def counts_of(tokens, num_rows, vocab_size):
    """Return (B, V) how often each row of a history, padded with -1, has each token."""
    counts = torch.zeros(num_rows, vocab_size)
    for row, history in enumerate([] if tokens is None else tokens.tolist()):
        for token_id in history:
            counts[row, token_id] += token_id >= 0
    return counts


def copy_of(output):
    if isinstance(output, tuple):
        return tuple(map(copy_of, output))
    return output.clone()


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
