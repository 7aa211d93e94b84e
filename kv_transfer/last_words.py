"""What is said to producers at the end of a transfer, until they have heard it. Pure."""

from dataclasses import dataclass

from kv_transfer.config import TransferConfig
from kv_transfer.lease import LeaseState
from kv_transfer.messages import Cancel, Done, LeaseInfo, ToConsumer


@dataclass(slots=True, eq=False)
class _LastWord:
    endpoint: str
    message: Done | Cancel
    resend_s: float
    give_up_s: float


class LastWords:
    """DONEs and CANCELs that nobody has acknowledged. Owner: a ``ConsumerSessions``.

    Each is repeated until its producer says that the transfer is over there too, or its process is
    gone, or it is no use any more: by then the lease has lapsed.
    """

    def __init__(self, config: TransferConfig) -> None:
        self._config = config
        self._words: dict[bytes, _LastWord] = {}

    def __len__(self) -> int:
        """Count transfers."""
        return len(self._words)

    def __contains__(self, transfer_id: bytes) -> bool:
        """Tell whether the last word about a transfer was said and not heard."""
        return transfer_id in self._words

    def say(self, endpoint: str, message: Done | Cancel, now_s: float) -> None:
        """Remember what was just said to a producer."""
        self._words[message.transfer_id] = _LastWord(
            endpoint, message, now_s + self._config.probe_s, now_s + self._config.closing_s
        )

    def take_back(self, transfer_id: bytes) -> None:
        """Say no more about a transfer, which begins anew."""
        self._words.pop(transfer_id, None)

    def hear(self, message: ToConsumer) -> None:
        """Say no more if a producer has acknowledged its transfer's end."""
        word = self._words.get(message.transfer_id)
        if word is not None and message.epoch == word.message.epoch and _is_over(message):
            del self._words[message.transfer_id]

    def on_peer_lost(self, endpoint: str) -> None:
        """Say no more to a process that is gone."""
        self._words = {t: word for t, word in self._words.items() if word.endpoint != endpoint}

    def due(self, now_s: float) -> list[tuple[str, Done | Cancel]]:
        """Return what is to be said again now, with the producer's endpoint."""
        self._words = {t: word for t, word in self._words.items() if now_s < word.give_up_s}
        due = [word for word in self._words.values() if now_s >= word.resend_s]
        for word in due:
            word.resend_s = now_s + self._config.probe_s
        return [(word.endpoint, word.message) for word in due]

    def deadlines_s(self) -> list[float]:
        """When ``due`` has something to do: to say a word again, or to give it up."""
        return [word.resend_s for word in self._words.values()]


def _is_over(message: ToConsumer) -> bool:
    if isinstance(message, LeaseInfo):
        return message.state not in {LeaseState.WAITING, LeaseState.SERVING}
    return True
