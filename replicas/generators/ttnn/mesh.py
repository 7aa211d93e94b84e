"""Opening and closing of a Tenstorrent mesh, and its division into lanes.

No other module opens or closes a device. ``TT_VISIBLE_DEVICES`` decides before the import of ttnn
which boards a process sees; here it is only checked. The mesh is always closed, in the only order
that ttnn supports (submeshes, mesh, fabric): by `TTMesh.close`, which a worker calls when its
engine ends, or else when the interpreter exits. A killed process cannot close it; the next process
that opens its boards resets them first.

Source: the order and the arguments are those of vllm-tt-plugin's worker; the submeshes of a Galaxy
those of tt_transformers' ``create_submeshes``, their order that of the plugin's discovery.
"""

from __future__ import annotations

import atexit
import logging
import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import ttnn

from replicas.errors import ConfigError, DeviceError
from replicas.generators.ttnn.board_locks import BoardLocks
from replicas.generators.ttnn.board_reset import lock_names, reset_left_open
from replicas.tt.boards import MOCK_DESCRIPTOR, VISIBLE_DEVICES, read_devices, visible_names
from replicas.tt.meshes import MeshSpec, lane_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from replicas.config import MeshConfig
    from replicas.tt.boards import Device

_LOG = logging.getLogger(__name__)
_GALAXY = (8, 4)
_TRAYS = (0, 2, 3, 1)
"""Rows of a Wormhole Galaxy's chips, in the order of their mesh ids."""
_NUM_TRAYS = len(_TRAYS)


@dataclass(eq=False)
class TTMesh:
    """``mesh_device`` of the native generator, like `CpuDevice` for the torch generator.

    Attributes:
        device: The whole mesh. With several lanes it must not be used: ttnn cannot close a submesh
            after both its mesh and itself were used.
        spec: The mesh's chips and shape.
        settings: The mesh's settings.
        load_format: "safetensors" reads the model folder's weights; "random" needs only its
            config.json.
        seed: Seed of the random weights.
        progress: Called while loading with (stage, fraction done in 0..1); must be quick.
    """

    device: Any
    spec: MeshSpec
    settings: MeshConfig
    load_format: Literal["safetensors", "random"] = "safetensors"
    seed: int = 0
    progress: Callable[[str, float], None] | None = None
    _locks: BoardLocks | None = None
    _has_fabric: bool = False
    _lanes: list[Any] = field(default_factory=list)
    _is_closed: bool = False

    def lanes(self, num_lanes: int) -> list[Any]:
        """Return one device per lane, each a row of chips; always the same ones.

        Args:
            num_lanes: Copies of the model. One takes the whole mesh.

        Returns:
            Mesh devices of shape (1, chips / num_lanes), in the order of the mesh's chips; four of
            a Wormhole Galaxy in that of its mesh ids.

        Raises:
            ConfigError: The number does not divide the chips, or the mesh is already divided into
                another number of lanes.
            DeviceError: ttnn refused.
        """
        if self._lanes and len(self._lanes) != num_lanes:
            raise ConfigError(
                f"mesh {self.spec.name} is divided into {len(self._lanes)} lanes and cannot be "
                f"divided into {num_lanes} before it is closed"
            )
        if not self._lanes:
            self._lanes = self._divide(num_lanes)
        return list(self._lanes)

    def _divide(self, num_lanes: int) -> list[Any]:
        row = lane_shape(self.spec, num_lanes)
        shape = self.spec.shape
        try:
            if num_lanes > 1 and shape == _GALAXY:
                # Rows of eight, each of which is a ring.
                shape = _GALAXY[::-1]
                self.device.reshape(ttnn.MeshShape(*shape))
            cut = _cut(shape, row[1])
            lanes = (
                [self.device]
                if num_lanes == 1
                else self.device.create_submeshes(ttnn.MeshShape(*cut))
            )
            if num_lanes == _NUM_TRAYS and self.spec.is_galaxy and self.spec.arch == "wormhole":
                lanes = [lanes[tray] for tray in _TRAYS]
            if cut != row:
                for lane in lanes:
                    lane.reshape(ttnn.MeshShape(*row))
        except RuntimeError as error:
            raise DeviceError(
                f"ttnn cannot divide mesh {self.spec.name} {self.spec.shape} into {num_lanes} "
                f"lanes of {row[1]} chips: {ttnn_message(error)}"
            ) from error
        return list(lanes)

    def close(self) -> None:
        """Close submeshes, mesh and fabric. Idempotent.

        Failures of ttnn are logged. The boards then stay locked until this process ends, and the
        next process that opens them resets them.
        """
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._lanes = []
        closed = [_try_close(ttnn.close_mesh_device, lane) for lane in self.device.get_submeshes()]
        closed.append(_try_close(ttnn.close_mesh_device, self.device))
        if self._has_fabric:
            closed.append(_try_close(ttnn.set_fabric_config, ttnn.FabricConfig.DISABLED))
        if self._locks is not None and all(closed):
            self._locks.mark_closed()
            self._locks.release()


def open_mesh(
    settings: MeshConfig,
    *,
    fabric_config: Mapping[str, object] | None = None,
    load_format: Literal["safetensors", "random"] = "safetensors",
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
) -> TTMesh:
    """Open a mesh exclusively among the processes of this user.

    Args:
        settings: The mesh and its settings; without a trace region unless its size is given.
        fabric_config: Arguments of ``ttnn.set_fabric_config`` from a generator's capabilities,
            enums by value or by name. `settings.fabric` overrides them, and they override the
            mesh's default.
        load_format: See `TTMesh`.
        seed: See `TTMesh`.
        progress: See `TTMesh`.

    Raises:
        ConfigError: There is no such mesh, fabric or axis; or the process sees other boards than
            `settings.visible_devices`; names both.
        DeviceError: Another process holds a board, chips are missing or of another architecture, or
            ttnn failed.
    """
    spec = settings.spec
    spec.check_one_host()
    # ttnn itself reads this variable; it is no setting of ours.
    bound = os.environ.get(VISIBLE_DEVICES)  # noqa: TID251
    devices = _host_devices()
    locks = BoardLocks(lock_names(names_to_open(settings, bound), devices))
    try:
        reset_left_open(locks, devices, os.environ)  # noqa: TID251 - for PATH alone
        _check_chips(spec, bound)
        fabric = _fabric(spec, settings, fabric_config)
        arguments = _open_arguments(spec, settings)
        locks.mark_open()
        device = _open(spec, fabric, arguments)
    except BaseException:
        locks.release()
        raise
    mesh = TTMesh(
        device=device,
        spec=spec,
        settings=settings,
        load_format=load_format,
        seed=seed,
        progress=progress,
        _locks=locks,
        _has_fabric=bool(fabric),
    )
    atexit.register(mesh.close)
    return mesh


def names_to_open(settings: MeshConfig, bound: str | None) -> tuple[str, ...]:
    """Return the names of the boards that ttnn opens in this process; empty for all boards.

    Args:
        settings: Settings whose `visible_devices` must equal the process's binding.
        bound: Value of ``TT_VISIBLE_DEVICES``; None or empty is all boards of the host.

    Raises:
        ConfigError: They differ; names both.
    """
    seen = visible_names(bound)
    if settings.visible_devices is not None:
        wanted = {str(board) for board in settings.visible_devices}
        if wanted != set(seen):
            raise ConfigError(
                f"mesh.visible_devices is {sorted(wanted)}, but this process was started with "
                f"{VISIBLE_DEVICES}={bound or ''}: set that to {','.join(sorted(wanted))} before "
                "starting the process"
            )
    return seen


def _host_devices() -> tuple[Device, ...]:
    """Return the host's boards; none with a mock cluster, which opens no board."""
    # ttnn's own variable.
    return () if os.environ.get(MOCK_DESCRIPTOR) else read_devices()  # noqa: TID251


def ttnn_message(error: BaseException) -> str:
    """Return the message of a ttnn exception without its backtrace.

    ttnn's texts consist of a place in its source, "info:", the message, and a long backtrace.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "info:" in lines[:-1]:
        return lines[lines.index("info:") + 1]
    return lines[0] if lines else type(error).__name__


@contextmanager
def refusals(what: str) -> Iterator[None]:
    """Convert ttnn's errors in the body into `DeviceError`s that name the operation."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(f"{what}: ttnn refused a call: {ttnn_message(error)}") from error


def _check_chips(spec: MeshSpec, bound: str | None) -> None:
    """Check that the process sees the mesh's chips."""
    where = f"with {VISIBLE_DEVICES}={bound}" if bound else "on all boards of this host"
    try:
        num_chips = ttnn.get_num_devices()
        kind: Literal["wormhole", "blackhole"] = (
            "blackhole" if "blackhole" in ttnn.get_arch_name().lower() else "wormhole"
        )
    except RuntimeError as error:
        raise DeviceError(
            f"mesh {spec.name} needs {spec.num_chips} chips, but ttnn finds none {where} "
            f"({ttnn_message(error)}); run `ttserve doctor` to see what is missing"
        ) from error
    if num_chips < spec.num_chips:
        raise DeviceError(
            f"mesh {spec.name} needs {spec.num_chips} chips, but ttnn finds {num_chips} {where}; "
            "run `ttserve doctor` to see what this host has"
        )
    if spec.arch != kind:
        raise DeviceError(
            f"mesh {spec.name} has {spec.arch} chips, but those {where} are {kind}; "
            + (f"set mesh.arch: {kind}" if spec.board is None else "see `ttserve doctor`")
        )


def _open(spec: MeshSpec, fabric: dict[str, object], arguments: dict[str, object]) -> Any:  # noqa: ANN401 - ttnn is untyped
    try:
        if fabric:
            ttnn.set_fabric_config(**fabric)
        return ttnn.open_mesh_device(ttnn.MeshShape(*spec.shape), **arguments)
    except (RuntimeError, TypeError) as error:
        if fabric:
            _try_close(ttnn.set_fabric_config, ttnn.FabricConfig.DISABLED)
        raise DeviceError(f"ttnn cannot open mesh {spec.name}: {ttnn_message(error)}") from error


def _open_arguments(spec: MeshSpec, settings: MeshConfig) -> dict[str, object]:
    """Return the arguments of ``ttnn.open_mesh_device`` without the shape."""
    axis = settings.dispatch_core_axis or spec.dispatch_core_axis
    arguments = {
        "dispatch_core_config": ttnn.DispatchCoreConfig(
            axis=_member(ttnn.DispatchCoreAxis, axis.upper())
        ),
        "trace_region_size": settings.trace_region_size or 0,
        "l1_small_size": settings.l1_small_size,
    }
    if settings.worker_l1_size:
        arguments["worker_l1_size"] = settings.worker_l1_size
    return arguments


def _fabric(
    spec: MeshSpec, settings: MeshConfig, asked: Mapping[str, object] | None
) -> dict[str, object]:
    """Return the arguments of ``ttnn.set_fabric_config``; empty for one chip, without a fabric."""
    if spec.num_chips == 1:
        return {}
    arguments: dict[str, object] = {"config": spec.fabric, **(asked or {})}
    if settings.fabric is not None:
        arguments["config"] = settings.fabric
    kinds = {"config": ttnn.FabricConfig, "reliability_mode": ttnn.FabricReliabilityMode}
    for name, kind in kinds.items():
        value = arguments.get(name)
        if isinstance(value, str):
            arguments[name] = _member(kind, value)
    return arguments


def _member(kind: Any, name: str) -> object:  # noqa: ANN401 - an enum of ttnn
    members = kind.__members__
    if name not in members:
        raise ConfigError(f"ttnn has no {kind.__name__} {name!r}; use one of {', '.join(members)}")
    return members[name]


def _cut(shape: tuple[int, int], num_chips: int) -> tuple[int, int]:
    """Return the shape of submeshes: as flat as the mesh's rows and columns allow."""
    rows, cols = shape
    for height in range(1, rows + 1):
        width, rest = divmod(num_chips, height)
        if not rest and width and rows % height == 0 and cols % width == 0:
            return height, width
    raise ConfigError(f"a mesh of {rows} by {cols} cannot be cut into rectangles of {num_chips}")


def _try_close(close: Callable[[Any], object], what: object) -> bool:
    try:
        close(what)
    except RuntimeError as error:
        _LOG.error("ttnn failed to close %s: %s", what, ttnn_message(error))
        return False
    return True
