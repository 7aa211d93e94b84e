"""Engine core's side of the KV connector: reports steps to it and applies ended transfers.

Owner: the engine core. Transfers belong to the connector and sequences to the scheduler; no state
is kept here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_transfer.connector import SaveProgress, TransferStats
from replicas.messages import KVLoaded, KVTransfers

if TYPE_CHECKING:
    from kv_transfer.connector import (
        ConnectorMeta,
        Failure,
        KVConnectorScheduler,
        TransferInfo,
        TransferResults,
    )
    from replicas.engine.executor import Executor
    from replicas.engine.outputs import ClientEvents
    from replicas.engine.scheduler import Scheduler
    from replicas.engine.sequence import Sequence
    from replicas.engine.step import ScheduledBatch


class Transfers:
    """Link between the scheduler, the connector and clients' events.

    Args:
        connector: Scheduler side of the connector; None in an engine without one.
        executor: Access to the connector's worker side.
        scheduler: Scheduler of the sequences that load KV or are fetched.
        events: Receives the results of loads for clients.
    """

    def __init__(
        self,
        connector: KVConnectorScheduler | None,
        executor: Executor,
        scheduler: Scheduler,
        events: ClientEvents,
    ) -> None:
        self.connector = connector
        self._executor = executor
        self._scheduler = scheduler
        self._events = events

    @property
    def are_at_stake(self) -> bool:
        """Return whether a transfer is under way or pending."""
        return self.connector is not None and (
            self.connector.num_inflight > 0
            or self.connector.has_pending_work()
            or self._scheduler.awaits_connector
        )

    def meta(self, batch: ScheduledBatch | None) -> ConnectorMeta | None:
        """Return the connector's part of the step, or None if it has nothing to do."""
        if self.connector is None:
            return None
        progress = []
        if batch is not None:
            progress = [
                SaveProgress(
                    s.request_id,
                    s.place.dp_group,
                    tuple(map(tuple, s.place.block_ids)),
                    num_tokens,
                    self._scheduler.first_positions(s),
                )
                for s, num_tokens in self._scheduler.progress(batch)
            ]
        if not progress and not self.are_at_stake:
            return None
        return self.connector.build_connector_meta(progress)

    def end_step(self, meta: ConnectorMeta, now_s: float) -> bool:
        """Serve transfers, then apply those that ended: free blocks, continue sequences.

        Returns:
            Whether a transfer ended, or the connector needs another step.
        """
        assert self.connector is not None
        results: TransferResults = self._executor.collective_rpc("end_step", meta, now_s)[0]
        transfers = self.connector.update_connector_output(results)
        # Sorted, so that the order of effects does not depend on a set.
        for request_id in sorted(transfers.sent):
            self._scheduler.release_held(request_id)
        ended: dict[str, Failure | None] = dict.fromkeys(sorted(transfers.received))
        for request_id, failure in (*ended.items(), *transfers.failed.items()):
            is_converted = request_id in transfers.converted
            self._report_load(
                self._scheduler.kv_ended(request_id, failure, now_s, is_converted=is_converted)
            )
        return bool(results) or self.connector.has_pending_work()

    def stats(self, now_s: float) -> TransferStats:
        """Return totals and gauges of the worker side."""
        stats: TransferStats | None = self._executor.collective_rpc("transfer_stats", now_s)[0]
        return stats if stats is not None else TransferStats()

    def view(self, now_s: float, *, has_store: bool) -> KVTransfers:
        """Return the transfers under way, and the blocks that they hold."""
        transfers: list[TransferInfo] = self._executor.collective_rpc("transfers", now_s)[0]
        stats = self.stats(now_s)
        return KVTransfers(
            transfers=transfers,
            num_leased_blocks=stats.num_leased_blocks,
            num_reserved_blocks=stats.num_reserved_blocks,
            num_quarantined_blocks=stats.num_quarantined_blocks,
            store=stats.store if has_store else None,
        )

    def _report_load(self, seq: Sequence | None) -> None:
        if seq is None:
            return
        assert seq.load is not None
        self._events[seq.client].append(KVLoaded(seq.request_id, seq.load.epoch, seq.load.failure))
        if seq.is_over:
            self._events.fail_transfer(seq)
