"""The C kernels of `csrc/`, loaded with ctypes.

The structures mirror those of `csrc/kernels.h`; their layout is compared with what the library says
of its own when it is loaded. `build_kernels.py` builds the library.
"""

# ctypes reads the fields once; a list of them is no promise that it may be changed.
# mypy: disable-error-code="mutable-override"

from __future__ import annotations

import ctypes
import enum
from ctypes import POINTER, Structure, c_char_p, c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from replicas.generators.torch.build_kernels import LIBRARY, BuildError, is_current, seal_of
from replicas.generators.torch.team import in_team

if TYPE_CHECKING:
    from pathlib import Path

    from replicas.generators.torch.inputs import Int64Array


class NativeError(RuntimeError):
    """The library is missing, damaged or of other sources; the message says what to do."""


class Feature(enum.IntFlag):
    """Instruction sets of a processor; `kernel_feature` of the header."""

    AVX2 = 1
    AVX512 = 2
    AMX = 4


NO_FEATURES = Feature(0)
ALL_FEATURES = Feature.AVX2 | Feature.AVX512 | Feature.AMX

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
"""Dtypes of the kernels; `kernel_dtype` of the header."""

ATTENTION_TILE = 8
"""Tokens of a prompt that read a key together."""
ATTENTION_MAX_WIDTH = 1024
"""Numbers of a key or value at most."""

_FAULTS = {
    1: "is not something that the kernels compute",
    2: "has sizes that contradict each other",
    3: "has an index outside of its array",
    4: "lacks an array",
}
"""What a `kernel_status` other than OK says of a call."""


class UnsupportedCallError(ValueError):
    """The kernels do not compute this; plain operators may."""


# --- structures, in the order of the header ------------------------------------------------------


class Tasks(Structure):
    """Work that the threads of a call take task by task."""

    _fields_ = [("next", c_int64), ("count", c_int64)]


class AttentionCall(Structure):
    """Attention of tiles of tokens over the blocks of their sequences."""

    _fields_ = [
        ("tasks", Tasks),
        ("dtype", c_int64),
        ("q", c_void_p),
        ("out", c_void_p),
        ("q_stride", c_int64),
        ("out_stride", c_int64),
        ("num_tokens", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_stride", c_int64),
        ("value_stride", c_int64),
        ("num_blocks", c_int64),
        ("num_kv_heads", c_int64),
        ("share", c_int64),
        ("block_size", c_int64),
        ("key_width", c_int64),
        ("value_width", c_int64),
        ("num_tiles", c_int64),
        ("tile_size", c_int64),
        ("tokens", c_void_p),
        ("counts", c_void_p),
        ("lengths", c_void_p),
        ("requests", c_void_p),
        ("tables", c_void_p),
        ("num_requests", c_int64),
        ("table_width", c_int64),
        ("scale", c_double),
        ("soft_cap", c_double),
        ("window", c_int64),
        ("sinks", c_void_p),
    ]


class NormCall(Structure):
    """Root mean square norm of rows."""

    _fields_ = [
        ("tasks", Tasks),
        ("dtype", c_int64),
        ("x", c_void_p),
        ("stride", c_int64),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("size", c_int64),
        ("eps", c_double),
        ("weight_offset", c_double),
    ]


class RopeCall(Structure):
    """Norm and rotation of queries and keys, and the write of keys and values."""

    _fields_ = [
        ("tasks", Tasks),
        ("dtype", c_int64),
        ("heads", c_void_p),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_size", c_int64),
        ("rotary_size", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("num_positions", c_int64),
        ("positions", c_void_p),
        ("kv_positions", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("num_blocks", c_int64),
        ("block_size", c_int64),
        ("norm", c_void_p),
        ("eps", c_double),
    ]


class PackedMatrix(Structure):
    """A packed weight matrix of bfloat16."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("num_inputs", c_int64),
        ("num_outputs", c_int64),
        ("uses_tiles", c_int64),
    ]


class ProductCall(Structure):
    """Product of rows and a packed matrix."""

    _fields_ = [
        ("tasks", Tasks),
        ("matrix", PackedMatrix),
        ("x", c_void_p),
        ("num_rows", c_int64),
        ("rows_of_task", c_int64),
        ("then", c_int64),
        ("other", c_void_p),
        ("out", c_void_p),
    ]


class DecoderLayer(Structure):
    """Weights of a decoder layer and the planes of its keys and values."""

    _fields_ = [
        ("input_norm", c_void_p),
        ("qkv", PackedMatrix),
        ("head_norm", c_void_p),
        ("o", PackedMatrix),
        ("post_norm", c_void_p),
        ("gate", PackedMatrix),
        ("up", PackedMatrix),
        ("down", PackedMatrix),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("window", c_int64),
        ("group", c_int64),
    ]


class LayersPass(Structure):
    """The layers, the cache and the tokens of a pass."""

    _fields_ = [
        ("layers", c_void_p),
        ("num_layers", c_int64),
        ("is_end", c_int64),
        ("hidden_size", c_int64),
        ("inner_size", c_int64),
        ("num_kv_heads", c_int64),
        ("share", c_int64),
        ("head_size", c_int64),
        ("rotary_size", c_int64),
        ("eps", c_double),
        ("scale", c_double),
        ("num_groups", c_int64),
        ("num_blocks", c_void_p),
        ("block_size", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("num_positions", c_int64),
        ("num_tokens", c_int64),
        ("x", c_void_p),
        ("positions", c_void_p),
        ("kv_positions", c_void_p),
        ("num_requests", c_int64),
        ("lengths", c_void_p),
        ("tables", c_void_p),
        ("table_width", c_int64),
        ("num_wanted", c_int64),
        ("wanted", c_void_p),
        ("out", c_void_p),
    ]


class TokenLayersCall(Structure):
    """Layers over units of neighbouring tokens."""

    _fields_ = [
        ("tasks", Tasks),
        ("pass", LayersPass),
        ("num_threads", c_int64),
        ("entered", c_int64),
        ("num_units", c_int64),
        ("max_rows", c_int64),
        ("starts", c_void_p),
        ("cuts", c_void_p),
        ("unit_requests", c_void_p),
        ("needs", c_void_p),
        ("unit_wanted", c_void_p),
        ("stored", c_void_p),
        ("done", c_void_p),
        ("scratch", c_void_p),
        ("scratch_size", c_int64),
    ]


class WeightLayersCall(Structure):
    """Layers with the weights divided among threads."""

    _fields_ = [
        ("tasks", Tasks),
        ("pass", LayersPass),
        ("num_tiles", c_int64),
        ("tiles", c_void_p),
        ("are_alone", c_void_p),
        ("phase_tasks", c_void_p),
        ("done", c_void_p),
        ("heads", c_void_p),
        ("attended", c_void_p),
        ("gated", c_void_p),
        ("num_threads", c_int64),
        ("entered", c_int64),
        ("normed", c_void_p),
    ]


class LogprobsCall(Structure):
    """Logits and ranks of tokens of rows, and what makes log probabilities of logits."""

    _fields_ = [
        ("tasks", Tasks),
        ("dtype", c_int64),
        ("logits", c_void_p),
        ("num_logit_rows", c_int64),
        ("vocabulary", c_int64),
        ("places", c_void_p),
        ("firsts", c_void_p),
        ("num_given", c_void_p),
        ("tokens", c_void_p),
        ("values", c_void_p),
        ("ranks", c_void_p),
        ("log_sums", c_void_p),
    ]


class DeltaCall(Structure):
    """A token of each of some sequences in a recurrent layer."""

    _fields_ = [
        ("tasks", Tasks),
        ("dtype", c_int64),
        ("mixed", c_void_p),
        ("mixed_stride", c_int64),
        ("num_tokens", c_int64),
        ("rates", c_void_p),
        ("decays", c_void_p),
        ("out", c_void_p),
        ("states", c_void_p),
        ("state_size", c_int64),
        ("num_blocks", c_int64),
        ("convolution", c_void_p),
        ("key_heads", c_int64),
        ("share", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("kernel", c_int64),
        ("num_singles", c_int64),
        ("tokens", c_void_p),
        ("read", c_void_p),
        ("written", c_void_p),
        ("is_first", c_void_p),
        ("scratch", c_void_p),
    ]


class _KernelSet(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("features", c_int64),
        ("attention", c_void_p),
        ("norm", c_void_p),
        ("rope", c_void_p),
        ("product", c_void_p),
        ("token_layers", c_void_p),
        ("weight_layers", c_void_p),
        ("logprobs", c_void_p),
        ("delta", c_void_p),
    ]


class _Field(Structure):
    _fields_ = [
        ("structure", c_char_p),
        ("field", c_char_p),
        ("offset", c_int64),
        ("size", c_int64),
    ]


_MIRRORS: dict[str, type[Structure]] = {
    "kernel_tasks": Tasks,
    "attention_call": AttentionCall,
    "norm_call": NormCall,
    "rope_call": RopeCall,
    "packed_matrix": PackedMatrix,
    "product_call": ProductCall,
    "decoder_layer": DecoderLayer,
    "layers_pass": LayersPass,
    "token_layers_call": TokenLayersCall,
    "weight_layers_call": WeightLayersCall,
    "logprobs_call": LogprobsCall,
    "delta_call": DeltaCall,
    "kernel_set": _KernelSet,
}


def _layout_here() -> list[tuple[str, str, int, int]]:
    found = []
    for name, mirror in _MIRRORS.items():
        found.append((name, "", 0, ctypes.sizeof(mirror)))
        for field in mirror._fields_:
            descriptor = getattr(mirror, field[0])
            found.append((name, field[0], descriptor.offset, descriptor.size))
    return found


def _layout_there(library: ctypes.CDLL) -> list[tuple[str, str, int, int]]:
    found = []
    first = ctypes.addressof(_Field.in_dll(library, "kernels_fields"))
    fields = ctypes.cast(first, POINTER(_Field))
    for i in range(10_000):
        field = fields[i]
        if field.structure is None:
            break
        found.append((field.structure.decode(), field.field.decode(), field.offset, field.size))
    return found


# --- loading -------------------------------------------------------------------------------------

_HOW = "run `python -m replicas.generators.torch.build_kernels`, which needs a C compiler"


_CHECKS = (
    "attention", "norm", "rope", "product", "token_layers", "weight_layers",
    "logprobs", "delta",
)  # fmt: skip


class Library:
    """The shared library.

    Args:
        path: Its file.

    Attributes:
        check_attention: Returns a `kernel_status` of an `AttentionCall`.
        check_norm: Of a `NormCall`.
        check_rope: Of a `RopeCall`.
        check_product: Of a `ProductCall`.
        check_token_layers: Of a `TokenLayersCall`.
        check_weight_layers: Of a `WeightLayersCall`.
        check_logprobs: Of a `LogprobsCall`.
        check_delta: Of a `DeltaCall`.

    Raises:
        NativeError: It is missing or damaged, or was built from other sources.
    """

    def __init__(self, path: Path = LIBRARY) -> None:
        if seal_of(path) is None:
            raise NativeError(f"cannot load the kernel library: {path} is damaged; {_HOW}")
        try:
            self._library = ctypes.CDLL(str(path))
            there = _layout_there(self._library)
            self._features = self._library.kernels_features
            self._choose = self._library.kernels_for
            checks = [getattr(self._library, f"kernels_check_{name}") for name in _CHECKS]
        except (OSError, AttributeError, ValueError) as error:
            raise NativeError(f"cannot load the kernel library: {error}; {_HOW}") from error
        here = _layout_here()
        if there != here:
            differ = sorted({field[:2] for field in set(there) ^ set(here)})
            names = ", ".join(".".join(filter(None, names)) for names in differ[:4])
            raise NativeError(f"{path} was built from other sources, see {names}; {_HOW}")
        self._features.restype = c_int64
        self._choose.argtypes, self._choose.restype = [c_int64], POINTER(_KernelSet)
        for check in checks:
            check.argtypes, check.restype = [c_void_p], c_int64
        (
            self.check_attention,
            self.check_norm,
            self.check_rope,
            self.check_product,
            self.check_token_layers,
            self.check_weight_layers,
            self.check_logprobs,
            self.check_delta,
        ) = checks

    @property
    def features(self) -> Feature:
        """Return what this processor has and the operating system permits."""
        return Feature(self._features())

    def choose(self, features: Feature) -> KernelSet:
        """Return the best kernels that need no feature besides these."""
        found: _KernelSet = self._choose(features).contents
        return KernelSet(
            self,
            found.name.decode(),
            features,
            features & ~Feature(found.features),
            Worker(found.attention),
            Worker(found.norm),
            Worker(found.rope),
            Worker(found.product),
            Worker(found.token_layers),
            Worker(found.weight_layers),
            Worker(found.logprobs),
            Worker(found.delta),
        )


@cache
def load() -> Library:
    """Return the library of this installation, loaded once.

    Raises:
        NativeError: It is missing or damaged, or was built from other sources.
    """
    if not LIBRARY.exists():
        raise NativeError(f"{LIBRARY} was not built when ttserve was installed; {_HOW}")
    try:
        fits = is_current()
    except BuildError as error:
        raise NativeError(f"{error}; install ttserve again") from error
    if not fits:
        raise NativeError(f"{LIBRARY} was built from other sources; {_HOW}")
    return Library()


@cache
def kernel_set(without: Feature = NO_FEATURES) -> KernelSet:
    """Return the kernels for this processor.

    Args:
        without: Features to do without although the processor has them.

    Raises:
        NativeError: See `load`.
    """
    library = load()
    return library.choose(library.features & ~without)


def missing_parts() -> list[str]:
    """Return what makes the kernels slower here than this processor allows, each with its cure.

    Raises:
        NativeError: See `load`.
    """
    found = []
    if lacks := kernel_set().lacks:
        names = ", ".join(str(one.name) for one in Feature if one in lacks)
        found.append(
            f"{LIBRARY} has no kernels for {names} of this processor, as the compiler that built "
            "it does not know these instructions; install gcc 11, clang 12 or a later one, and "
            f"{_HOW}"
        )
    if in_team() is None:
        found.append(
            "the kernels compute on one thread, as PyTorch's libraries have no GOMP_parallel; "
            "install a PyTorch that is built with OpenMP"
        )
    return found


# --- calls ---------------------------------------------------------------------------------------


class Worker:
    """A kernel, which every thread of a team runs with the same call.

    Args:
        address: Of the C function.
    """

    def __init__(self, address: int) -> None:
        self._address = address
        self._function = ctypes.CFUNCTYPE(None, c_void_p)(address)

    def __call__(self, call: Structure) -> None:
        """Do all tasks of a call on as many threads as PyTorch uses."""
        tasks: Tasks = call.tasks
        tasks.next = 0
        # Never fewer because there are fewer tasks: threads that a team has no use for would end.
        num_threads = torch.get_num_threads()
        if num_threads > 1 and tasks.count > 1 and (run := in_team()) is not None:
            run(self._address, ctypes.byref(call), num_threads, 0)
        else:
            self._function(ctypes.byref(call))


@dataclass(frozen=True, slots=True, eq=False)
class KernelSet:
    """All kernels, compiled for one instruction set.

    Attributes:
        library: Where they are from.
        name: Of the instruction set: amx, avx512, avx2 or portable.
        features: What they may use.
        lacks: Those of them that the library has no kernels for.
        attention: Of an `AttentionCall`.
        norm: Of a `NormCall`.
        rope: Of a `RopeCall`.
        product: Of a `ProductCall`.
        token_layers: Of a `TokenLayersCall`.
        weight_layers: Of a `WeightLayersCall`.
        logprobs: Of a `LogprobsCall`.
        delta: Of a `DeltaCall`.
    """

    library: Library
    name: str
    features: Feature
    lacks: Feature
    attention: Worker
    norm: Worker
    rope: Worker
    product: Worker
    token_layers: Worker
    weight_layers: Worker
    logprobs: Worker
    delta: Worker


def require(status: int, what: str) -> None:
    """Raise unless a check found nothing.

    Args:
        status: A `kernel_status`.
        what: The call, for the message.

    Raises:
        UnsupportedCallError: The kernels do not compute it.
        ValueError: A kernel would read or write outside its arrays.
    """
    if status:
        error = UnsupportedCallError if status == 1 else ValueError
        raise error(f"{what} {_FAULTS.get(status, f'failed with status {status}')}")


def address(tensor: torch.Tensor | None, dtype: torch.dtype) -> int | None:
    """Return the address of a tensor's first number; the others follow. None for no tensor.

    Raises:
        ValueError: They do not follow one another, or are of another dtype.
    """
    if tensor is None:
        return None
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(f"{tensor.dtype} with strides {tensor.stride()} is not {dtype} in a row")
    return tensor.data_ptr()


def rows_address(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the address of a tensor's first number; those of a row follow one another.

    Raises:
        ValueError: As `address`.
    """
    if len(tensor):
        address(tensor[0], dtype)
    return tensor.data_ptr()


def array_address(array: Int64Array) -> int:
    """Return the address of an array's first number; the others follow.

    Raises:
        ValueError: They do not, or are no int64.
    """
    if array.dtype != np.int64 or not array.flags.c_contiguous:
        raise ValueError(f"{array.dtype} with strides {array.strides} is not int64 in a row")
    return array.ctypes.data
