"""Worker and executor of an engine in a gang, which computes only in the gang's turns.

An idle engine has declared that it has no batch: a turn of the others wakes it, and it serves their
tokens with its experts.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

from replicas.engine.worker import Worker
from replicas.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from collections.abc import Callable

    from replicas.config import EngineConfig
    from replicas.engine.hooks import EngineHooks
    from replicas.gang.lockstep import Turn
    from replicas.gang.rank import GangRank
    from replicas.generators.protocol import SupportsGang
    from replicas.watchdog import Watchdog


class GangWorker(Worker):
    """A worker whose model has its experts on all ranks.

    Args:
        config: The engine's configuration.
        incarnation: Id of this start of the engine.
        notify: As for `Worker`.
        progress: As for `Worker`.
        hooks: As for `Worker`.
        gang: Connection to the gang.
    """

    def __init__(
        self,
        config: EngineConfig,
        incarnation: str,
        notify: Callable[[], None],
        progress: Callable[[str, float], None],
        hooks: EngineHooks,
        gang: GangRank,
    ) -> None:
        super().__init__(config, incarnation, notify, progress, hooks)
        self._gang = gang

    def serve(self) -> None:
        """Take part in the forward pass of other ranks."""
        cast("SupportsGang", self._generator).forward_idle()

    def _cpu_platform(self) -> CpuPlatform:
        return CpuPlatform(self._config, self._hf_config, self._progress, self._gang.join)


class GangExecutor:
    """An executor that runs one worker on the caller's thread, its batches in the gang's turns.

    Args:
        worker: The worker.
        rank: Connection to the gang.
        watchdog: Records each turn's largest batch, which decides how long the turn takes.

    Attributes:
        rank: As given.
    """

    def __init__(self, worker: GangWorker, rank: GangRank, watchdog: Watchdog) -> None:
        self._worker = worker
        self.rank = rank
        self._watchdog = watchdog

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:  # noqa: ANN401 - as they come
        """Call a method of the worker; a step with a batch first waits for its turn."""
        if method == "submit_step" and args[0] is not None:
            # Waiting for a turn must not count as the duration of one.
            self._watchdog.compute(0)
            self._begin(self.rank.compute(sum(args[0].num_scheduled_tokens), self._serve))
        return [getattr(self._worker, method)(*args)]

    def follow(self) -> None:
        """Take part in a turn of other ranks, if one has started."""
        self.rank.follow(self._serve)

    def _serve(self, turn: Turn) -> None:
        self._begin(turn)
        self._worker.serve()
        self._watchdog.work(time.monotonic())

    def _begin(self, turn: Turn) -> None:
        self._watchdog.work(time.monotonic())
        self._watchdog.compute(turn.largest)
