"""Read access to an engine's KV memory for other engines of its host.

A region is an anonymous file (memfd): it has no name anywhere and is gone with the last process
that holds it, however that ends. Its owner maps it writable and then seals it. A process that
receives the descriptor can map it only for reading, and the file never shrinks under the reader. It
is handed out over an abstract Unix socket, which leaves no file behind either, to processes of the
same user in the same network namespace. The receiver checks all of it before use.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import secrets
import selectors
import socket
import weakref
from collections import deque
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from kv_transfer.errors import InvalidLayoutError, SharedMemoryError, TransferError, WireError
from kv_transfer.host_blocks import HostBlocks
from kv_transfer.host_memory import reserve
from kv_transfer.layout import KVLayout
from kv_transfer.peer_user import peer_user_id, receive_descriptor

logger = logging.getLogger(__name__)

MAX_REGION_LAYOUT_BYTES = 128 << 10
"""Most bytes of an encoded ``RegionLayout``; a message of the socket must fit its buffer."""

_F_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1; ``fcntl`` has no name for it."""

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE

_ADDRESS = re.compile(r"shm://([0-9a-f]{32})")

_BACKLOG = 1024
"""Connections that may wait while the owner's thread is busy; the kernel refuses more."""

_MAX_ACCEPTS = 256
"""Connections accepted in one call, so that a flood of them leaves time for other work."""

_MAX_WAITING = 256
"""Connections that may wait to show a ticket; above it the oldest is closed."""

_MAX_SHOWN_BYTES = 4096

_MAX_POPULATE_BYTES = 1 << 30
"""Larger regions are paged in as they are read: populating them would block for too long."""

_ADVICE = "make the KV cache smaller (kv_cache_memory_bytes), or serve without sharing it"

_Number = Annotated[int, Meta(ge=0, lt=1 << 56)]
_Count = Annotated[int, Meta(gt=0, lt=1 << 31)]


class RegionLayout(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Places of the pieces of every lane's blocks in a region.

    Attributes:
        block_size: Tokens of a block.
        num_blocks: Blocks of a lane.
        content_hash: ``KVLayout.content_hash()`` of the owner.
        offsets: Per lane, per piece (layer, plane): byte offset of its first block. The others
            follow without gaps.
    """

    block_size: _Count
    num_blocks: _Count
    content_hash: Annotated[str, Meta(min_length=1, max_length=128)]
    offsets: Annotated[tuple[tuple[_Number, ...], ...], Meta(min_length=1)]


_decoder = msgspec.msgpack.Decoder(RegionLayout)


class SharedRegion:
    """Memory that other processes may map for reading.

    Owner: the process that created it. The memory is mapped until the last array over it is gone.
    """

    def __init__(self, fd: int, memory: NDArray[np.uint8]) -> None:
        """Own a sealed descriptor and its writable mapping; use ``create``."""
        self._fd = fd
        self._memory = memory
        self._close = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, num_bytes: int) -> "SharedRegion":
        """Make a region of zeros, all of it in memory already.

        A shortage of memory must show now, not as a dead process in the middle of a request.

        Raises:
            SharedMemoryError: There is not that much; says both numbers.
            TransferError: The host lacks sealed anonymous files.
        """
        fd = -1
        try:
            fd = os.memfd_create("ttserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            reserve(fd, num_bytes, purpose="KV blocks", advice=_ADVICE)
            memory = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except (OSError, ValueError, SharedMemoryError) as error:
            if fd >= 0:
                os.close(fd)
            if isinstance(error, SharedMemoryError):
                raise
            raise TransferError(f"cannot share memory for KV blocks: {error}; {_ADVICE}") from error
        return cls(fd, np.frombuffer(memory, np.uint8))

    @property
    def memory(self) -> NDArray[np.uint8]:
        """Memory of the region, (num_bytes,) uint8, writable."""
        return self._memory

    @property
    def fd(self) -> int:
        """Descriptor to hand out; -1 once closed."""
        return self._fd if self._close.alive else -1

    def close(self) -> None:
        """Close the descriptor: no further process gets it. Idempotent; arrays stay valid."""
        self._close()


class RegionServer:
    """Server that hands a region to processes of the same user that show a ticket.

    The ticket matters because a region cannot be handed out in parts: a process that may fetch one
    request's KV can then read all of it. So only processes that the cluster's router has named get
    it.

    Owner: its sockets, used from one thread. It never blocks. A peer may take its time to show a
    ticket while there is room for other peers, and an answer waits in the peer's own buffer.
    """

    def __init__(
        self,
        region: SharedRegion,
        region_layout: RegionLayout,
        admits: Callable[[bytes], bool],
    ) -> None:
        """Listen under a new random name.

        Args:
            region: Region to hand out; it must stay open.
            region_layout: Its layout.
            admits: Returns whether a sealed ticket permits access.

        Raises:
            TransferError: The layout is too long for one message, or no socket can be had.
        """
        self._region = region
        self._admits = admits
        self._waiting: deque[socket.socket] = deque()
        self._frame = msgspec.msgpack.encode(region_layout)
        if len(self._frame) > MAX_REGION_LAYOUT_BYTES:
            raise TransferError(
                f"a region layout of {len(self._frame)} bytes; the limit is "
                f"{MAX_REGION_LAYOUT_BYTES}: use fewer lanes"
            )
        name = secrets.token_hex(16)
        self._address = f"shm://{name}"
        self._socket = _make_socket()
        # Closed for the moment in which a process without free descriptors has to refuse a peer: a
        # connection that is never accepted would wake the thread for ever.
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._poller = selectors.EpollSelector()
        try:
            self._socket.bind(_socket_name(name))
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._socket.close()
            raise TransferError(f"cannot listen on {self._address}: {error}") from error
        self._poller.register(self._socket, selectors.EVENT_READ)

    @property
    def address(self) -> str:
        """Address of this server: ``shm://`` and 32 random hexadecimal digits."""
        return self._address

    def fileno(self) -> int:
        """Return the descriptor to poll for reading; then call ``serve``."""
        return self._poller.fileno()

    def serve(self) -> None:
        """Answer the waiting peers; never blocks, and no peer can make it raise."""
        # Twice: most peers have shown their ticket by the time they are accepted.
        for _ in range(2):
            for key, _ in self._poller.select(0):
                if key.fileobj is self._socket:
                    self._accept()
                elif key.fileobj in self._waiting:  # Not if it was just closed to make room.
                    assert isinstance(key.fileobj, socket.socket)
                    self._answer(key.fileobj)
                    self._waiting.remove(key.fileobj)
                    self._hang_up(key.fileobj)

    def close(self) -> None:
        """Stop listening; idempotent. Peers that were answered keep their descriptor."""
        while self._waiting:
            self._waiting.popleft().close()
        self._poller.close()
        self._socket.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTS):
            try:
                peer, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                logger.warning(
                    "cannot accept an engine for shared KV memory, so it is sent payload: %s", error
                )
                if error.errno in {errno.EMFILE, errno.ENFILE}:
                    self._turn_away()
                return
            peer.setblocking(False)
            if len(self._waiting) >= _MAX_WAITING:
                self._hang_up(self._waiting.popleft())
            self._waiting.append(peer)
            self._poller.register(peer, selectors.EVENT_READ)

    def _turn_away(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with contextlib.suppress(OSError):
            self._socket.accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _hang_up(self, peer: socket.socket) -> None:
        self._poller.unregister(peer)
        peer.close()

    def _answer(self, peer: socket.socket) -> None:
        # Does not block: the connection's buffer is empty. The kernel keeps the answer for the peer
        # after the connection is closed here.
        try:
            if not _is_ours(peer):
                logger.warning("refused shared KV memory to a process of another user")
                return
            shown = peer.recv(_MAX_SHOWN_BYTES)
            if not self._admits(shown):
                logger.warning("refused shared KV memory to a process without a valid ticket")
                return
            socket.send_fds(peer, [self._frame], [self._region.fd])
        except OSError as error:
            logger.warning(
                "cannot share KV memory with an engine, so it is sent payload: %s", error
            )


class MappedRegion:
    """Region of another process, untrusted until ``lanes`` has checked it.

    Owner: its descriptor. The memory is mapped until the last array over it is gone, so it stays
    readable when the other process dies.
    """

    def __init__(self, fd: int, frame: bytes) -> None:
        """Own a descriptor.

        Args:
            fd: Descriptor that claims to be a region.
            frame: Bytes that claim to be its ``RegionLayout``.
        """
        self._fd = fd
        self._frame = frame
        self._close = weakref.finalize(self, os.close, fd)

    def lanes(self, layout: KVLayout) -> list[HostBlocks]:
        """Map the region and return the blocks of every lane.

        Args:
            layout: This engine's. The other's block size may differ: the blocks returned have it in
                their layout.

        Returns:
            One per lane, read-only.

        Raises:
            WireError: It is no sealed region, its layout breaks the protocol or does not fit into
                it, or its contents are not laid out as this engine's.
        """
        region = _decode(self._frame)
        if region.content_hash != layout.content_hash():
            raise WireError("the region's KV layout differs from this engine's")
        if any(len(offsets) != layout.num_pieces for offsets in region.offsets):
            raise WireError(f"the region lacks {layout.num_pieces} pieces in every lane")
        theirs = _with_block_size(layout, region.block_size)
        memory = self._map()
        try:
            return [
                HostBlocks.within(theirs, memory, offsets, region.num_blocks)
                for offsets in region.offsets
            ]
        except ValueError as error:
            raise WireError(f"the region is smaller than its layout says: {error}") from error

    def close(self) -> None:
        """Close the descriptor; idempotent. The blocks from ``lanes`` stay valid."""
        self._close()

    def _map(self) -> NDArray[np.uint8]:
        try:
            # Without these seals the owner could shrink the file: a read would raise SIGBUS.
            if fcntl.fcntl(self._fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise WireError("the region is not sealed")
            num_bytes = os.fstat(self._fd).st_size
            flags = mmap.MAP_SHARED
            if num_bytes <= _MAX_POPULATE_BYTES:
                flags |= mmap.MAP_POPULATE
            return np.frombuffer(mmap.mmap(self._fd, num_bytes, flags, mmap.PROT_READ), np.uint8)
        except (OSError, ValueError, OverflowError) as error:
            raise WireError(f"cannot map the region: {error}") from error


class RegionFetch:
    """Request to a ``RegionServer`` for its region, without blocking and without a deadline.

    Owner: its socket, used from one thread.
    """

    def __init__(self, address: str, ticket: bytes) -> None:
        """Send the request; errors show in ``poll``.

        Args:
            address: The server's.
            ticket: A sealed ticket of a transfer from there.
        """
        self._socket: socket.socket | None = None
        match = _ADDRESS.fullmatch(address)
        if match is None:
            return
        # For this kind of socket, connect() succeeds or fails at once.
        peer: socket.socket | None = None
        try:
            peer = _make_socket()
            peer.connect(_socket_name(match[1]))
            if _is_ours(peer):
                peer.send(ticket)
                self._socket, peer = peer, None
        except OSError as error:
            logger.debug("no shared KV memory at %s: %s", address, error)
        if peer is not None:
            peer.close()

    def fileno(self) -> int:
        """Return the descriptor to poll while ``poll`` returns "waiting"; -1 afterwards."""
        return -1 if self._socket is None else self._socket.fileno()

    def poll(self) -> Literal["waiting", "failed"] | MappedRegion:
        """Return the state of the request, or the region.

        Returns:
            "waiting" while the server has not answered; "failed" when there is none, it is another
            user's or it went away; else the region, once, which the caller must close.
        """
        if self._socket is None:
            return "failed"
        try:
            frame, fd = receive_descriptor(self._socket, MAX_REGION_LAYOUT_BYTES)
        except BlockingIOError:
            return "waiting"
        except OSError as error:
            logger.debug("shared KV memory was not handed out: %s", error)
            frame, fd = b"", None
        self.close()
        return "failed" if fd is None else MappedRegion(fd, frame)

    def close(self) -> None:
        """Close the connection; idempotent. Does not affect a region that ``poll`` returned."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _make_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made


def _socket_name(name: str) -> str:
    return f"\0ttserve-kv-{name}"


def _is_ours(peer: socket.socket) -> bool:
    """Return whether the other end of a connection is a process of this user."""
    return peer_user_id(peer) == os.geteuid()


def _decode(frame: bytes) -> RegionLayout:
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"not the layout of a region: {error}") from error


def _with_block_size(layout: KVLayout, block_size: int) -> KVLayout:
    try:
        return msgspec.structs.replace(layout, block_size=block_size)
    except InvalidLayoutError as error:
        raise WireError(f"the region has impossible blocks: {error}") from error
