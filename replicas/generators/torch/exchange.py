"""The exchange of rows between ranks that share out experts, by gloo.

Gloo's connections prove nothing and hide nothing: they belong on a network that nobody else is on.
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

# PyTorch's own types say nothing of what its C++ has.
_distributed: Any = torch.distributed
_TIMEOUT = datetime.timedelta(days=1)
"""Never: who waits in vain is told of a loss, or is ended by whoever watches it."""


def open_store(host: str) -> tuple[Any, str]:
    """What ranks tell each other to connect, kept by rank 0; with its "host:port"."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The store by itself listens on every address of the host.
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = _distributed.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=_TIMEOUT,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    return store, f"{host}:{port}"


def reach_store(address: str) -> Any:  # noqa: ANN401 - as above
    """Return the store of rank 0, as `open_store` has said where."""
    host, _, port = address.rpartition(":")
    return _distributed.TCPStore(host, int(port), is_master=False, timeout=_TIMEOUT)


class GlooExchange:
    """See the module docstring; made on all ranks at once, and waits for all.

    Owner: the connections to the other ranks.

    Args:
        store: That of rank 0.
        rank: This one's number.
        size: How many there are.
        host: This host's address for the others.
        explain: Called when an exchange has failed: the reason, as far as anybody knows.
        waiting: Is entered for as long as it is for the others to get on.

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
        """See `Exchange.counts`."""
        asked = torch.empty_like(counts)
        self._send(asked, counts, [], [])
        return asked

    def rows(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """See `Exchange.rows`."""
        arrived = rows.new_empty(sum(received), rows.shape[1])
        # As bytes: gloo need not know the dtype.
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
            raise GangLostError(f"the gang's ranks cannot go on: {self._explain()}") from error
