"""Hold every constant of a transfer in one frozen value.

Times are seconds on the monotonic clock of the process that waits; no clock is compared between
hosts.
"""

import msgspec


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deadlines, sizes and limits of the point-to-point connector.

    Attributes:
        lease_s: A producer keeps blocks this long after the last sign of life of their consumer.
        renew_s: Longest time between two such signs while a consumer waits.
        rendezvous_s: How long a producer waits for the first FETCH, and a consumer for a producer
            that knows the transfer.
        no_progress_s: A consumer gives up after this much silence of the producer's process.
        no_data_s: A consumer gives up when the producer answers, has blocks ready and credit to
            send them, and still sends none for this long (its core is stuck in one step).
        closing_s: How long an unacknowledged DONE or CANCEL is repeated.
        chunk_bytes: Aim for the payload of one DATA message; always whole blocks, at least one.
        window_bytes: Most payload bytes in flight for one transfer; at least one chunk.
        max_inflight_bytes: Above this sum over all loads a load's window shrinks to one chunk.
        max_bytes_per_call: Most bytes copied out of or into KV memory in one connector call.
        heartbeat_s: Interval of the transport's own heartbeats.
        heartbeat_timeout_s: Silence after which the transport drops a connection.
    """

    lease_s: float = 30.0
    renew_s: float = 5.0
    rendezvous_s: float = 120.0
    no_progress_s: float = 5.0
    no_data_s: float = 60.0
    closing_s: float = 10.0
    chunk_bytes: int = 1 << 20
    window_bytes: int = 8 << 20
    max_inflight_bytes: int = 128 << 20
    max_bytes_per_call: int = 64 << 20
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.renew_s >= self.lease_s:
            raise ValueError(
                f"renew_s ({self.renew_s}) must be shorter than lease_s ({self.lease_s})"
            )

    @property
    def probe_s(self) -> float:
        """Seconds between two RENEWs: often enough for the lease and for noticing silence."""
        return min(self.renew_s, self.no_progress_s / 3)

    def chunk_blocks(self, bytes_per_block: int) -> int:
        """Return how many blocks of this size one DATA message carries at most."""
        return max(1, self.chunk_bytes // bytes_per_block)

    def window_blocks(self, bytes_per_block: int) -> int:
        """Return how many blocks of one transfer may be in flight at most."""
        return max(self.chunk_blocks(bytes_per_block), self.window_bytes // bytes_per_block)
