"""State shared by the parts of a connector's worker side. Pure."""

from dataclasses import dataclass, field

from kv_transfer.config import TransferConfig
from kv_transfer.connector import Failure, KVDeviceIO, TransferResults, TransferStats


@dataclass(slots=True, eq=False)
class EndedTransfers:
    """Ends of transfers that are not reported yet; the fields are those of `TransferResults`."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: dict[str, Failure] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    converted: set[str] = field(default_factory=set)

    def __contains__(self, request_id: str) -> bool:
        """Return whether the end of a request's transfer is waiting to be reported."""
        return any(request_id in ended for ended in (self.sent, self.received, self.failed))

    def drain(self) -> TransferResults:
        """Return all of it and clear it."""
        results = TransferResults(
            sent=frozenset(self.sent),
            received=frozenset(self.received),
            failed=dict(self.failed),
            found=dict(self.found),
            converted=frozenset(self.converted),
        )
        for reported in (self.sent, self.received, self.failed, self.found, self.converted):
            reported.clear()
        return results


@dataclass(slots=True, eq=False, kw_only=True)
class TransferContext:
    """State shared by the parts of a worker side. Owner: the worker, on the engine's core thread.

    Attributes:
        io: The KV cache.
        config: Sizes and deadlines.
        ended: Ends that are not reported yet.
        totals: Counters since start.
    """

    io: KVDeviceIO
    config: TransferConfig
    ended: EndedTransfers = field(default_factory=EndedTransfers)
    totals: TransferStats = field(default_factory=TransferStats.empty)
