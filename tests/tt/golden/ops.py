"""The golden kit's ops: ttnn's own golden functions where they can be used, else torch.

Every op is written from its documentation in ttnn, not from its use in a model. A call that the
documentation forbids raises GoldenError, and so does an undocumented keyword.
Host functions (`from_torch`, `to_layout`, ...) are here as well.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading

import torch
import ttnn

from tests.tt.golden.packing import PackedTensor
from tests.tt.golden.tensors import (
    FLOATS,
    FROM_TORCH,
    INTEGERS,
    TILE,
    GoldenDevice,
    GoldenError,
    GoldenSemaphore,
    GoldenTensor,
    require,
    round_to,
    to_torch,
)

OPS = {}
"""Dotted name below ttnn -> function."""

TILED, ROW_MAJOR = ttnn.TILE_LAYOUT, ttnn.ROW_MAJOR_LAYOUT

POISON = threading.local()
"""`value`: content of memory that an op leaves unwritten on the device; zero if not set."""


def poison():
    return getattr(POISON, "value", 0.0)


def op(*names):
    def register(function):
        for name in names:
            OPS[name] = function
        return function

    return register


@functools.cache
def golden(name):
    """ttnn's own golden function of an op."""
    return ttnn.get_golden_function(functools.reduce(getattr, name.split("."), ttnn))


# ---- checks


def on_device(*tensors):
    devices = {tensor.device() for tensor in tensors if tensor is not None}
    if len(devices) != 1 or None in devices:
        raise GoldenError(f"operands on {devices}")


def in_layout(layout, *tensors):
    for tensor in tensors:
        if tensor is not None and tensor.layout != layout:
            raise GoldenError(f"{tensor} is not in {layout.name}")


def in_dtypes(dtypes, *tensors):
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in dtypes:
            raise GoldenError(f"{tensor} has none of the dtypes {[each.name for each in dtypes]}")


def replicated_ints(tensor):
    """The integers of every chip, as int64."""
    return [shard.to(torch.int64) for shard in tensor.shards]


def store(result, output_tensor):
    """Write a result into a preallocated tensor, if there is one."""
    if output_tensor is None:
        return result
    require(
        list(output_tensor.shape) == list(result.shape) and output_tensor.dtype == result.dtype,
        f"{result} does not fit {output_tensor}",
    )
    for target, source in zip(output_tensor.shards, result.shards, strict=True):
        target.copy_(source)
    return output_tensor


# ---- mappers and composers


class Replicate:
    def __init__(self, device):
        self.device = device

    def split(self, tensor):
        return [tensor.clone() for _ in self.device.chips]


class Shard:
    def __init__(self, device, dim):
        self.device, self.dim = device, dim

    def split(self, tensor):
        count = len(self.device.chips)
        require(tensor.shape[self.dim] % count == 0, f"{tuple(tensor.shape)} over {count} chips")
        return [part.clone() for part in tensor.chunk(count, dim=self.dim)]


class Concat:
    def __init__(self, device, dim):
        self.dim = dim

    def join(self, parts):
        return torch.cat(parts, dim=self.dim)


op("ReplicateTensorToMesh")(Replicate)
op("ShardTensorToMesh")(Shard)
op("ConcatMeshToTensor")(Concat)
op("Tensor")(GoldenTensor)
op("MeshDevice")(GoldenDevice)


# ---- host and transfers


@op("from_torch")
def from_torch(
    tensor,
    dtype=None,
    *,
    layout=None,
    device=None,
    memory_config=None,
    mesh_mapper=None,
    pad_value=None,
):
    dtype = dtype or FROM_TORCH[tensor.dtype]
    layout = layout or (TILED if dtype == ttnn.bfloat8_b else ROW_MAJOR)
    if tensor.dtype.is_floating_point and dtype in INTEGERS:
        tensor = tensor.trunc()
    values = round_to(tensor.detach(), dtype)
    mapper = mesh_mapper or (Replicate(device) if device is not None else None)
    # A tensor without a mapper is replicated on all chips.
    shards = mapper.split(values) if mapper else [values.clone()]
    result = GoldenTensor(shards, dtype, layout, memory_config)
    return result if device is None else to_device(result, device, memory_config)


@op("to_torch")
def host_to_torch(tensor, dtype=None, *, mesh_composer=None, device=None, cq_id=None):
    if mesh_composer is None:
        require(
            len(tensor.shards) == 1,
            "a tensor of several chips needs a mesh composer",
        )
        joined = tensor.shards[0]
    else:
        joined = mesh_composer.join(list(tensor.shards))
    joined = to_torch(joined, tensor.dtype).clone()
    return joined if dtype is None else joined.to(dtype)


@op("to_device")
def to_device(tensor, device, memory_config=None, *, cq_id=None):
    if tensor.device() is device:
        return tensor
    require(tensor.device() is None, f"{tensor} is on another device")
    shards = tensor.shards
    if len(shards) == 1:
        shards = shards * len(device.chips)
    require(len(shards) == len(device.chips), f"{tensor} has {len(shards)} shards for {device}")
    return GoldenTensor(
        [shard.clone() for shard in shards],
        tensor.dtype,
        tensor.layout,
        memory_config or tensor.memory_config(),
        device,
    )


@op("from_device")
def from_device(tensor, *, blocking=True, cq_id=None, queue_id=None):
    host = tensor.cpu()
    host.mesh_shape = tensor.device().shape
    if not blocking:
        tensor.device().delay(host)
    return host


@op("copy_host_to_device_tensor")
def copy_host_to_device_tensor(host_tensor, device_tensor, cq_id=None):
    require(host_tensor.device() is None, f"{host_tensor} is not on the host")
    require(device_tensor.device() is not None, f"{device_tensor} is not on a device")
    for name in ("shape", "dtype", "layout"):
        given, wanted = getattr(host_tensor, name), getattr(device_tensor, name)
        require(given == wanted, f"{name} {given} copied to {wanted}")
    sources = host_tensor.shards
    targets = device_tensor.shards
    if len(sources) == 1:
        sources = sources * len(targets)
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


@op("allocate_tensor_on_device")
def allocate_tensor_on_device(shape, dtype, layout, device, memory_config=None):
    return _unwritten(list(shape), dtype, layout, device, memory_config)


@op("allocate_tensor_on_host")
def allocate_tensor_on_host(shape, dtype, layout, device, memory_config=None):
    value = poison() if dtype in FLOATS else 0.0
    shards = [_filled(shape, value, dtype, layout, None, None).shards[0] for _ in device.chips]
    return PackedTensor(GoldenTensor(shards, dtype, layout), device.shape)


@op("get_device_tensors")
def get_device_tensors(tensor):
    chips = [None] * len(tensor.shards)
    if tensor.device() is not None:
        chips = [
            GoldenDevice((1, 1), [chip], tensor.device().programs) for chip in tensor.device().chips
        ]
    return [
        GoldenTensor(
            [shard], tensor.dtype, tensor.layout, tensor.memory_config(), chip, tensor._allocation
        )
        for shard, chip in zip(tensor.shards, chips, strict=True)
    ]


@op("from_host_shards")
def from_host_shards(tensors, mesh_shape=None, *_):
    first = tensors[0]
    require(all(tensor.device() is None for tensor in tensors), "shards of a host tensor only")
    require(mesh_shape is None or math.prod(list(mesh_shape)) == len(tensors), f"{mesh_shape}")
    return GoldenTensor(
        [shard for tensor in tensors for shard in tensor.shards], first.dtype, first.layout
    )


@op("deallocate")
def deallocate(tensor, force=True):
    tensor.deallocate(force)


@op("dump_tensor")
def dump_tensor(file_name, tensor, **_):
    require(tensor.device() is None, "dump_tensor takes host tensors")
    torch.save(
        {"shards": list(tensor.shards), "dtype": tensor.dtype.name, "layout": tensor.layout.name},
        file_name,
    )


@op("load_tensor")
def load_tensor(file_name, *, device=None):
    try:
        saved = torch.load(file_name, weights_only=True)
    except Exception as error:
        raise RuntimeError(f"{file_name} is not a tensor") from error
    names = {dtype.name: dtype for dtype in (*FLOATS, *INTEGERS)}
    layout = TILED if saved["layout"] == TILED.name else ROW_MAJOR
    tensor = GoldenTensor(saved["shards"], names[saved["dtype"]], layout)
    return tensor if device is None else to_device(tensor, device)


@op("record_event")
def record_event(device, cq_id=0):
    return device.record_event()


@op("event_synchronize")
def event_synchronize(event):
    event()


@op("begin_trace_capture", "end_trace_capture", "execute_trace", "release_trace")
def no_traces(*_, **__):
    require(False, "the golden kit has no traces")


# ---- shapes


@op("reshape", "experimental.view")
def reshape(tensor, shape, padded_shape=None, *, memory_config=None, pad_value=None, **_):
    shape = list(shape)
    if padded_shape is not None:
        require(tensor.layout == TILED, "only tiles are padded")
        require(list(tensor.padded_shape) == list(padded_shape), f"{tensor} is not {padded_shape}")
        require(shape[:2] == list(padded_shape)[:2], f"{shape} of {padded_shape}")
        return tensor.view([shard[:, :, : shape[2], : shape[3]] for shard in tensor.shards])
    shards = [shard.reshape(shape) for shard in tensor.shards]
    # Where a row, or a tile's two dims, stay as they are, the same memory gets another shape.
    kept = -1 if tensor.layout == ROW_MAJOR else slice(-2, None)
    is_view = list(tensor.shape)[kept] == list(shards[0].shape)[kept]
    is_view = is_view or (
        tensor.layout == TILED
        and tensor.shape[-1] == shards[0].shape[-1]
        and tensor.shape[-2] % TILE == 0
        and shards[0].shape[-2] % TILE == 0
    )
    if is_view and memory_config in (None, tensor.memory_config()):
        return tensor.view([shard.view(shape) for shard in tensor.shards])
    return tensor.like([shard.clone() for shard in shards], memory_config=memory_config)


@op("narrow")
def narrow(tensor, dim, start, length):
    """A view of neighbouring rows, which must begin in the first DRAM bank."""
    on_device(tensor)
    require(dim == 0 and tensor.layout == TILED, "rows of tiles only")
    shape = list(tensor.shape)
    grid = tensor.device().dram_grid_size()
    pages = start * math.prod(shape[1:]) // (TILE * TILE)
    require(pages % (grid.x * grid.y) == 0, f"row {start} does not begin in the first bank")
    require(start + length <= shape[0], f"rows {start} to {start + length} of {tensor}")
    return tensor.view([shard[start : start + length] for shard in tensor.shards])


@op("close_mesh_device")
def close_mesh_device(device):
    require(not device.is_closed, f"{device} is closed already")
    device.is_closed = True


@op("set_fabric_config")
def set_fabric_config(*_, **__):
    pass


@op("slice")
def slice_(
    tensor,
    slice_start,
    slice_end,
    slice_step=None,
    *,
    memory_config=None,
    output_tensor=None,
    slice_dim=None,
    num_devices=None,
):
    if isinstance(slice_start, GoldenTensor):
        require(slice_step is None and output_tensor is None, "not in the golden kit")
        return _piece(tensor, slice_start, slice_end, slice_dim, num_devices, memory_config)
    starts, ends = list(slice_start), list(slice_end)
    steps = [1] * len(starts) if slice_step is None else list(slice_step)
    require(len(starts) == len(tensor.shape) == len(ends), f"{starts} to {ends} of {tensor}")
    for start, end, size in zip(starts, ends, tensor.shape, strict=True):
        require(0 <= start < size and start < end <= size, f"{starts} to {ends} of {tensor}")
    require(tensor.dtype != ttnn.bfloat8_b or set(steps) == {1}, "no steps in bfloat8_b")
    if not any(starts) and ends == list(tensor.shape) and set(steps) == {1}:
        return tensor
    parts = [golden("slice")(shard, starts, ends, steps).clone() for shard in tensor.shards]
    return store(tensor.like(parts, memory_config=memory_config), output_tensor)


def _piece(tensor, start, end, dim, num_pieces, memory_config):
    """One of so many equal pieces of a dim; where it begins is a tensor on the device."""
    on_device(tensor, start, end)
    in_layout(ROW_MAJOR, start, end)
    in_dtypes([ttnn.uint32, ttnn.int32], start, end)
    size = tensor.shape[dim]
    require(size % num_pieces == 0, f"{tensor} in {num_pieces} pieces of dim {dim}")
    shards = []
    for shard, first, last in zip(
        tensor.shards, replicated_ints(start), replicated_ints(end), strict=True
    ):
        starts, ends = first.tolist(), last.tolist()
        require(ends[dim] - starts[dim] == size // num_pieces, f"{starts} to {ends} of {tensor}")
        require(tensor.layout == ROW_MAJOR or starts[dim] % TILE == 0, f"{starts} within a tile")
        shards.append(golden("slice")(shard, starts, ends, [1] * len(starts)).clone())
    return tensor.like(shards, memory_config=memory_config)


@op("concat")
def concat(tensors, dim=0, *, memory_config=None, output_tensor=None):
    first = tensors[0]
    if len(tensors) == 1:
        return first
    in_dtypes([first.dtype], *tensors)
    in_layout(first.layout, *tensors)
    shards = [
        golden("concat")(list(parts), dim)
        for parts in zip(*(tensor.shards for tensor in tensors), strict=True)
    ]
    return store(first.like(shards, memory_config=memory_config), output_tensor)


@op("pad")
def pad(tensor, padding, value=0.0, *, use_multicore=True, memory_config=None):
    """`padding` is (before, after) of each dim, as ttnn has it; torch has the last dim first."""
    pairs = [tuple(pair) for pair in padding]
    pairs = [(0, 0)] * (len(tensor.shape) - len(pairs)) + pairs
    require(
        tensor.layout == ROW_MAJOR or all(before == 0 for before, _ in pairs),
        "tiles are padded behind only",
    )
    flat = list(itertools.chain(*reversed(pairs)))
    shards = [torch.nn.functional.pad(shard, flat, value=value) for shard in tensor.shards]
    return tensor.like(shards, memory_config=memory_config)


def _in_layout(tensor, layout, dtype, memory_config):
    if tensor.layout == layout and dtype in (None, tensor.dtype):
        return tensor
    if layout == ROW_MAJOR and tensor.dtype == ttnn.bfloat8_b:
        dtype = dtype or ttnn.bfloat16
    shards = [shard.clone() for shard in tensor.shards]
    return tensor.like(shards, dtype, layout, memory_config)


@op("to_layout")
def to_layout(tensor, layout, dtype=None, *, memory_config=None, pad_value=None):
    return _in_layout(tensor, layout, dtype, memory_config)


@op("to_memory_config")
def to_memory_config(tensor, memory_config, dtype=None, *, output_tensor=None):
    on_device(tensor)
    if tensor.memory_config() == memory_config and dtype in (None, tensor.dtype):
        return tensor
    shards = [shard.clone() for shard in tensor.shards]
    return store(tensor.like(shards, dtype, memory_config=memory_config), output_tensor)


@op("typecast")
def typecast(tensor, dtype, *, memory_config=None, output_tensor=None):
    # The golden function asks the host's bfloat8_b packer, which the device's differs from in
    # ties; ours is the device's. Integers of floats are as the golden function has them.
    shards = [shard.clone() for shard in tensor.shards]
    if tensor.dtype in FLOATS and dtype in INTEGERS:
        cast = golden("typecast")
        shards = [
            cast(shard, dtype, _ttnn_input_dtype=tensor.dtype, _ttnn_arch_name="wormhole_b0").to(
                torch.int64
            )
            for shard in shards
        ]
    return store(tensor.like(shards, dtype, memory_config=memory_config), output_tensor)


# ---- new tensors


def _filled(shape, value, dtype, layout, device, memory_config):
    dtype = dtype or ttnn.bfloat16
    layout = layout or (TILED if dtype == ttnn.bfloat8_b else ROW_MAJOR)
    filled = round_to(torch.full(list(shape), value, dtype=torch.float32), dtype)
    host = GoldenTensor([filled], dtype, layout, memory_config)
    return host if device is None else to_device(host, device, memory_config)


@op("zeros")
def zeros(shape, dtype=None, layout=None, device=None, memory_config=None):
    return _filled(shape, 0.0, dtype, layout, device, memory_config)


def _unwritten(shape, dtype=None, layout=None, device=None, memory_config=None):
    tensor = _filled(shape, 0.0, dtype, layout, device, memory_config)
    if tensor.dtype in FLOATS:
        for shard in tensor.shards:
            shard.fill_(poison())
    return tensor


# ---- arithmetic


def _binary(name):
    def binary(
        a,
        b,
        *,
        dtype=None,
        memory_config=None,
        output_tensor=None,
        activations=None,
        input_tensor_a_activations=None,
        input_tensor_b_activations=None,
    ):
        operands = [tensor for tensor in (a, b) if isinstance(tensor, GoldenTensor)]
        on_device(*operands)
        settings = {
            "activations": activations,
            "input_tensor_a_activations": input_tensor_a_activations,
            "input_tensor_b_activations": input_tensor_b_activations,
        }
        given = {key: value for key, value in settings.items() if value}
        others = b.shards if isinstance(b, GoldenTensor) else itertools.repeat(b)
        shards = [golden(name)(x, y, **given) for x, y in zip(a.shards, others, strict=False)]
        return store(a.like(shards, dtype, memory_config=memory_config), output_tensor)

    return binary


for _name in ("add", "subtract", "mul", "lt", "ge", "logical_or"):
    op(_name)(_binary(_name))


@op("where")
def where(predicate, true_value, false_value, *, memory_config=None, output_tensor=None):
    operands = [x for x in (true_value, false_value) if isinstance(x, GoldenTensor)]
    on_device(predicate, *operands)

    def of_chip(value, chip):
        return value.shards[chip] if isinstance(value, GoldenTensor) else value

    shards = [
        torch.where(mask != 0, of_chip(true_value, chip), of_chip(false_value, chip))
        for chip, mask in enumerate(predicate.shards)
    ]
    like = operands[0] if operands else predicate
    return store(like.like(shards, memory_config=memory_config), output_tensor)


def _reduction(name):
    def reduce(tensor, dim=None, keepdim=False, *, memory_config=None, compute_kernel_config=None):
        on_device(tensor)
        shards = [golden(name)(shard, dim=dim, keepdim=keepdim) for shard in tensor.shards]
        return tensor.like(shards, memory_config=memory_config)

    return reduce


for _name in ("max", "min"):
    op(_name)(_reduction(_name))


@op("plus_one")
def plus_one(tensor, *, sub_core_grids=None, skip_negative_entries=False):
    on_device(tensor)
    in_layout(ROW_MAJOR, tensor)
    in_dtypes([ttnn.int32, ttnn.uint32], tensor)
    for shard in tensor.shards:
        golden("plus_one")(shard, skip_negative_entries=skip_negative_entries)
        shard.copy_(round_to(shard, tensor.dtype))
    return tensor


@op("rms_norm")
def rms_norm(
    tensor,
    *,
    epsilon=1e-12,
    weight=None,
    bias=None,
    residual_input_tensor=None,
    memory_config=None,
    program_config=None,
    compute_kernel_config=None,
):
    on_device(tensor, *filter(None, (weight, bias, residual_input_tensor)))
    in_layout(TILED, tensor, residual_input_tensor)
    in_dtypes([ttnn.bfloat16, ttnn.float32], weight, bias)
    require(bias is None and residual_input_tensor is None, "not in the golden kit")
    weights = [None] * len(tensor.shards)
    if weight is not None:
        width = tensor.shape[-1]
        require(weight.logical_volume() == width, f"a weight {weight} for rows of {width}")
        # Row-major weights are (..., width / 32, 32), which the golden function takes for rows.
        weights = [shard.reshape(-1) for shard in weight.shards]
    shards = [
        golden("rms_norm")(shard, scale, epsilon=epsilon)
        for shard, scale in zip(tensor.shards, weights, strict=True)
    ]
    return tensor.like(shards, memory_config=memory_config)


@op("linear")
def linear(
    a,
    b,
    *,
    bias=None,
    transpose_a=False,
    transpose_b=False,
    memory_config=None,
    dtype=None,
    program_config=None,
    activation=None,
    compute_kernel_config=None,
    core_grid=None,
):
    on_device(a, b, *filter(None, [bias]))
    in_layout(TILED, a, b, bias)
    in_dtypes(FLOATS, a, b, bias)
    require(bias is None or bias.shape[-2] == 1, f"bias {bias} is no row")
    biases = itertools.repeat(None) if bias is None else bias.shards
    shards = [
        golden("linear")(
            x,
            y,
            transpose_a,
            transpose_b,
            bias=z,
            activation=activation,
            program_config=program_config,
        )
        for x, y, z in zip(a.shards, b.shards, biases, strict=False)
    ]
    return a.like(shards, dtype, memory_config=memory_config or ttnn.DRAM_MEMORY_CONFIG)


@op("embedding")
def embedding(
    indices, weight, *, padding_idx=None, layout=None, dtype=None, memory_config=None, **_
):
    on_device(indices, weight)
    in_dtypes([ttnn.uint32, ttnn.bfloat16], indices)
    in_dtypes([ttnn.bfloat16], weight)
    num_rows = weight.shape[-2]
    shards = []
    for ids, table in zip(replicated_ints(indices), weight.shards, strict=True):
        if not 0 <= ids.min() <= ids.max() < num_rows:
            raise GoldenError(f"ids {ids} of {num_rows} rows")
        # The golden function does not know tables that are (1, 1, rows, columns).
        rows = table.reshape(num_rows, -1)
        shards.append(golden("embedding")(ids.reshape(ids.shape[0], -1), rows))
    return weight.like(shards, dtype, layout or weight.layout, memory_config)


# ---- attention


def _repack(heads, tensor, memory_config):
    memory_config = memory_config or tensor.memory_config()
    return tuple(
        tensor.like([head.contiguous() for head in shards], memory_config=memory_config)
        for shards in zip(*heads, strict=True)
    )


@op("experimental.nlp_create_qkv_heads")
def nlp_create_qkv_heads(
    tensor,
    tensor_kv=None,
    *,
    num_heads,
    num_kv_heads=None,
    transpose_k_heads=True,
    memory_config=None,
):
    """[B, 1, S, (heads + 2 KV heads) * d] -> [B, heads, S, d] and twice [B, KV heads, S, d]."""
    require(tensor_kv is None, "not in the golden kit")
    on_device(tensor)
    in_layout(TILED, tensor)
    num_kv_heads = num_kv_heads or num_heads
    batch, one, length, width = list(tensor.shape)
    require(one == 1 and width % (num_heads + 2 * num_kv_heads) == 0, f"{tensor} has no such heads")
    head_dim = width // (num_heads + 2 * num_kv_heads)
    require(head_dim % TILE == 0, f"heads of {head_dim} are no whole tiles")
    heads = []
    for shard in tensor.shards:
        rows = shard.view(batch, length, -1, head_dim).transpose(1, 2)
        q, k, v = rows.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        heads.append((q, k.transpose(2, 3) if transpose_k_heads else k, v))
    return _repack(heads, tensor, memory_config)


@op("experimental.nlp_create_qkv_heads_decode")
def nlp_create_qkv_heads_decode(
    tensor,
    *,
    num_heads,
    num_kv_heads=None,
    overlap_qk_coregrid=True,
    batch_offset=None,
    slice_size=None,
    memory_config=None,
):
    """[1, 1, B, (heads + 2 KV heads) * d] -> [1, B, heads, d] and twice [1, B, KV heads, d]."""
    require(batch_offset is None and slice_size is None, "not in the golden kit")
    on_device(tensor)
    in_layout(TILED, tensor)
    in_dtypes([ttnn.bfloat16, ttnn.float32], tensor)
    num_kv_heads = num_kv_heads or num_heads
    first, second, batch, width = list(tensor.shape)
    require(first == second == 1 and batch <= TILE, f"{tensor} is no batch of up to 32 tokens")
    require(num_heads <= TILE, f"{num_heads} heads")
    require(width % (num_heads + 2 * num_kv_heads) == 0, f"{tensor} has no such heads")
    head_dim = width // (num_heads + 2 * num_kv_heads)
    require(head_dim % TILE == 0, f"heads of {head_dim} are no whole tiles")
    require(memory_config is None or memory_config.is_sharded(), "the heads are height-sharded")
    require(overlap_qk_coregrid or tensor.is_sharded(), f"{tensor} is not in shards of heads")
    heads = [
        shard.view(1, batch, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], dim=2)
        for shard in tensor.shards
    ]
    return _repack(heads, tensor, memory_config or ttnn.L1_HEIGHT_SHARDED_MEMORY_CONFIG)


@op("experimental.nlp_concat_heads")
def nlp_concat_heads(tensor, *, memory_config=None):
    """[B, heads, S, d] -> [B, 1, S, heads * d]."""
    on_device(tensor)
    in_layout(TILED, tensor)
    batch, _, length, _ = list(tensor.shape)
    shards = [shard.transpose(1, 2).reshape(batch, 1, length, -1) for shard in tensor.shards]
    return tensor.like(shards, memory_config=memory_config)


@op("experimental.nlp_concat_heads_decode")
def nlp_concat_heads_decode(tensor, *, num_heads, memory_config=None, **_):
    """[1, B, heads padded to 32, d] -> [1, 1, B padded to 32, heads * d], a core for each head."""
    on_device(tensor)
    in_layout(TILED, tensor)
    require(tensor.is_sharded(), f"{tensor} is not height-sharded")
    one, batch, rows, head_dim = list(tensor.shape)
    require(one == 1 and batch <= TILE and num_heads <= rows, f"{num_heads} heads of {tensor}")
    require(memory_config is None, "not in the golden kit")
    grid = tensor.device().compute_with_storage_grid_size()
    cores = ttnn.num_cores_to_corerangeset(num_heads, grid, row_wise=True)
    where = ttnn.MemoryConfig(
        ttnn.TensorMemoryLayout.WIDTH_SHARDED,
        ttnn.BufferType.L1,
        ttnn.ShardSpec(cores, [TILE, head_dim], ttnn.ShardOrientation.ROW_MAJOR),
    )
    shards = []
    for shard in tensor.shards:
        flat = shard[:, :, :num_heads].reshape(1, 1, batch, -1)
        shards.append(torch.nn.functional.pad(flat, (0, 0, 0, TILE - batch), value=poison()))
    return tensor.like(shards, memory_config=where)


@op("experimental.rotary_embedding_hf")
def rotary_embedding_hf(
    tensor, cos, sin, *, is_decode_mode=False, memory_config=None, compute_kernel_config=None
):
    """Channel i is paired with i + d/2.

    Prefill: [1, heads, S, d] with [1, 1, S, d]; decode: [1, B, heads, d] with [1, B, 1, d].
    """
    on_device(tensor, cos, sin)
    in_layout(TILED, tensor, cos, sin)
    shape, head_dim = list(tensor.shape), tensor.shape[-1]
    require(head_dim == TILE or head_dim % (2 * TILE) == 0, f"heads of {head_dim}")
    rows = [1, shape[1], 1, head_dim] if is_decode_mode else [1, 1, shape[2], head_dim]
    require(shape[0] == 1, f"{tensor} is a batch")
    for table in (cos, sin):
        given = list(table.shape)
        if not is_decode_mode:  # a cache may be longer than the chunk
            require(given[2] >= rows[2], f"{table} for {tensor}")
            given[2] = rows[2]
        require(given == rows, f"{table} for {tensor}")
        require(not is_decode_mode or table.is_sharded(), f"{table} is not height-sharded")
    require(not is_decode_mode or tensor.is_sharded(), f"{tensor} is not height-sharded")
    shards = []
    for x, c, s in zip(tensor.shards, cos.shards, sin.shards, strict=True):
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat((-second, first), dim=-1)
        shards.append(x * c[:, :, : rows[2]] + rotated * s[:, :, : rows[2]])
    return tensor.like(shards, memory_config=memory_config)


def _check_cache(cache, heads, head_dim):
    require(list(cache.shape)[1] == heads, f"{heads} KV heads for {cache}")
    require(list(cache.shape)[3] == head_dim, f"heads of {head_dim} for {cache}")
    require(cache.shape[2] % TILE == 0, f"blocks of {cache.shape[2]} tokens")
    in_layout(TILED, cache)


def _check_table(table):
    in_layout(ROW_MAJOR, table)
    in_dtypes([ttnn.int32], table)
    require(len(table.shape) == 2, f"{table} is no page table")


def _page(table, row, position, cache):
    """(block, row within it) of a position; raises outside of the table and of the cache."""
    num_blocks, _, block_size, _ = cache.shards[0].shape
    column = position // block_size
    if not 0 <= column < table.shape[1]:
        raise GoldenError(f"position {position} in {table.shape[1]} blocks")
    block = int(table[row, column])
    if not 0 <= block < num_blocks:
        raise GoldenError(f"block {block} of {num_blocks}")
    return block, position % block_size


@op("experimental.paged_fill_cache")
def paged_fill_cache(
    cache, tensor, page_table, *, batch_idx_tensor=None, batch_idx=0, compute_kernel_config=None
):
    """A raw copy of whole tiles of [B, KV heads, S, d], through the page table's row."""
    on_device(cache, tensor, page_table, *filter(None, [batch_idx_tensor]))
    in_layout(TILED, tensor)
    require(cache.dtype == tensor.dtype, f"{tensor} does not have the dtype of {cache}")
    _check_table(page_table)
    batch, heads, length, head_dim = list(tensor.shape)
    _check_cache(cache, heads, head_dim)
    require(batch_idx_tensor is not None or batch == 1, f"{tensor} with one batch_idx")
    capacity = page_table.shape[1] * cache.shape[2]
    require(length <= capacity, f"{length} tokens for {capacity} of the page table")
    rows = [[batch_idx]] * len(tensor.shards)
    if batch_idx_tensor is not None:
        rows = [ids.reshape(-1).tolist() for ids in replicated_ints(batch_idx_tensor)]
    # The rest of the last tile is copied too, with any content.
    rest = -length % TILE
    for chip, table in enumerate(replicated_ints(page_table)):
        tiles = torch.nn.functional.pad(
            tensor.shards[chip], (0, 0, 0, rest), value=poison() if rest else 0.0
        )
        for source, row in zip(tiles, rows[chip], strict=True):
            require(0 <= row < len(table), f"row {row} of {page_table}")
            for start in range(0, length + rest, TILE):
                block, offset = _page(table, row, start, cache)
                cache.shards[chip][block, :, offset : offset + TILE] = source[
                    :, start : start + TILE
                ]
    return cache


@op("experimental.paged_update_cache")
def paged_update_cache(
    cache,
    tensor,
    *,
    update_idxs=(),
    update_idxs_tensor=None,
    share_cache=None,
    page_table=None,
    batch_offset=0,
    compute_kernel_config=None,
):
    """One token of each row of [1, B, KV heads, d], where its position is not -1."""
    require(not update_idxs and update_idxs_tensor is not None, "the golden kit takes tensors")
    require(page_table is not None and not batch_offset and not share_cache, "paged caches only")
    on_device(cache, tensor, update_idxs_tensor, page_table)
    in_layout(TILED, tensor)
    in_layout(ROW_MAJOR, update_idxs_tensor)
    in_dtypes([ttnn.bfloat16, ttnn.float32], tensor)
    in_dtypes([ttnn.int32], update_idxs_tensor)
    require(tensor.is_sharded(), f"{tensor} is not height-sharded")
    _check_table(page_table)
    one, batch, heads, head_dim = list(tensor.shape)
    _check_cache(cache, heads, head_dim)
    require(one == 1, f"{tensor} is no decode step")
    require(list(update_idxs_tensor.shape) == [batch], f"{update_idxs_tensor} for {tensor}")
    require(page_table.shape[0] == batch, f"{page_table} for {tensor}")
    # Not documented, but refused by ttnn: a row with more blocks than there are.
    require(page_table.shape[1] <= cache.shape[0], f"{page_table} for {cache}")
    for chip, table in enumerate(replicated_ints(page_table)):
        packed = round_to(tensor.shards[chip], cache.dtype)
        for row, position in enumerate(replicated_ints(update_idxs_tensor)[chip].tolist()):
            if position == -1:
                continue
            block, offset = _page(table, row, position, cache)
            cache.shards[chip][block, :, offset] = packed[0, row]
    return cache


@op("experimental.paged_fused_update_cache")
def paged_fused_update_cache(first_cache, first, second_cache, second, **settings):
    """`paged_update_cache` of two caches at once; their rows are on different cores."""
    return [
        paged_update_cache(first_cache, first, **settings),
        paged_update_cache(second_cache, second, **settings),
    ]


def _check_heads(q_heads, cache):
    require(q_heads % cache.shape[1] == 0, f"{q_heads} query heads on {cache}")


@op("transformer.scaled_dot_product_attention")
def scaled_dot_product_attention(
    q,
    k,
    v,
    *,
    attn_mask=None,
    is_causal=True,
    scale=None,
    sliding_window_size=None,
    memory_config=None,
    program_config=None,
    compute_kernel_config=None,
):
    require(attn_mask is None or not is_causal, "a mask and is_causal exclude each other")
    on_device(q, k, v, *filter(None, [attn_mask]))
    in_layout(TILED, q, k, v)
    _check_heads(q.shape[1], k)
    masks = attn_mask.shards if attn_mask is not None else itertools.repeat(None)
    shards = [
        golden("transformer.scaled_dot_product_attention")(
            *qkv,
            attn_mask=mask,
            is_causal=is_causal,
            scale=scale,
            sliding_window_size=sliding_window_size,
        )
        for *qkv, mask in zip(q.shards, k.shards, v.shards, masks, strict=False)
    ]
    return q.like(shards, memory_config=memory_config)


@op("transformer.chunked_scaled_dot_product_attention")
def chunked_scaled_dot_product_attention(
    q,
    k,
    v,
    page_table_tensor,
    chunk_start_idx=None,
    *,
    chunk_start_idx_tensor=None,
    scale=None,
    memory_config=None,
    program_config=None,
    compute_kernel_config=None,
):
    on_device(q, k, v, page_table_tensor, *filter(None, [chunk_start_idx_tensor]))
    in_layout(TILED, q, k, v)
    _check_table(page_table_tensor)
    _check_heads(q.shape[1], k)
    require((chunk_start_idx is None) != (chunk_start_idx_tensor is None), "one chunk start")
    starts = [chunk_start_idx] * len(q.shards)
    if chunk_start_idx_tensor is not None:
        in_dtypes([ttnn.int32], chunk_start_idx_tensor)
        require(list(chunk_start_idx_tensor.shape) == [1], f"{chunk_start_idx_tensor}")
        starts = [int(ids[0]) for ids in replicated_ints(chunk_start_idx_tensor)]
    capacity = page_table_tensor.shape[1] * k.shape[2]
    for start in starts:
        # The golden function takes any start and cuts off what the table does not cover.
        require(start + q.shape[2] <= capacity, f"chunk at {start} of {q} in {capacity} tokens")
        for name in ("q_chunk_size", "k_chunk_size"):
            size = getattr(program_config, name, None) or TILE
            require(start % size == 0, f"chunk start {start} is not a multiple of {name} {size}")
    shards = [
        golden("transformer.chunked_scaled_dot_product_attention")(
            *operands, chunk_start_idx=start, scale=scale
        )
        for *operands, start in zip(
            q.shards, k.shards, v.shards, replicated_ints(page_table_tensor), starts, strict=True
        )
    ]
    return q.like(shards, memory_config=memory_config)


@op("transformer.paged_scaled_dot_product_attention_decode")
def paged_scaled_dot_product_attention_decode(
    q,
    k,
    v,
    page_table_tensor,
    *,
    is_causal=True,
    cur_pos_tensor=None,
    scale=None,
    memory_config=None,
    program_config=None,
    compute_kernel_config=None,
):
    require(is_causal and cur_pos_tensor is not None, "the golden kit takes causal positions")
    on_device(q, k, v, page_table_tensor, cur_pos_tensor)
    in_layout(TILED, q, k, v)
    in_layout(ROW_MAJOR, cur_pos_tensor)
    in_dtypes([ttnn.int32], cur_pos_tensor)
    _check_table(page_table_tensor)
    one, batch, heads, _ = list(q.shape)
    require(one == 1 and batch <= TILE, f"{q} is no decode step")
    require(list(cur_pos_tensor.shape) == [batch], f"{cur_pos_tensor} for {q}")
    require(page_table_tensor.shape[0] == batch, f"{page_table_tensor} for {q}")
    _check_heads(heads, k)
    capacity = page_table_tensor.shape[1] * k.shape[2]
    shards = []
    for *operands, positions in zip(
        q.shards,
        k.shards,
        v.shards,
        replicated_ints(page_table_tensor),
        replicated_ints(cur_pos_tensor),
        strict=True,
    ):
        # The golden function cuts off positions that the table does not cover.
        require(positions.max() < capacity, f"positions {positions} in {capacity} tokens")
        out = golden("transformer.paged_scaled_dot_product_attention_decode")(
            *operands, cur_pos_tensor=positions, scale=scale
        )
        # It also writes zeros where the device writes nothing.
        out[:, positions < 0] = poison()
        shards.append(out)
    return q.like(shards, memory_config=memory_config)


# ---- collectives


def _groups(device, cluster_axis):
    """Chips of the same row, column or mesh, as lists of indices."""
    rows, columns = list(device.shape)
    if cluster_axis is None:
        return [list(range(rows * columns))]
    if cluster_axis == 0:
        return [[row * columns + column for row in range(rows)] for column in range(columns)]
    return [[row * columns + column for column in range(columns)] for row in range(rows)]


def _summed(tensor, group):
    """Return the sum in a ring's order: every chip adds to the received sum, in the dtype."""
    total = tensor.shards[group[0]]
    for chip in group[1:]:
        total = round_to(total + tensor.shards[chip], tensor.dtype)
    return total


@op("create_global_semaphore")
def create_global_semaphore(device, cores, initial_value, buffer_type=None):
    require(initial_value == 0, "these ops begin at 0")
    return GoldenSemaphore(device)


@op("get_fabric_config")
def get_fabric_config():
    return ttnn.FabricConfig.FABRIC_1D


@op("get_arch_name")
def get_arch_name():
    return "wormhole_b0"


@op("get_num_devices")
def get_num_devices():
    return 8


def take_semaphores(tensor, own, barrier, count):
    """Check that a collective uses no semaphore of the device's last collective."""
    taken = [*own, barrier]
    require(len(own) == count, f"{len(own)} semaphores, not {count}")
    require(len(set(taken)) == len(taken), "a semaphore is given twice")
    for semaphore in taken:
        require(semaphore.device is tensor.device(), "a semaphore of another mesh")
        require(semaphore not in semaphore.device.taken, "chips may still reset a semaphore")
    tensor.device().taken = taken


@op("experimental.all_gather_async")
def all_gather_async(
    tensor,
    *,
    dim,
    multi_device_global_semaphore,
    barrier_semaphore,
    cluster_axis,
    memory_config,
    topology,
    chunks_per_sync,
    num_workers_per_link,
    num_buffers_per_channel,
    num_links=None,
):
    # The collectives' golden functions compose host tensors, which chips do not have.
    on_device(tensor)
    take_semaphores(tensor, multi_device_global_semaphore, barrier_semaphore, 2)
    shards = list(tensor.shards)
    for group in _groups(tensor.device(), cluster_axis):
        gathered = torch.cat([tensor.shards[chip] for chip in group], dim=dim)
        for chip in group:
            shards[chip] = gathered.clone()
    return tensor.like(shards, memory_config=memory_config)


@op("experimental.reduce_scatter_minimal_async")
def reduce_scatter_minimal_async(
    tensor,
    *,
    dim,
    multi_device_global_semaphore,
    barrier_semaphore,
    cluster_axis,
    memory_config,
    intermediate_memory_config,
    topology,
    chunks_per_sync,
    num_workers_per_link,
    num_buffers_per_channel,
    num_links=None,
):
    on_device(tensor)
    in_layout(TILED, tensor)
    in_dtypes(FLOATS, tensor)
    take_semaphores(tensor, multi_device_global_semaphore, barrier_semaphore, 3)
    shards = list(tensor.shards)
    for group in _groups(tensor.device(), cluster_axis):
        total = _summed(tensor, group)
        width = total.shape[dim] // len(group)
        require(width % TILE == 0, f"{tuple(tensor.shape)} in whole tiles over {len(group)} chips")
        for chip, part in zip(group, total.chunk(len(group), dim=dim), strict=True):
            shards[chip] = part.clone()
    return tensor.like(shards, memory_config=memory_config)


# ---- sampling


@op("topk")
def topk(
    tensor,
    k=32,
    dim=-1,
    largest=True,
    sorted=True,
    *,
    memory_config=None,
    indices_tensor=None,
    stable=False,
):
    on_device(tensor)
    in_layout(TILED, tensor, indices_tensor)
    in_dtypes([ttnn.bfloat16, ttnn.bfloat8_b, ttnn.float32], tensor)
    rows = math.prod(list(tensor.padded_shape)[:-1])
    require(rows % TILE == 0, f"{rows} rows")
    index_dtype = ttnn.uint16 if tensor.padded_shape[dim] < (1 << 16) else ttnn.uint32
    labels = itertools.repeat(None)
    if indices_tensor is not None:
        on_device(tensor, indices_tensor)
        in_dtypes([ttnn.uint16, ttnn.uint32, ttnn.int32], indices_tensor)
        require(indices_tensor.shape == tensor.shape, f"{indices_tensor} for {tensor}")
        labels = indices_tensor.shards
        if indices_tensor.dtype != ttnn.uint16:
            index_dtype = indices_tensor.dtype
    pairs = [
        golden("topk")(shard, k, dim, largest, sorted, stable=stable, indices_tensor=label)
        for shard, label in zip(tensor.shards, labels, strict=False)
    ]
    values, indices = zip(*pairs, strict=True)
    return (
        tensor.like(list(values), memory_config=memory_config),
        tensor.like(list(indices), index_dtype, memory_config=memory_config),
    )


@op("sampling")
def sampling(values, indices, k, p, temp, *, seed=None, sub_core_grids=None, output_tensor=None):
    """[1, 1, users, W] values and their ids -> [1, 1, 1, users]; `temp` is 1/T.

    The golden function gives zeros, because draws are random. Here every user has a stream of
    random numbers on each chip, which `manual_seed` restarts.
    """
    on_device(values, indices, k, p, temp)
    in_layout(TILED, values)
    in_layout(ROW_MAJOR, indices, k, p, temp)
    in_dtypes([ttnn.bfloat16], values, p, temp)
    in_dtypes([ttnn.uint32, ttnn.int32], indices, k)
    require(not seed, "the golden kit takes seeds by manual_seed")
    first, second, users, width = list(values.shape)
    require(first == second == 1 and 1 <= users <= TILE, f"{values}")
    require(width % TILE == 0 and (width // TILE).bit_count() == 1, f"{values} is so wide")
    require(list(indices.shape) == list(values.shape), f"{indices} for {values}")
    for tensor in (k, p, temp):
        require(list(tensor.shape) == [users], f"{tensor} for {users} users")
    operands = zip(
        values.device().chips,
        values.shards,
        indices.shards,
        k.shards,
        p.shards,
        temp.shards,
        strict=True,
    )
    shards = []
    for chip, x, ids, ks, ps, ts in operands:
        require(ks.min() > 0 and ks.max() <= TILE, f"top-k {ks}")
        require(ps.min() >= 0 and ps.max() <= 1, f"top-p {ps}")
        chosen = []
        for user in range(users):
            noise = float(torch.rand((), generator=_stream(values.device(), chip, user)))
            rank = _draw(x[0, 0, user], int(ks[user]), float(ps[user]), float(ts[user]), noise)
            chosen.append(int(ids[0, 0, user, rank]))
        shards.append(torch.tensor(chosen).view(1, 1, 1, users))
    dtype = ttnn.uint32 if output_tensor is None else output_tensor.dtype
    result = values.like(shards, dtype, ROW_MAJOR, ttnn.DRAM_MEMORY_CONFIG)
    return store(result, output_tensor)


def _draw(values, k, p, inverse_temperature, noise):
    """Place of the value that `noise`, in 0..1, chooses."""
    best, order = values.topk(k)
    probabilities = torch.softmax(best * inverse_temperature, dim=-1)
    if not probabilities.isfinite().all():
        return 0  # a row that was not computed
    before = probabilities.cumsum(-1) - probabilities
    kept = probabilities * ((before < p) | (torch.arange(k) == 0))
    chosen = (kept.cumsum(-1) > noise * kept.sum()).to(torch.int64).argmax()
    return int(order[chosen])


def _stream(device, chip, user):
    return device.streams.setdefault((chip, user), torch.Generator().manual_seed(chip * 32 + user))


@op("manual_seed")
def manual_seed(seeds, *, device=None, user_ids=None, sub_core_grids=None):
    if isinstance(seeds, int):
        require(device is not None, "a number as seed needs a device")
        for chip in device.chips:
            for user in range(TILE):
                _stream(device, chip, user).manual_seed(seeds)
        return zeros((1,), ttnn.uint32, ROW_MAJOR, device)
    on_device(seeds, user_ids)
    in_layout(ROW_MAJOR, seeds, user_ids)
    in_dtypes([ttnn.uint32], seeds, user_ids)
    require(seeds.shape == user_ids.shape, f"{seeds} for {user_ids}")
    for chip, values, users in zip(
        seeds.device().chips, seeds.shards, user_ids.shards, strict=True
    ):
        for value, user in zip(values.flatten().tolist(), users.flatten().tolist(), strict=True):
            require(0 <= user < TILE, f"user {user}")
            if value != 2**32 - 1:
                _stream(seeds.device(), chip, user).manual_seed(value)
    # A tensor that means nothing, as the documentation says.
    return zeros((1,), ttnn.uint32, ROW_MAJOR, seeds.device())
