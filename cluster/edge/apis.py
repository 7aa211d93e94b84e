"""Table of the generating APIs, and the form of the errors on each path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.edge.anthropic.api import MessagesApi
from cluster.edge.embeddings import EmbeddingsApi, RerankApi
from cluster.edge.openai_apis import ChatCompletionsApi, CompletionsApi
from cluster.edge.responses.api import ResponsesApi
from cluster.edge.route_table import ROUTES
from cluster.edge.tokens_api import TokensApi

if TYPE_CHECKING:
    from cluster.edge.api import Api
    from cluster.edge.responses.archive import ResponseArchive
    from replicas.tokenizer import Tokenizer

_OF_TOKENIZER: tuple[type[Api], ...] = (
    CompletionsApi,
    ChatCompletionsApi,
    MessagesApi,
    TokensApi,
    EmbeddingsApi,
    RerankApi,
)
"""The APIs that need a tokenizer alone."""

APIS: tuple[type[Api], ...] = (*_OF_TOKENIZER, ResponsesApi)
"""All generating APIs; `cluster.edge.route_table` has a route of each one's name."""

_PATHS = {spec.name: spec.path for spec in ROUTES}
_API_OF_PATH = {_PATHS[api.route]: api for api in APIS}


def make_apis(
    tokenizer: Tokenizer, responses: ResponseArchive, max_conversation_bytes: int
) -> list[Api]:
    """Return an object of each API; for the arguments see `ResponsesApi`."""
    of_responses = ResponsesApi(tokenizer, responses, max_conversation_bytes)
    return [*(api(tokenizer) for api in _OF_TOKENIZER), of_responses]


def api_of(path: str) -> type[Api]:
    """Return the API whose form errors on a path have.

    A path below that of an API belongs to it; all other paths have OpenAI's form.
    """
    api = _API_OF_PATH.get(path)
    if api is not None:
        return api
    for prefix, api in _API_OF_PATH.items():
        if path.startswith(prefix + "/"):
            return api
    return ChatCompletionsApi
