"""Hold every constant of a transfer in one frozen value.

Times are seconds on the monotonic clock of the process that waits; no clock is compared between
hosts.
"""

from typing import Literal

import msgspec

KVNetwork = Literal["encrypted", "plain"]
"""How KV travels between hosts."""


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
        chunk_bytes: Aim for the payload of one DATA message; always whole rows, at least one.
        window_bytes: Most payload bytes in flight for one transfer; at least four chunks, so that
            reading, sending, receiving and writing have one each.
        mapped_chunk_bytes: Aim for what one message tells of where the consumer reads the
            producer's memory, and its window: nothing is in flight there, so that both are larger.
        verify: Whether what is read in another process's memory is compared with digests that the
            owner computed. Payload that travels is always checked.
        max_inflight_bytes: Above this sum over all loads a load's window shrinks to one chunk.
        copy_s: How long one engine step may copy KV at least, over all transfers and both ways.
        copy_share: A step that computes for long may copy for this share of that time.
    """

    lease_s: float = 30.0
    renew_s: float = 5.0
    rendezvous_s: float = 120.0
    no_progress_s: float = 5.0
    no_data_s: float = 60.0
    closing_s: float = 10.0
    chunk_bytes: int = 4 << 20
    window_bytes: int = 16 << 20
    mapped_chunk_bytes: int = 64 << 20
    verify: bool = True
    max_inflight_bytes: int = 128 << 20
    copy_s: float = 0.01
    copy_share: float = 0.5

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name != "verify" and getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.renew_s >= self.lease_s:
            raise ValueError(
                f"renew_s ({self.renew_s}) must be shorter than lease_s ({self.lease_s})"
            )

    def with_half_of_a_step(self) -> "TransferConfig":
        """Return this for one of two that share the time in which a step may copy."""
        return msgspec.structs.replace(self, copy_s=self.copy_s / 2, copy_share=self.copy_share / 2)

    @property
    def probe_s(self) -> float:
        """Seconds between two RENEWs: often enough for the lease and for noticing silence."""
        return min(self.renew_s, self.no_progress_s / 3)

    def chunk_rows(self, row_bytes: int) -> int:
        """Return how many rows of this size one DATA message carries at most."""
        return max(1, self.chunk_bytes // row_bytes)

    def window_rows(self, row_bytes: int) -> int:
        """Return how many rows of one transfer may be in flight at most."""
        return max(4 * self.chunk_rows(row_bytes), self.window_bytes // row_bytes)

    def mapped_chunk_rows(self, row_bytes: int) -> int:
        """Return how many rows one MAPPED message tells of at most."""
        return max(1, self.mapped_chunk_bytes // row_bytes)
