"""Exchange of rows between ranks that share out experts, by gloo.

Gloo's connections are neither authenticated nor encrypted: use them only on a private network.
"""

from __future__ import annotations

import datetime
import socket
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from replicas.errors import GangLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

# PyTorch's type stubs do not cover its C++ parts.
_distributed: Any = torch.distributed
_TIMEOUT = datetime.timedelta(days=1)
"""Effectively infinite. A rank in a dead exchange is ended by the hub's loss or by its parent."""


def open_store(host: str) -> tuple[Any, str]:
    """Create rank 0's rendezvous store for the ranks' addresses; return it and its "host:port"."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Pass a listening socket, because the store itself would listen on every address of the host.
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = _distributed.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=_TIMEOUT,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    return store, f"{host}:{port}"


def reach_store(address: str) -> Any:  # noqa: ANN401 - as above
    """Connect to rank 0's store at the address from `open_store`."""
    host, _, port = address.rpartition(":")
    return _distributed.TCPStore(host, int(port), is_master=False, timeout=_TIMEOUT)


class GlooExchange:
    """`Exchange` over gloo. Its constructor waits until all ranks call it.

    Owns the connections to the other ranks.

    Args:
        store: The store of rank 0.
        rank: Number of this rank.
        size: Number of ranks.
        host: Address of this host for the other ranks.
        explain: Called after a failed exchange; returns the best known reason.
        waiting: Context that is entered while this rank waits for the others.

    Attributes:
        rank: As given.
        size: As given.
    """

    def __init__(
        self,
        store: Any,  # noqa: ANN401 - as above
        rank: int,
        size: int,
        host: str,
        explain: Callable[[], str],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.rank, self.size = rank, size
        self._explain = explain
        self._waiting = waiting
        gloo = _distributed.ProcessGroupGloo
        options = gloo._Options()  # noqa: SLF001 - no other way to an address of one's own
        options._devices = [gloo.create_device(hostname=host)]  # noqa: SLF001
        options._timeout = _TIMEOUT  # noqa: SLF001
        self._group = gloo(store, rank, size, options)

    def counts(self, counts: torch.Tensor) -> torch.Tensor:
        """Send each rank its part of some numbers; return the parts sent to this rank."""
        asked = torch.empty_like(counts)
        self._send(asked, counts, [], [])
        return asked

    def rows(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """Send each rank some rows."""
        arrived = rows.new_empty(sum(received), rows.shape[1])
        # Sent as bytes, because gloo does not support every dtype.
        as_bytes = arrived.view(torch.uint8), rows.contiguous().view(torch.uint8)
        self._send(*as_bytes, list(received), list(sent))
        return arrived

    def _send(
        self, arrived: torch.Tensor, sent: torch.Tensor, counts: list[int], sizes: list[int]
    ) -> None:
        try:
            with self._waiting():
                self._group.alltoall_base(arrived, sent, counts, sizes).wait()
        except RuntimeError as error:
            raise GangLostError(f"the gang's exchange failed: {self._explain()}") from error
