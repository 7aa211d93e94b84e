"""Table of the generating APIs, and the form of the errors on each path. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.edge.anthropic.api import MessagesApi
from cluster.edge.embeddings import EmbeddingsApi, RerankApi
from cluster.edge.openai_apis import ChatCompletionsApi, CompletionsApi
from cluster.edge.route_table import ROUTES
from cluster.edge.tokens_api import TokensApi

if TYPE_CHECKING:
    from cluster.edge.api import Api

APIS: tuple[type[Api], ...] = (
    CompletionsApi,
    ChatCompletionsApi,
    MessagesApi,
    TokensApi,
    EmbeddingsApi,
    RerankApi,
)
"""The APIs that need a tokenizer alone; `cluster.edge.route_table` has a route of each one's name.

`ResponsesApi` also has a store, so the application makes it. Its errors have OpenAI's form.
"""

_PATHS = {spec.name: spec.path for spec in ROUTES}
_API_OF_PATH = {_PATHS[api.route]: api for api in APIS}


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
