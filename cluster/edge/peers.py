"""What an ingress may ask all ingresses of its application."""

from __future__ import annotations

from typing import Protocol


class Peers(Protocol):
    """The ingresses of one application, this one included; edge and routing do not know Ray."""

    async def ask_all(self, question: str, payload: bytes, timeout_s: float) -> list[bytes]:
        """Return the answers of the ingresses that answered in time, in any order.

        Args:
            question: Name of the question, see `cluster.ingress.Ingress.answer_peer`.
            payload: Its content.
            timeout_s: Time for an answer.
        """

    async def ask_one(self, question: str, payload: bytes, timeout_s: float) -> bytes:
        """Return the answer of any one ingress that is not ending; empty if none answers in time.

        Args:
            question: Name of the question, as above.
            payload: Its content.
            timeout_s: Time for the answer.
        """


class NoPeers:
    """The peers of an ingress that is alone."""

    async def ask_all(self, question: str, payload: bytes, timeout_s: float) -> list[bytes]:
        """Return no answer."""
        del question, payload, timeout_s
        return []

    async def ask_one(self, question: str, payload: bytes, timeout_s: float) -> bytes:
        """Return no answer."""
        del question, payload, timeout_s
        return b""
