"""Meshes of golden chips, and tiny models that fit their tiles."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import replicas.generators.ttnn.lane_batch
import replicas.generators.ttnn.mesh
from replicas.config import MeshConfig
from replicas.generators.model_config import load_hf_config
from replicas.generators.ttnn.buckets import decode_table_width, prefill_table_width
from replicas.generators.ttnn.generator import TTGenerator
from replicas.generators.ttnn.inputs import host_decode_inputs, host_prefill_inputs, to_device
from replicas.generators.ttnn.mesh import TTMesh
from replicas.generators.ttnn.model import TTTransformer
from replicas.generators.ttnn.profiles import profile
from replicas.generators.ttnn.weights import load_lane_weights
from replicas.tt.meshes import mesh_spec
from tests.replicas.generators.paged_loop import PagedLoop
from tests.tt.golden.library import GoldenLibrary, installed
from tests.tt.golden.tensors import GoldenDevice

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_COMMON = {
    "vocab_size": 230,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.09,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CASES = {
    "llama-32": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-64-biases": (
        "Llama",
        {
            "head_dim": 64,
            "num_attention_heads": 8,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "mistral-32": ("Mistral", {"num_attention_heads": 8, "sliding_window": None}),
    "mistral-64": ("Mistral", {"head_dim": 64, "sliding_window": None}),
    "qwen2-32": ("Qwen2", {}),
    "qwen2-64": (
        "Qwen2",
        {"hidden_size": 512, "num_attention_heads": 8, "initializer_range": 0.045},
    ),
    "qwen3-32": ("Qwen3", {"num_attention_heads": 8}),
    "qwen3-64": ("Qwen3", {"head_dim": 64}),
    # More heads than a chip has cores.
    "mistral-96-heads": (
        "Mistral",
        {"num_attention_heads": 32, "num_key_value_heads": 32, "sliding_window": None},
    ),
}
"""Name -> (transformers class prefix, settings besides the common ones). All fit four chips."""


@cache
def root():
    folder = Path(tempfile.mkdtemp(prefix="golden-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def model_folder(case):
    """A folder of one of CASES, with norms and biases that are not the usual ones and zeros."""
    prefix, settings = CASES[case]
    config = getattr(transformers, f"{prefix}Config")(**{**_COMMON, **settings})
    torch.manual_seed(sum(case.encode()))
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    folder = root() / case
    model.save_pretrained(folder)
    return str(folder)


@cache
def grown_folder(case):
    """The model of `model_folder`, whose tokens weigh as much in the residual stream as they do in
    a trained model: a layer adds to it, and is not most of it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder(case))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(20)
    folder = root() / f"{case}-grown"
    model.save_pretrained(folder)
    return str(folder)


MESHES = {1: "N150", 2: "N300", 4: "(1,4)", 8: "T3K"}
"""Chips -> mesh."""


@contextlib.contextmanager
def golden_mesh(num_chips=1, optimizations="performance", **settings):
    """A mesh of golden chips, and ttnn replaced while it is open; yields (mesh, library)."""
    settings = MeshConfig(
        name=MESHES[num_chips],
        optimizations=optimizations,
        trace="none",
        weight_cache=str(root() / "weights"),
        **settings,
    )
    spec = mesh_spec(settings.name)
    with installed(GoldenLibrary()) as library:
        yield TTMesh(device=GoldenDevice(spec.shape), spec=spec, settings=settings), library


class RepeatingTracer:
    """Instead of ttnn's traces, which golden chips do not have: a replay calls again.

    The outputs stay where they were when it was captured, as those of a trace do.
    """

    def capture(self, device, call):
        outputs = call()

        def shards(tensors):
            tensors = tensors if isinstance(tensors, tuple) else (tensors,)
            return [shard for tensor in tensors for shard in tensor.shards]

        def replay():
            for target, source in zip(shards(outputs), shards(call()), strict=True):
                target.copy_(source)
            return outputs

        return replay

    def release(self):
        pass


@contextlib.contextmanager
def golden_boards():
    """Let engines of this process open golden meshes; yields the library."""

    def open_mesh(settings, *, fabric_config=None, **arguments):
        spec = mesh_spec(settings.name)
        return TTMesh(device=GoldenDevice(spec.shape), spec=spec, settings=settings, **arguments)

    with installed(GoldenLibrary()) as library, pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas.generators.ttnn.mesh, "open_mesh", open_mesh)
        patch.setattr(replicas.generators.ttnn.lane_batch, "TtnnTracer", RepeatingTracer)
        yield library


class Lane:
    """One lane of a model, driven without a generator.

    Attributes:
        cache: list[layer] of [k, v].
    """

    def __init__(self, ttnn, device, folder, optimizations, mesh, **sizes):
        self.sizes = {"max_seq_len": 512, "max_rows": 8, "block_size": 32, **sizes}
        self.num_blocks = self.sizes.pop("num_blocks", 48)
        self.config = load_hf_config(folder)
        self.profile = profile(optimizations, self.config)
        self.device, self.ttnn = device, ttnn
        (weights,) = load_lane_weights(self.config, mesh, [device], self.profile)
        self.model = TTTransformer(self.config, device, weights, self.profile, **self.sizes)
        chips = device.get_num_devices()
        heads = self.config.num_key_value_heads // chips
        shape = (self.num_blocks, heads, self.sizes["block_size"], self.config.head_dim)
        dtype = getattr(ttnn, self.profile.kv_dtype)
        self.cache = [
            [
                ttnn.zeros(shape, dtype, ttnn.TILE_LAYOUT, device, ttnn.DRAM_MEMORY_CONFIG)
                for _ in "kv"
            ]
            for _ in range(self.config.num_hidden_layers)
        ]

    def fill(self, value):
        """Put `value` everywhere in the cache, the null block included."""
        for shard in self.planes():
            shard.fill_(value)

    def planes(self):
        return shards_of([self.cache])

    def prefill_inputs(self, token_ids, start, end, blocks):
        max_seq_len, block_size = self.sizes["max_seq_len"], self.sizes["block_size"]
        return host_prefill_inputs(
            np.asarray(token_ids[start:end]),
            start,
            blocks,
            max_seq_len=max_seq_len,
            block_size=block_size,
            table_width=prefill_table_width(max_seq_len, block_size),
            hidden_size=self.config.hidden_size,
        )

    def prefill(self, token_ids, start, end, blocks):
        """(V,) logits after `token_ids[:end]`, of which those from `start` are computed."""
        inputs = self.prefill_inputs(token_ids, start, end, blocks)
        return self.run_prefill(inputs, start)[0]

    def run_prefill(self, inputs, start):
        piece = self.model.attention_piece(inputs.tokens.shape[-1], start)
        return self.logits(self.model.prefill(to_device(inputs, self.device), self.cache, piece))

    def decode(self, rows):
        """(B, V) logits; rows maps a row to (token, position, blocks)."""
        num_rows, max_seq_len, block_size = (
            self.sizes[name] for name in ("max_rows", "max_seq_len", "block_size")
        )
        width = -(-max_seq_len // block_size)
        tokens, table = np.zeros(num_rows, dtype=int), np.zeros((num_rows, width), dtype=int)
        positions = np.full(num_rows, -1)
        for row, (token, position, blocks) in rows.items():
            tokens[row], positions[row] = token, position
            table[row, : len(blocks)] = blocks
        inputs = host_decode_inputs(
            tokens, positions, table, table_width=decode_table_width(max_seq_len, block_size)
        )
        return self.logits(self.model.decode(to_device(inputs, self.device), self.cache))

    def logits(self, local):
        composer = self.ttnn.ConcatMeshToTensor(self.device, dim=3)
        values = self.ttnn.to_torch(local, mesh_composer=composer).float()
        return values[0, 0, :, : self.config.vocab_size]


@contextlib.contextmanager
def golden_lane(case, num_chips=1, optimizations="accuracy", **sizes):
    """One lane of a model of CASES, or in a folder, on golden chips."""
    folder = model_folder(case) if case in CASES else case
    with golden_mesh(num_chips, optimizations) as (mesh, library):
        (device,) = mesh.lanes(1)
        yield Lane(library, device, folder, optimizations, mesh, **sizes)


@contextlib.contextmanager
def golden_generator(
    case,
    num_chips=1,
    optimizations="accuracy",
    *,
    num_lanes=1,
    slots_per_lane=4,
    block_size=32,
    max_seq_len=256,
    seed=0,
):
    """A generator on golden chips, in a loop that steps sequences through it."""
    folder = model_folder(case) if case in CASES else case
    config = load_hf_config(folder)
    with golden_mesh(num_chips, optimizations) as (mesh, library):
        generator = TTGenerator.initialize_vllm_model(
            config,
            mesh,
            num_lanes * slots_per_lane,
            max_seq_len=max_seq_len,
            tt_data_parallel=num_lanes,
            optimizations=optimizations,
        )
        loop = PagedLoop(
            generator,
            config,
            num_lanes=num_lanes,
            slots_per_lane=slots_per_lane,
            block_size=block_size,
            max_seq_len=max_seq_len,
            dtype=torch.bfloat16,
            seed=seed,
        )
        loop.library = library
        yield loop


def fill(cache, value):
    """Put `value` everywhere in a generator's cache, the null blocks included."""
    for shard in shards_of(cache):
        shard.fill_(value)


def shards_of(cache):
    """What each chip has of each plane of a cache."""
    return [shard for lane in cache for layer in lane for plane in layer for shard in plane.shards]


@cache
def reference_model(folder):
    """transformers' model in float32, with the weights that bfloat16 can hold."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


@cache
def _reference_logits(folder, token_ids):
    with torch.no_grad():
        return reference_model(folder)(torch.tensor([token_ids])).logits[0]


def reference_logits(folder, token_ids):
    """(T, V) logits of transformers in float32 after each token."""
    return _reference_logits(folder, tuple(token_ids))


def pcc(a, b):
    """Pearson's correlation coefficient of two tensors' elements."""
    a, b = (x.flatten().double() - x.double().mean() for x in (a, b))
    return float(a @ b / (a.norm() * b.norm()))


def relative_error(a, b):
    """Norm of the difference over the norm of `b`."""
    return float((a.double() - b.double()).norm() / b.double().norm())
