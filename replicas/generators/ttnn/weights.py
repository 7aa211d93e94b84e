"""Conversion of a model's weights for the chips of a lane, caching on disk, and loading.

Layout on the ``tp`` chips of a lane:

- Matrices are (1, 1, in, out), TILE; norm weights and biases (1, 1, 1, n), TILE, bfloat16.
- ``qkv`` is column-parallel: a chip's columns are its queries, then its keys, then its values.
- ``gate`` and ``up`` are column-parallel.
- ``o`` and ``down`` are row-parallel: their products are summands, and their biases, which every
  chip has whole, belong behind the reduction.
- ``embedding`` (1, 1, V / tp + 1, hidden), ROW_MAJOR, bfloat16, and ``lm_head``
  (1, 1, hidden, V / tp) are vocabulary-parallel: chip i has tokens i * V / tp and up. V is the
  vocabulary, padded with zeros to whole tiles on each chip. The embedding's last row on each chip
  is zero, for tokens of other chips. Tied embeddings are two tensors all the same.

Matrices of a layer are stored in stripes of columns, one per DRAM bank, if `programs` says so; all
others are interleaved. Files on disk are the same for both.

Every weight is rounded to bfloat16 first, as the torch generator does, and from there to the
profile's dtype, on the host. One tensor is on the host at a time; while it is converted, ttnn takes
up to three times its size in bfloat16.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
import ttnn

from replicas.config import EngineConfig
from replicas.errors import DeviceError
from replicas.generators.checkpoint import expected_weights, unused_layers
from replicas.generators.fingerprint import conversion_source
from replicas.generators.torch.loader import (
    open_safetensors,
    random_source,
)
from replicas.generators.ttnn.buckets import TILE, check_lane, padded_vocab_size
from replicas.generators.ttnn.mesh import ttnn_message
from replicas.generators.ttnn.products import chip_cores, striped
from replicas.generators.ttnn.profiles import PRODUCTS
from replicas.generators.ttnn.programs import BankProduct, lane_programs, product_sizes
from replicas.generators.ttnn.weight_cache import DamagedCacheError, WeightCache
from replicas.user_cache import NO_HOME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from replicas.config import MeshConfig
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.torch.loader import Fetch
    from replicas.generators.ttnn.mesh import TTMesh
    from replicas.generators.ttnn.profiles import Dtype, Profile
    from replicas.generators.ttnn.programs import ChipCores
    from replicas.generators.ttnn.weight_cache import CachedFiles, CacheWriter

    Shards: TypeAlias = Iterator[torch.Tensor]

logger = logging.getLogger(__name__)

_FORMAT = 1
"""Increment it when the layout of a converted tensor changes, to invalidate older conversions."""


@dataclass(frozen=True, slots=True, eq=False)
class TTLayerWeights:
    """One decoder layer on the chips of a lane; a bias or norm is None where the model has none.

    Sizes below are of one chip; see the module for layouts.

    Attributes:
        input_norm: (1, 1, 1, hidden), whole on every chip.
        qkv: (1, 1, hidden, (heads + 2 * kv_heads) / tp * head_dim).
        qkv_bias: (1, 1, 1, columns of ``qkv``).
        q_norm: (1, 1, 1, head_dim), whole on every chip.
        k_norm: (1, 1, 1, head_dim), whole on every chip.
        o: (1, 1, heads / tp * head_dim, hidden).
        o_bias: (1, 1, 1, hidden), whole on every chip.
        post_norm: (1, 1, 1, hidden), whole on every chip.
        gate: (1, 1, hidden, intermediate / tp).
        gate_bias: (1, 1, 1, intermediate / tp).
        up: (1, 1, hidden, intermediate / tp).
        up_bias: (1, 1, 1, intermediate / tp).
        down: (1, 1, intermediate / tp, hidden).
        down_bias: (1, 1, 1, hidden), whole on every chip.
    """

    input_norm: ttnn.Tensor
    qkv: ttnn.Tensor
    o: ttnn.Tensor
    post_norm: ttnn.Tensor
    gate: ttnn.Tensor
    up: ttnn.Tensor
    down: ttnn.Tensor
    qkv_bias: ttnn.Tensor | None = None
    q_norm: ttnn.Tensor | None = None
    k_norm: ttnn.Tensor | None = None
    o_bias: ttnn.Tensor | None = None
    gate_bias: ttnn.Tensor | None = None
    up_bias: ttnn.Tensor | None = None
    down_bias: ttnn.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWeights:
    """Weights of a whole model on the chips of a lane.

    Attributes:
        embedding: (1, 1, num_vocab_padded / tp + 1, hidden) a chip, ROW_MAJOR bfloat16.
        layers: Weights of the layers, in order.
        final_norm: (1, 1, 1, hidden), whole on every chip.
        lm_head: (1, 1, hidden, num_vocab_padded / tp) a chip.
        num_vocab_padded: Vocabulary of all chips of the lane with the padding, which comes last.
    """

    embedding: ttnn.Tensor
    layers: tuple[TTLayerWeights, ...]
    final_norm: ttnn.Tensor
    lm_head: ttnn.Tensor
    num_vocab_padded: int


@dataclass(frozen=True, slots=True, eq=False)
class LaneTensor:
    """Recipe of one tensor of a lane.

    Attributes:
        name: Attribute of ``DeviceWeights``, or "layers.<i>." and one of ``TTLayerWeights``.
        dtype: Member of ttnn.
        is_tiled: Whether its layout is TILE, else ROW_MAJOR.
        shards: Function that returns each chip's shard, in order, in bfloat16.
    """

    name: str
    dtype: Dtype
    is_tiled: bool
    shards: Callable[[Fetch], Shards]

    @property
    def file_name(self) -> str:
        """Name of its file in a cache."""
        return f"{self.name}.tensorbin"

    def convert(self, fetch: Fetch, lane_shape: tuple[int, ...]) -> ttnn.Tensor:
        """Create the host tensor of all chips.

        Args:
            fetch: Function that returns a weight by its Hugging Face name.
            lane_shape: (1, tp).
        """
        dtype = getattr(ttnn, self.dtype)
        layout = ttnn.TILE_LAYOUT if self.is_tiled else ttnn.ROW_MAJOR_LAYOUT
        shards = [
            ttnn.from_torch(shard, dtype=dtype, layout=layout)
            for shard in self.shards(lambda name: fetch(name).to(torch.bfloat16))
        ]
        return ttnn.from_host_shards(shards, ttnn.MeshShape(*lane_shape))


def load_lane_weights(
    config: ModelConfig, mesh: TTMesh, lanes: Sequence[ttnn.MeshDevice], profile: Profile
) -> tuple[DeviceWeights, ...]:
    """Load a model onto every lane of a mesh, one tensor at a time.

    Converted weights are cached on disk; random ones are drawn each time.

    Args:
        config: The model; its ``name_or_path`` is the folder.
        mesh: Gives the load format, the seed of random weights, the cache folder
            (``settings.weight_cache``), and the callback for progress ("weights", fraction).
        lanes: Submeshes of one shape (1, tp).
        profile: Dtypes.

    Returns:
        The weights of each lane, in the order of ``lanes``.

    Raises:
        ConfigError: The model does not divide among ``tp`` chips; gives both numbers.
        ModelLoadError: The folder's weights are not those that the configuration implies.
        DeviceError: The device refused a tensor.
    """
    lane_shape = tuple(lanes[0].shape)
    tp = lanes[0].get_num_devices()
    check_lane(config, tp, max_rows=1, block_size=TILE)
    plan = lane_tensors(config, profile, tp)
    places = _weight_places(config, profile, chip_cores(lanes[0]), tp)
    place = partial(_place, config, mesh.progress, lanes, plan, places)
    if mesh.load_format == "random":
        fetch = random_source(expected_weights(config), mesh.seed)
        return place(lambda tensor: tensor.convert(fetch, lane_shape))
    cache = _cache(config, mesh.settings, profile, tp)
    try:
        files = cache and cache.read([tensor.file_name for tensor in plan])
        if files:
            return place(partial(_load, files))
    except DamagedCacheError as error:
        logger.warning("converting the weights again, as the cached ones are damaged: %s", error)
    folder, shapes = Path(config.name_or_path), expected_weights(config)
    source = open_safetensors(folder, shapes, config.quantization, unused_layers(config))
    with source as fetch, _writing(cache) as writer:
        return place(partial(_convert_and_keep, fetch, lane_shape, writer))


def lane_tensors(config: ModelConfig, profile: Profile, tp: int) -> tuple[LaneTensor, ...]:
    """Return the recipes of all tensors of a lane of ``tp`` chips.

    Args:
        config: The model; its sizes divide among the chips.
        profile: Dtypes.
        tp: Chips of the lane.
    """
    vocab = padded_vocab_size(config.vocab_size, tp) // tp
    embedding = "model.embed_tokens.weight"
    head = embedding if config.tie_word_embeddings else "lm_head.weight"
    vectors, matrices = profile.vector_dtype, profile.weight_dtype
    layers = (
        tensor
        for index in range(config.num_hidden_layers)
        for tensor in _layer_tensors(config, profile, tp, index)
    )
    return (
        LaneTensor("embedding", vectors, False, partial(_embedding, embedding, vocab, tp)),
        *layers,
        LaneTensor("final_norm", vectors, True, partial(_whole, "model.norm.weight", tp)),
        LaneTensor("lm_head", matrices, True, partial(_output_layer, head, vocab, tp)),
    )


def _layer_tensors(
    config: ModelConfig, profile: Profile, tp: int, index: int
) -> Iterator[LaneTensor]:
    prefix = f"model.layers.{index}."
    is_last = index == config.num_hidden_layers - 1
    dtypes = {name: profile.weight(name, is_last=is_last) for name in PRODUCTS}

    def vector(name: str, weight: str) -> LaneTensor:
        shards = partial(_whole, prefix + weight, tp)
        return LaneTensor(f"layers.{index}.{name}", profile.vector_dtype, True, shards)

    def columns(
        name: str, linears: Sequence[str], dtype: Dtype, bias: bool
    ) -> Iterator[LaneTensor]:
        names = [prefix + linear for linear in linears]
        shards = partial(_columns, [f"{linear}.weight" for linear in names], tp)
        yield LaneTensor(f"layers.{index}.{name}", dtype, True, shards)
        if bias:
            shards = partial(_columns, [f"{linear}.bias" for linear in names], tp)
            yield LaneTensor(f"layers.{index}.{name}_bias", profile.vector_dtype, True, shards)

    def rows(name: str, linear: str, dtype: Dtype, bias: bool) -> Iterator[LaneTensor]:
        shards = partial(_rows, f"{prefix}{linear}.weight", tp)
        yield LaneTensor(f"layers.{index}.{name}", dtype, True, shards)
        if bias:
            yield vector(f"{name}_bias", f"{linear}.bias")

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    yield vector("input_norm", "input_layernorm.weight")
    yield from columns("qkv", qkv, dtypes["qkv"], config.qkv_bias)
    if config.qk_norm:
        yield vector("q_norm", "self_attn.q_norm.weight")
        yield vector("k_norm", "self_attn.k_norm.weight")
    yield from rows("o", "self_attn.o_proj", dtypes["o"], config.o_bias)
    yield vector("post_norm", "post_attention_layernorm.weight")
    yield from columns("gate", ["mlp.gate_proj"], dtypes["gate"], config.mlp_bias)
    yield from columns("up", ["mlp.up_proj"], dtypes["up"], config.mlp_bias)
    yield from rows("down", "mlp.down_proj", dtypes["down"], config.mlp_bias)


# ---- what each chip gets; Hugging Face matrices are (out, in)


def _whole(name: str, tp: int, fetch: Fetch) -> Shards:
    vector = fetch(name)
    for _ in range(tp):
        yield vector.reshape(1, 1, 1, -1)


def _columns(names: Sequence[str], tp: int, fetch: Fetch) -> Shards:
    """Return each chip's columns of several matrices or biases, concatenated."""
    parts = [fetch(name).chunk(tp) for name in names]
    for chip in range(tp):
        joined = torch.cat([part[chip] for part in parts]) if len(parts) > 1 else parts[0][chip]
        yield joined.T[None, None] if joined.ndim == 2 else joined.reshape(1, 1, 1, -1)


def _rows(name: str, tp: int, fetch: Fetch) -> Shards:
    for part in fetch(name).chunk(tp, dim=1):
        yield part.T[None, None]


def _embedding(name: str, vocab: int, tp: int, fetch: Fetch) -> Shards:
    weight = fetch(name)
    for chip in range(tp):
        yield _padded(weight[chip * vocab : (chip + 1) * vocab], vocab + 1)[None, None]


def _output_layer(name: str, vocab: int, tp: int, fetch: Fetch) -> Shards:
    weight = fetch(name)
    for chip in range(tp):
        yield _padded(weight[chip * vocab : (chip + 1) * vocab], vocab).T[None, None]


def _padded(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    missing = num_rows - len(rows)
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


# ---- onto the device


def _place(
    config: ModelConfig,
    progress: Callable[[str, float], None] | None,
    lanes: Sequence[ttnn.MeshDevice],
    plan: Sequence[LaneTensor],
    places: Mapping[str, ttnn.MemoryConfig],
    host_tensor: Callable[[LaneTensor], ttnn.Tensor],
) -> tuple[DeviceWeights, ...]:
    placed: list[dict[str, ttnn.Tensor]] = [{} for _ in lanes]
    for index, tensor in enumerate(plan):
        host = host_tensor(tensor)
        where = places.get(tensor.name.rpartition(".")[2], ttnn.DRAM_MEMORY_CONFIG)
        for lane, tensors in zip(lanes, placed, strict=True):
            tensors[tensor.name] = _to_device(tensor, host, lane, where)
        del host  # or it would stay until the next one is there
        if progress is not None:
            progress("weights", (index + 1) / len(plan))
    tp = lanes[0].get_num_devices()
    return tuple(_assemble(config, tensors, tp) for tensors in placed)


def _weight_places(
    config: ModelConfig, profile: Profile, chip: ChipCores, tp: int
) -> dict[str, ttnn.MemoryConfig]:
    """Return the memory configurations of a layer's weights that are stored in stripes."""
    sizes = product_sizes(config, tp)
    return {
        name: striped(*sizes[name], chip.dram_banks)
        for name, product in lane_programs(config, profile, chip, tp).decode.items()
        if isinstance(product, BankProduct)
    }


def _to_device(
    tensor: LaneTensor, host: ttnn.Tensor, lane: ttnn.MeshDevice, where: ttnn.MemoryConfig
) -> ttnn.Tensor:
    try:
        return ttnn.to_device(host, lane, memory_config=where)
    except RuntimeError as error:
        raise DeviceError(
            f"the device rejected weight {tensor.name}, {tensor.dtype} of shape "
            f"{tuple(host.shape)} on each chip; use a mesh with more memory or chips: "
            f"{ttnn_message(error)}"
        ) from error


def _assemble(config: ModelConfig, tensors: Mapping[str, ttnn.Tensor], tp: int) -> DeviceWeights:
    def layer(index: int) -> TTLayerWeights:
        names = (field.name for field in fields(TTLayerWeights))
        found = {name: tensors.get(f"layers.{index}.{name}") for name in names}
        return TTLayerWeights(**found)

    return DeviceWeights(
        embedding=tensors["embedding"],
        layers=tuple(layer(index) for index in range(config.num_hidden_layers)),
        final_norm=tensors["final_norm"],
        lm_head=tensors["lm_head"],
        num_vocab_padded=padded_vocab_size(config.vocab_size, tp),
    )


# ---- cache


def _cache(
    config: ModelConfig, settings: MeshConfig, profile: Profile, tp: int
) -> WeightCache | None:
    """Return the location of a conversion; None if the user has no folder for caches."""
    model = Path(config.name_or_path)
    version = importlib.metadata.version("ttnn")
    source = conversion_source(EngineConfig(model=str(model)))
    digest = hashlib.blake2b(digest_size=12)
    digest.update(repr((_FORMAT, *source, asdict(profile), tp, version)).encode())
    folder = settings.weight_cache_folder
    if folder is None:
        logger.warning("converted weights are not cached: %s, or set mesh.weight_cache", NO_HOME)
        return None
    return WeightCache(folder / f"{model.name}-{profile.name}-tp{tp}-{digest.hexdigest()}")


@contextmanager
def _writing(cache: WeightCache | None) -> Iterator[CacheWriter | None]:
    if cache is None:
        yield None
        return
    with cache.writing() as writer:
        yield writer


def _load(files: CachedFiles, tensor: LaneTensor) -> ttnn.Tensor:
    path = files.path(tensor.file_name)
    try:
        return ttnn.load_tensor(str(path))
    except RuntimeError as error:
        raise DamagedCacheError(f"{path}: {error}") from error


def _convert_and_keep(
    fetch: Fetch, lane_shape: tuple[int, ...], writer: CacheWriter | None, tensor: LaneTensor
) -> ttnn.Tensor:
    host = tensor.convert(fetch, lane_shape)
    if writer is not None:
        writer.put(tensor.file_name, lambda path: ttnn.dump_tensor(str(path), host))
    return host
