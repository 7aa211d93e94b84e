"""Constants of a transfer, in one frozen value.

Times are seconds on the monotonic clock of the process that waits. Clocks of two hosts are never
compared.
"""

from typing import Literal

import msgspec

KVNetwork = Literal["encrypted", "plain"]
"""Protection of KV that travels between hosts."""


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deadlines, sizes and limits of the point-to-point connector.

    Attributes:
        lease_s: How long a producer keeps blocks after the last sign of life of their consumer.
        renew_s: Longest time between two such signs while a consumer waits.
        rendezvous_s: How long a producer waits for the first FETCH, and a consumer for a producer
            that knows the transfer.
        no_progress_s: A consumer gives up after this much silence of the producer's process.
        no_data_s: A consumer gives up when the producer answers, has rows ready and credit to
            send them, and sends none for this long (its core hangs in one step).
        closing_s: How long an unacknowledged DONE or CANCEL is repeated.
        chunk_bytes: Target payload size of one DATA message; always whole rows, at least one.
        window_bytes: Most payload bytes in flight for one transfer. At least four chunks, one each
            for reading, sending, receiving and writing.
        mapped_chunk_bytes: Target size of the rows that one MAPPED message announces on the path
            ``shared``. Larger than ``chunk_bytes``, because no payload is in flight there.
        verify: Whether rows read in another process's memory are compared with digests that the
            owner computed. Payload that travels is always checked.
        max_inflight_bytes: Above this sum over all loads a load's window shrinks to one chunk.
        copy_s: Seconds that every engine step may copy KV, over all transfers in both directions.
        copy_share: Share of a step's computing time that may be copied for, if that is longer.
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
        """Return this configuration for one of two connectors that share a step's copying time."""
        return msgspec.structs.replace(self, copy_s=self.copy_s / 2, copy_share=self.copy_share / 2)

    @property
    def probe_s(self) -> float:
        """Seconds between two RENEWs: short enough to keep the lease and to notice silence."""
        return min(self.renew_s, self.no_progress_s / 3)

    def chunk_rows(self, row_bytes: int) -> int:
        """Return the most rows of this size that one DATA message carries."""
        return max(1, self.chunk_bytes // row_bytes)

    def window_rows(self, row_bytes: int) -> int:
        """Return the most rows of one transfer that may be in flight."""
        return max(4 * self.chunk_rows(row_bytes), self.window_bytes // row_bytes)

    def mapped_chunk_rows(self, row_bytes: int) -> int:
        """Return the most rows that one MAPPED message announces."""
        return max(1, self.mapped_chunk_bytes // row_bytes)
