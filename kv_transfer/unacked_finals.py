"""Unacknowledged ends of a consumer's transfers, which are repeated to their producers. Pure."""

from dataclasses import dataclass

from kv_transfer.config import TransferConfig
from kv_transfer.lease import LeaseState
from kv_transfer.messages import Cancel, Done, LeaseInfo, ToConsumer


@dataclass(slots=True, eq=False)
class _UnackedFinal:
    endpoint: str
    message: Done | Cancel
    resend_s: float
    give_up_s: float


class UnackedFinals:
    """DONEs and CANCELs without an acknowledgement. Owner: a ``ConsumerSessions``.

    Each is repeated until the producer says that the transfer is over there too, the producer's
    process is gone, or ``closing_s`` has passed.
    """

    def __init__(self, config: TransferConfig) -> None:
        self._config = config
        self._finals: dict[bytes, _UnackedFinal] = {}

    def __len__(self) -> int:
        """Return the number of transfers."""
        return len(self._finals)

    def __contains__(self, transfer_id: bytes) -> bool:
        """Return whether the end of a transfer was sent and not acknowledged."""
        return transfer_id in self._finals

    def add(self, endpoint: str, message: Done | Cancel, now_s: float) -> None:
        """Record a message that was just sent to a producer."""
        self._finals[message.transfer_id] = _UnackedFinal(
            endpoint, message, now_s + self._config.probe_s, now_s + self._config.closing_s
        )

    def discard(self, transfer_id: bytes) -> None:
        """Drop the message of a transfer that starts again."""
        self._finals.pop(transfer_id, None)

    def acknowledge(self, message: ToConsumer) -> None:
        """Drop a transfer's message if the producer has acknowledged its end."""
        final = self._finals.get(message.transfer_id)
        if final is not None and message.epoch == final.message.epoch and _is_over(message):
            del self._finals[message.transfer_id]

    def on_peer_lost(self, endpoint: str) -> None:
        """Drop the messages for a process that is gone."""
        self._finals = {t: final for t, final in self._finals.items() if final.endpoint != endpoint}

    def due(self, now_s: float) -> list[tuple[str, Done | Cancel]]:
        """Return the messages to repeat now, each with the producer's endpoint."""
        self._finals = {t: final for t, final in self._finals.items() if now_s < final.give_up_s}
        due = [final for final in self._finals.values() if now_s >= final.resend_s]
        for final in due:
            final.resend_s = now_s + self._config.probe_s
        return [(final.endpoint, final.message) for final in due]

    def deadlines_s(self) -> list[float]:
        """Return the times at which ``due`` repeats or drops a message."""
        return [final.resend_s for final in self._finals.values()]


def _is_over(message: ToConsumer) -> bool:
    if isinstance(message, LeaseInfo):
        return message.state not in {LeaseState.WAITING, LeaseState.SERVING}
    return True
