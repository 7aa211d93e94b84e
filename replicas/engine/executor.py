"""Executor: the engine core's only access to its workers.

Today there is one worker, in this process. Several processes for tensor and pipeline parallelism
would get the same calls, which is why arguments and results are plain values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from replicas.engine.hooks import NO_HOOKS
from replicas.engine.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from replicas.config import EngineConfig
    from replicas.engine.hooks import EngineHooks


class Executor(Protocol):
    """Access to the workers; every worker gets every call."""

    def collective_rpc(self, method: str, *args: object) -> list[Any]:
        """Call a method of every worker and return their results in rank order.

        Args:
            method: Name of a public method of `Worker`.
            *args: Its arguments.
        """
        ...


class UniProcExecutor:
    """An executor that runs one worker on the caller's thread.

    Args:
        config: The engine's configuration.
        incarnation: Random id of this start.
        notify: Called from any thread when a step is due although no message came.
        progress: Called with (stage, fraction done) while the model loads.
        hooks: What a simulation replaces.
    """

    def __init__(
        self,
        config: EngineConfig,
        incarnation: str = "local",
        notify: Callable[[], None] = lambda: None,
        progress: Callable[[str, float], None] = lambda _stage, _fraction: None,
        hooks: EngineHooks = NO_HOOKS,
    ) -> None:
        self._worker = Worker(config, incarnation, notify, progress, hooks)

    def collective_rpc(self, method: str, *args: object) -> list[Any]:
        """Call a method of the worker and return its result in a list."""
        return [getattr(self._worker, method)(*args)]
