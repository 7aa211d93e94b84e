"""The point-to-point connector, with a record of when its stages happened.

An engine finds it by its name, ``RECORDING_CONNECTOR``, and the file to append to in its
environment. Everything is the production's; a line of the record costs some microseconds of the
core thread, and is written when a stage has ended. Times are of the monotonic clock, which all
processes of a host share.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import msgspec

from kv_transfer.p2p import P2PConnector
from kv_transfer.p2p_worker import P2PConnectorWorker, P2PMeta
from kv_transfer.transports.zmq import ZmqTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.connector import ConnectorMeta, ConnectorSettings, TransferResults

RECORDING_CONNECTOR = f"{__name__}:RecordingConnector"
RECORD_VARIABLE = "TTSERVE_KV_RECORD"


class Stage(msgspec.Struct, frozen=True):
    """One line of the record.

    Attributes:
        event: "computed" (the step that computed these tokens is over, and its outputs are sent),
            "loading" (the load began), "committed" (the request may run), "sent" (delivered).
        request_id: The request.
        at_s: When.
        num_tokens: With "computed": tokens whose KV is in the cache.
        stages: With "committed" and "sent": seconds of each stage, over all transfers so far.
    """

    event: str
    request_id: str
    at_s: float
    num_tokens: int = 0
    stages: dict[str, float] = {}


class _Worker(P2PConnectorWorker):
    """The worker side; appends to the record."""

    def __init__(self, settings: ConnectorSettings, notify: Callable[[], None]) -> None:
        super().__init__(settings, notify, ZmqTransport)
        self._record = open(os.environ[RECORD_VARIABLE], "ab", buffering=0)  # noqa: SIM115

    def start_load_kv(self, meta: ConnectorMeta, now_s: float) -> None:
        """Record the loads that begin."""
        if isinstance(meta, P2PMeta):
            for load in meta.loads:
                self._note(Stage("loading", load.ticket.request_id, time.monotonic()))
        super().start_load_kv(meta, now_s)

    def mark_ready(self, meta: ConnectorMeta, now_s: float) -> None:
        """Record computed tokens."""
        at_s = time.monotonic()
        super().mark_ready(meta, now_s)
        if isinstance(meta, P2PMeta):
            for save in meta.saves:
                stage = Stage("computed", save.request_id, at_s, save.num_computed_tokens)
                self._note(stage)

    def get_transfer_results(self, now_s: float) -> TransferResults:
        """Record ended transfers."""
        results = super().get_transfer_results(now_s)
        if results.received or results.sent:
            at_s = time.monotonic()
            stages = {name: stage.total_s for name, stage in self.stats(at_s).stages.items()}
            for event, ended in (("committed", results.received), ("sent", results.sent)):
                for request_id in ended:
                    self._note(Stage(event, request_id, at_s, 0, stages))
        return results

    def close(self, deadline_s: float) -> None:
        """Close the record too."""
        super().close(deadline_s)
        self._record.close()

    def _note(self, stage: Stage) -> None:
        self._record.write(msgspec.json.encode(stage) + b"\n")


class RecordingConnector(P2PConnector):
    """``p2p`` with a recording worker side (see ``KVConnector``)."""

    def create_worker(
        self, settings: ConnectorSettings, notify: Callable[[], None]
    ) -> P2PConnectorWorker:
        """Make the recording worker side."""
        return _Worker(settings, notify)
