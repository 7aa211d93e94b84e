"""The HTTP application: its routes, and the mapping from errors to HTTP.

Owner: the ingress's event loop owns every open response; this module keeps no state between
requests. `cluster.edge.pipeline` runs the requests of the generating APIs.

An error before the first byte is a JSON body with its status, in the form of its path's API. An
error after it is the API's own end of a stream: a client that sees a normal end, such as OpenAI's
`[DONE]`, may trust the answer to be whole.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.config.schema import LEAST_ONGOING_REQUESTS
from cluster.edge.answers import METRICS_TYPE, json_response
from cluster.edge.anthropic.fields import COUNT_TOKENS_FIELDS
from cluster.edge.anthropic.requests import parse_count_tokens
from cluster.edge.apis import make_apis
from cluster.edge.boundary import with_boundary
from cluster.edge.departure import Departure
from cluster.edge.documentation import documented
from cluster.edge.fair_scheduler import Priority
from cluster.edge.field_names import naming_fields
from cluster.edge.gate import RequestGate
from cluster.edge.json_bodies import read_json_body
from cluster.edge.openai_fields import DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from cluster.edge.openai_limits import BodyLimits
from cluster.edge.openai_requests import (
    check_own_template,
    check_vocabulary,
    parse_detokenize,
    parse_tokenize,
    resolve_model,
)
from cluster.edge.openai_responses import model_body
from cluster.edge.pipeline import Pipeline, with_history
from cluster.edge.quota_service import TenantQuotas
from cluster.edge.responses.api import ResponsesApi
from cluster.edge.responses.archive import response_archive
from cluster.edge.route_table import ROUTES
from cluster.edge.stored_responses import StoredResponses
from cluster.edge.tenants import NO_TENANT, tenant_of
from cluster.edge.text_jobs import TextJobs
from cluster.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from typing import Any

    from starlette.types import ASGIApp, Receive, Scope, Send

    from cluster.config.schema import AdmissionConfig, IngressConfig
    from cluster.edge.api_keys import ApiKeys
    from cluster.edge.backend import Backend
    from cluster.edge.fields import FieldTable
    from cluster.edge.openai import ModelCard
    from cluster.edge.responses.archive import ResponseArchive
    from cluster.edge.route_table import RouteSpec

    Handler = Callable[[Request], Awaitable[Response]]

logger = logging.getLogger(__name__)

MAX_ANSWERED_TOKENS = 2**18
"""Most token ids in an answer of /tokenize, and most that are counted."""


def create_app(  # noqa: PLR0913 - each part may be shared with the ingress
    backend: Backend,
    ingress: IngressConfig,
    *,
    version: str,
    admission: AdmissionConfig | None = None,
    api_keys: ApiKeys | None = None,
    quotas: TenantQuotas | None = None,
    responses: ResponseArchive | None = None,
    departure: Departure | None = None,
) -> Starlette:
    """Build the ASGI app, to be wrapped in `cluster.edge.client_guard`.

    Args:
        backend: Backend that runs the requests.
        ingress: Limits, and optional details of answers.
        version: Answer of /version.
        admission: Headers of tenants and objectives; None: no header counts.
        api_keys: Keys that requests need; None: no request needs one.
        quotas: Counts requests against the limits of their tenants; None: this application's alone.
        responses: Keeps answers of /v1/responses; None: this application's alone.
        departure: Ends open requests when the ingress ends; None: nothing does.
    """
    quotas = quotas or TenantQuotas()
    jobs = TextJobs(backend.tokenizer)
    has_tenants = api_keys is not None or (
        admission is not None and admission.tenant_header is not None
    )
    gate = RequestGate(
        ingress.max_ongoing_requests or LEAST_ONGOING_REQUESTS,
        ingress.allowed_hosts,
        api_keys,
        admission,
    )
    departure = departure or Departure()
    pipeline = Pipeline(
        backend,
        ingress,
        admission,
        jobs,
        gate,
        departure=departure,
        has_tenants=has_tenants,
    )
    routes = _RouteHandlers(backend, ingress, version, jobs, gate)
    handlers: dict[str, Handler] = {
        "models": routes.models,
        "model": routes.model,
        "count_tokens": routes.count_tokens,
        "tokenize": routes.tokenize,
        "detokenize": routes.detokenize,
        "health": routes.health,
        "ping": routes.health,
        "post_ping": routes.health,
        "v2_ready": routes.health,
        "v2_live": routes.live,
        "load": routes.load,
        "health_generate": routes.health_generate,
        "live": routes.live,
        "metrics": routes.metrics,
        "kv": routes.kv,
        "slots": routes.slots,
        "route": routes.route,
        "version": routes.version,
    }
    handlers |= documented(
        version,
        has_keys=api_keys is not None,
        is_closed=ingress.unknown_fields == "refuse",
        root_path=ingress.root_path,
    )
    responses = responses or response_archive(
        ingress.response_store_bytes, ingress.response_store_age_s
    )
    stored = StoredResponses(responses, gate, departure, ingress.stream_keep_alive_s)
    handlers |= {
        "compact_response": stored.compact,
        "response": stored.read,
        "response_input_items": stored.input_items,
        "delete_response": stored.delete,
        "cancel_response": stored.cancel,
    }
    for api in make_apis(backend.tokenizer, responses, ingress.max_body_bytes):
        if isinstance(api, ResponsesApi):
            responses.continue_with(
                functools.partial(pipeline.continue_background, api=api, quotas=quotas)
            )
        handlers[api.route] = functools.partial(pipeline.respond, api=api)
    app = _EdgeApplication(
        routes=[
            Route(
                spec.path,
                _GatedHandler(handlers[spec.name], spec, gate, quotas),
                methods=[spec.method],
            )
            for spec in ROUTES
        ]
    )
    # A redirect would come before the checks of key and host, and would not know the root path.
    app.router.redirect_slashes = False
    app.cors_origins = ingress.cors_origins
    app.root_path = ingress.root_path
    return app


class _EdgeApplication(Starlette):
    """Starlette with our boundary in place of its middlewares, which inspect each streamed chunk.

    Attributes:
        cors_origins: Origins of web pages that may read answers.
        root_path: Path under which a proxy shows the application; "" for none.
    """

    cors_origins: Sequence[str] = ()
    root_path: str = ""

    def build_middleware_stack(self) -> ASGIApp:
        return with_boundary(self.router, self.cors_origins, self.root_path)


class _GatedHandler:
    """A handler as an ASGI app behind the request gate and the limits of its tenant.

    `Route` would catch the errors of a plain function; `_RequestBoundary` answers them instead.
    """

    def __init__(
        self, handle: Handler, spec: RouteSpec, gate: RequestGate, quotas: TenantQuotas
    ) -> None:
        self._handle = handle
        self._spec = spec
        self._gate = gate
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        self._gate.check(self._spec, request.headers)
        self._gate.identify(self._spec, scope, request.headers)
        with self._gate.count_open(self._spec):
            tenant = tenant_of(scope) if self._spec.is_counted else NO_TENANT
            async with self._quotas.hold(tenant, scope):
                response = await self._handle(request)
                await response(scope, receive, send)


class _RouteHandlers:
    """Handlers of the routes that do not generate; each calls the backend, and answers."""

    def __init__(
        self,
        backend: Backend,
        ingress: IngressConfig,
        version: str,
        jobs: TextJobs,
        gate: RequestGate,
    ) -> None:
        self._backend = backend
        self._gate = gate
        self._version = version
        self._ingress = ingress
        self._jobs = jobs

    def _models(self, request: Request) -> Sequence[ModelCard]:
        """Return the models that exist for a request's tenant."""
        return tenant_of(request.scope).visible(self._backend.models())

    async def models(self, request: Request) -> Response:
        cards = [model_body(card) for card in self._models(request)]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        card = resolve_model(request.path_params["model_id"], self._models(request))
        return json_response(model_body(card))

    async def count_tokens(self, request: Request) -> Response:
        parsed = parse_count_tokens(await self._read_body(request, COUNT_TOKENS_FIELDS))
        with naming_fields(parsed.field_names):
            card = resolve_model(parsed.values.get("model"), self._models(request))
            prompt = with_history(parsed, card).prompt
            ids = await self._jobs.encode(prompt, MAX_ANSWERED_TOKENS, Priority.OTHER, request)
        return json_response({"input_tokens": len(ids)})

    async def tokenize(self, request: Request) -> Response:
        parsed = parse_tokenize(await self._read_body(request, TOKENIZE_FIELDS))
        card = resolve_model(parsed.model, self._models(request))
        check_own_template(parsed.prompt, is_trusted=self._ingress.trust_request_chat_template)
        ids = await self._jobs.encode(parsed.prompt, MAX_ANSWERED_TOKENS, Priority.OTHER, request)
        strings = None
        if parsed.return_token_strs:
            spell = functools.partial(self._backend.tokenizer.token_strings, ids)
            strings = await self._jobs.run(spell, len(ids), request)
        body = {"count": len(ids), "max_model_len": card.max_model_len}
        return json_response({**body, "tokens": ids, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        model, ids = parse_detokenize(await self._read_body(request, DETOKENIZE_FIELDS))
        resolve_model(model, self._models(request))
        tokenizer = self._backend.tokenizer
        check_vocabulary(ids, tokenizer.vocab_size, "tokens")
        decode = functools.partial(tokenizer.decode, ids, skip_special_tokens=False)
        return json_response({"prompt": await self._jobs.run(decode, len(ids), request)})

    async def health(self, request: Request) -> Response:
        del request
        is_ready, reason = self._backend.is_ready()
        if is_ready:
            return json_response({"status": "degraded", "reason": reason}) if reason else Response()
        return json_response({"status": "not ready", "reason": reason}, 503)

    async def health_generate(self, request: Request) -> Response:
        """Check every replica by waiting for a step of it; the name is SGLang's."""
        del request
        steps = await self._backend.probe()
        status = "degraded" if any(steps.values()) else "not ready"
        silent = [replica for replica, has_stepped in steps.items() if not has_stepped]
        if steps and not silent:
            return Response()
        return json_response(
            {"status": status, "silent": silent}, 200 if any(steps.values()) else 503
        )

    async def load(self, request: Request) -> Response:
        """Return the number of open requests of this ingress; the name is vLLM's."""
        del request
        return json_response({"server_load": self._gate.num_open})

    async def live(self, request: Request) -> Response:
        del request
        return Response()  # an answer proves that the event loop runs

    async def metrics(self, request: Request) -> Response:
        del request
        return Response(await self._backend.metrics_text(), media_type=METRICS_TYPE)

    async def kv(self, request: Request) -> Response:
        del request
        return json_response(msgspec.to_builtins(await self._backend.transfers()))

    async def slots(self, request: Request) -> Response:
        del request
        return json_response(msgspec.to_builtins(await self._backend.slots()))

    async def route(self, request: Request) -> Response:
        request_id = request.path_params["request_id"]
        found = await self._backend.routes(request_id)
        if found is None:
            raise NotFoundError(f"no ingress has a record of request {request_id!r}")
        return Response(found, media_type="application/json")

    async def version(self, request: Request) -> Response:
        del request
        return json_response({"version": self._version})

    async def _read_body(self, request: Request, table: FieldTable) -> dict[str, Any]:
        limits = BodyLimits.of_models(self._backend.models(), self._backend.tokenizer)
        return await read_json_body(request, table, limits, self._ingress)
