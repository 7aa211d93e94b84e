"""The replacement of `ttnn` in the modules of the ttnn generator, which records every call."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import types
from dataclasses import dataclass
from enum import Enum

import torch
import ttnn

import replicas.generators.ttnn
from tests.tt.golden.ops import OPS, POISON
from tests.tt.golden.tensors import GoldenTensor

PURE = {"create_sharded_memory_config", "num_cores_to_corerangeset"}
"""Functions of ttnn that only compute settings."""

MAPPERS = {"ReplicateTensorToMesh", "ShardTensorToMesh", "ConcatMeshToTensor"}
TRANSFERS = {
    "from_torch",
    "to_torch",
    "to_device",
    "from_device",
    "copy_host_to_device_tensor",
    "get_device_tensors",
    "from_host_shards",
    "dump_tensor",
    "load_tensor",
    "record_event",
    "event_synchronize",
    "allocate_tensor_on_device",
    "allocate_tensor_on_host",
    "narrow",
    "experimental.view",
    "close_mesh_device",
    "set_fabric_config",
}
"""Calls that compile nothing."""

MACHINE = {"get_fabric_config", "get_arch_name", "get_num_devices"}
"""Functions of ttnn that describe the machine."""
NOT_NOTED = {"Tensor", "MeshDevice", "deallocate", "create_global_semaphore", *MACHINE, *MAPPERS}


@dataclass(frozen=True)
class Call:
    """One call of an op.

    Attributes:
        name: Dotted, below ttnn.
        operands: (shape, dtype, layout) of the tensors among the arguments, in order.
        results: The same of what the op returned.
    """

    name: str
    operands: tuple
    results: tuple


def tensors_in(values, kind):
    """The tensors among arguments or results, lists of them opened."""
    found = []
    for value in values:
        if isinstance(value, kind):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(tensors_in(value, kind))
    return found


def described(values, kind):
    return tuple(
        (tuple(tensor.shape), tensor.dtype.name, tensor.layout.name)
        for tensor in tensors_in(values, kind)
    )


class Noting:
    """A namespace whose calls of ops are appended to `calls`; the base of both kinds."""

    kind = ttnn.Tensor

    def __init__(self, real=ttnn, prefix="", calls=None):
        self._real = real
        self._prefix = prefix
        self.calls = [] if calls is None else calls

    def __getattr__(self, name):
        dotted = self._prefix + name
        found = self._find(dotted, name)
        if isinstance(found, types.ModuleType):
            return type(self)(found, f"{dotted}.", self.calls)
        if not self._is_op(dotted, found):
            return found
        return self._noted(dotted, found)

    def _find(self, dotted, name):
        return getattr(self._real, name)

    def _is_op(self, dotted, found):
        return type(found).__name__ == "FastOperation" and dotted not in NOT_NOTED

    def _noted(self, dotted, function):
        def call(*args, **kwargs):
            operands = described([*args, *kwargs.values()], self.kind)
            with torch.no_grad():
                result = function(*args, **kwargs)
            results = described([result], self.kind)
            self.calls.append(Call(dotted, operands, results))
            self._after(dotted, args, kwargs)
            return result

        return call

    def _after(self, dotted, args, kwargs):
        pass


class GoldenLibrary(Noting):
    """ttnn's constants, enums and settings as they are, its ops by the golden kit's.

    Anything else raises, so that an op that a model newly calls is noticed.
    """

    kind = GoldenTensor

    def _find(self, dotted, name):
        if dotted in OPS:
            return OPS[dotted]
        found = getattr(self._real, name)
        is_plain = isinstance(found, types.ModuleType | type | Enum | int | float | str)
        is_plain = is_plain or (not callable(found)) or dotted in PURE
        if not is_plain:
            raise NotImplementedError(f"the golden kit has no ttnn.{dotted}")
        return found

    def _is_op(self, dotted, found):
        return dotted in OPS and dotted not in NOT_NOTED

    def _after(self, dotted, args, kwargs):
        tensors = tensors_in([*args, *kwargs.values()], GoldenTensor)
        devices = [tensor.device() for tensor in tensors if tensor.device() is not None]
        if devices and dotted not in TRANSFERS:
            rest = [v for v in [*args, *kwargs.items()] if not tensors_in([v], GoldenTensor)]
            devices[0].programs.add((dotted, described(tensors, GoldenTensor), repr(rest)))


def modules():
    """Every module of replicas.generators.ttnn that has the name `ttnn`."""
    package = replicas.generators.ttnn
    found = [
        importlib.import_module(f"{package.__name__}.{info.name}")
        for info in pkgutil.iter_modules(package.__path__)
    ]
    return [module for module in found if getattr(module, "ttnn", None) is not None]


@contextlib.contextmanager
def installed(library):
    """Replace `ttnn` for the modules of the generator; one thread, as the ops are small."""
    before = [(module, module.ttnn) for module in modules()]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for module, _ in before:
        module.ttnn = library
    try:
        yield library
    finally:
        torch.set_num_threads(num_threads)
        for module, real in before:
            module.ttnn = real


@contextlib.contextmanager
def poisoned(value):
    """Let the device leave `value` where it writes nothing."""
    POISON.value = value
    try:
        yield
    finally:
        POISON.value = 0.0
