"""Both halves of one engine's transfers behind one interface, for transports.

A transport submits commands, passes in messages and advances time; it takes out messages to send
and events for the core. Pure, like the two state machines that it joins.
"""

from kv_transfer.connector import ConnectorSettings
from kv_transfer.consumer import ConsumerSessions
from kv_transfer.layout import RowLayout
from kv_transfer.messages import PayloadPath
from kv_transfer.producer import ProducerSessions
from kv_transfer.transport import (
    CancelLoad,
    CancelSend,
    Chunk,
    Command,
    Consumed,
    Event,
    MappedChunk,
    Offer,
    ProducerRoute,
    Ready,
    Spoiled,
    StartLoad,
    WireCounters,
)


class TransferSessions:
    """Transfers of one engine, in either role.

    Owner: the transport's thread.

    Attributes:
        producer: The transfers that it produces.
        consumer: The transfers that it consumes.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        layout: RowLayout,
        counters: WireCounters,
        paths: frozenset[PayloadPath] = frozenset({"inline"}),
    ) -> None:
        """Start without transfers.

        Args:
            settings: The engine's.
            layout: Layout of its blocks.
            counters: Where to count.
            paths: Paths by which this engine can give its payload away.
        """
        self._layout = layout
        self.producer = ProducerSessions(settings, layout, counters, paths)
        self.consumer = ConsumerSessions(settings, counters)

    def apply(self, command: Command, now_s: float) -> None:
        """Carry out a command of the core; a ``StartLoad`` goes to the ticket's first endpoint."""
        if isinstance(command, Chunk | MappedChunk):
            self.producer.send_chunk(command, now_s)
        elif isinstance(command, Consumed):
            self.consumer.consumed(command.transfer_id, command.num_rows, now_s)
        elif isinstance(command, Spoiled):
            self.consumer.spoiled(command.transfer_id, command.first_row, command.num_rows, now_s)
        elif isinstance(command, Ready):
            self.producer.ready(command.transfer_id, command.num_rows, now_s)
        elif isinstance(command, Offer):
            self.producer.offer(command.ticket, now_s)
        elif isinstance(command, StartLoad):
            self.load(command, ProducerRoute(command.ticket.producer_endpoints[0]), now_s)
        elif isinstance(command, CancelSend):
            self.producer.cancel(command.transfer_id)
        elif isinstance(command, CancelLoad):
            self.consumer.cancel(command.transfer_id, now_s)

    def load(self, command: StartLoad, route: ProducerRoute, now_s: float) -> None:
        """Start a load by a route that the transport has found."""
        self.consumer.load(command, route, self._layout.num_rows(command.ticket.num_tokens), now_s)

    def tick(self, now_s: float) -> None:
        """Handle the deadlines of both roles."""
        self.producer.tick(now_s)
        self.consumer.tick(now_s)

    def next_deadline_s(self) -> float | None:
        """Return the time of the next ``tick``, or None."""
        deadlines = (self.producer.next_deadline_s(), self.consumer.next_deadline_s())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def take_events(self) -> list[Event]:
        """Return and clear the events for the core, in order."""
        return self.producer.take_events() + self.consumer.take_events()

    @property
    def num_open(self) -> int:
        """Transfers in either role that have not ended, or whose end is not acknowledged."""
        return self.producer.num_open + self.consumer.num_open

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
        self.producer.check_invariants()
        self.consumer.check_invariants()
