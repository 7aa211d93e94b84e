"""Interface of the cluster behind the HTTP edge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.edge.openai import Emit, ModelCard, Usage
    from cluster.edge.resume import StreamPosition
    from cluster.edge.slots import SlotsView
    from cluster.edge.transfers import TransfersView
    from replicas.messages import EngineRequest
    from replicas.tokenizer import Tokenizer


class Backend(Protocol):
    """Interface of the cluster behind the edge."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The served model's tokenizer."""

    def models(self) -> Sequence[ModelCard]:
        """Return the models that requests may name, the default one first."""

    async def generate(
        self,
        request: EngineRequest,
        emit: Emit,
        known: StreamPosition | None = None,
        token_ids: Sequence[int] = (),
    ) -> Usage:
        """Run a request.

        It is cancelled when the client disconnects. It must then abort the request and free its
        slot and blocks.

        Args:
            request: A validated request.
            emit: Called with each delta; the last one of each choice has its finish reason.
            known: Position of a client that resumes a stream of one choice. The backend checks that
                the rerun gives the same tokens, and emits deltas of one token each, so that they
                are the same in every run. None: deltas of any size.
            token_ids: Output that another ingress has had from engines, for a request of one
                choice. It is emitted first, and engines continue after it.

        Returns:
            The token counts of the whole request, once every choice has ended.

        Raises:
            ServingError: The request cannot run, or failed midway.
        """

    def is_ready(self) -> tuple[bool, str]:
        """Return whether new requests can be served, and the problem if there is any, else ""."""

    async def metrics_text(self) -> bytes:
        """Return the metrics of all ingresses and engines in Prometheus' text format."""

    async def transfers(self) -> TransfersView:
        """Return the running KV transfers of all replicas."""

    async def probe(self) -> dict[str, bool]:
        """Return for each replica whether it ended a step within the timeout."""

    async def slots(self) -> SlotsView:
        """Return all slots, with the requests of all ingresses."""

    async def routes(self, request_id: str) -> bytes | None:
        """Return the routes of the requests with a client's id: a `RoutesView` as JSON.

        Another ingress may have them.

        Returns:
            None if no such request is known.

        Raises:
            SaturatedError: Too many ids are being looked up.
        """

    def route_header(self, request: EngineRequest) -> str:
        """Return the short form of a request's route, for a header."""
