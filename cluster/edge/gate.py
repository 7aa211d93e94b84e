"""Checks before a route's handler: listener, `Host` header, API key, and number of open requests.

Owner: a `RequestGate` owns the count of open requests of one application. Serve's own limit is not
used: it applies to every route, so that health checks would wait behind streams, and it answers in
plain text.
"""

from __future__ import annotations

import contextlib
import ipaddress
from typing import TYPE_CHECKING

from cluster.edge.fields import bad_field
from cluster.edge.headers import (
    BOUND_HEADER,
    LISTENER_HEADER,
    LOOPBACK,
    OPERATIONS,
    header_tenant,
)
from cluster.edge.tenants import NO_TENANT, set_tenant, tenant_of
from cluster.errors import MisdirectedError, NotFoundError, SaturatedError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from contextlib import AbstractContextManager

    from starlette.datastructures import Headers
    from starlette.types import Scope

    from cluster.config.schema import AdmissionConfig
    from cluster.edge.api_keys import ApiKeys
    from cluster.edge.route_table import RouteSpec

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class RequestGate:
    """The checks that a request passes before its handler runs.

    Args:
        max_open: Most open counted requests; more get 429. Each prompt of a request counts.
        allowed_hosts: Names, without port, that a `Host` header may have besides `LOOPBACK_NAMES`.
            None: no others on a listener with a loopback address, any name elsewhere.
        api_keys: Keys of clients; None asks for none.
        admission: Names the header of tenants, if any.

    Attributes:
        num_open: Open counted requests.
    """

    def __init__(
        self,
        max_open: int,
        allowed_hosts: Collection[str] | None = None,
        api_keys: ApiKeys | None = None,
        admission: AdmissionConfig | None = None,
    ) -> None:
        self._max_open = max_open
        self._allowed_hosts = None if allowed_hosts is None else frozenset(allowed_hosts)
        self._api_keys = api_keys
        self._admission = admission
        self.num_open = 0

    def check(self, route: RouteSpec, headers: Headers) -> None:
        """Refuse a request that this listener does not serve.

        Raises:
            MisdirectedError: The `Host` header is not allowed.
            NotFoundError: The route is for operators, but the request came by the public listener.
        """
        self._check_host(headers)
        if route.listener == "operations" and headers.get(LISTENER_HEADER) != OPERATIONS:
            raise NotFoundError(
                f"{route.path} is only on the operations listener: by default "
                "127.0.0.1, at the public port + 1"
            )

    def identify(self, route: RouteSpec, scope: Scope, headers: Headers) -> None:
        """Put the tenant of a request into its scope.

        The client guard has already done so if the request has a body and came through HAProxy.

        Raises:
            AuthenticationError: The route needs an API key, and the request has no valid one.
            PermissionDeniedError: The key is not that of an admin, as the route requires.
            BadRequestError: The header of tenants names more than one.
        """
        if self._api_keys is None:
            set_tenant(scope, header_tenant(headers, self._admission))
        elif route.access != "open":
            tenant = tenant_of(scope)
            if tenant is NO_TENANT:
                tenant = self._api_keys.authenticate(scope["headers"])
                set_tenant(scope, tenant)
            if route.access == "admin":
                tenant.check_admin(route.path)

    def count_open(self, route: RouteSpec) -> AbstractContextManager[None]:
        """Count a request while it is open, if its route is counted.

        Raises:
            SaturatedError: `max_open` requests are open.
        """
        return self.count_more(1 if route.is_counted else 0)

    @contextlib.contextmanager
    def count_more(self, num: int) -> Iterator[None]:
        """Count further requests while they are open, such as those of further prompts.

        Raises:
            SaturatedError: With them more than `max_open` requests would be open.
        """
        if num and self.num_open + num > self._max_open:
            raise SaturatedError(
                f"{self.num_open} requests are open at this ingress, of at most {self._max_open}; "
                "try again later"
            )
        self.num_open += num
        try:
            yield
        finally:
            self.num_open -= num

    def check_prompts(self, num: int, param: str) -> None:
        """Refuse a request with more prompts than this ingress ever has room for.

        Args:
            num: Its prompts.
            param: The field that has them.

        Raises:
            BadRequestError: There are too many.
        """
        if num > max(self._max_open, 2):
            text = f"has {num} entries, but this ingress has room for {self._max_open} requests"
            raise bad_field(param, f"{text}; send more requests with fewer of them")

    def _check_host(self, headers: Headers) -> None:
        """Refuse web pages of other sites whose name resolves to our address (DNS rebinding).

        Such a page's requests have the page's own name in this header. So a loopback name, as
        probes on the host send it, is always safe. An IP address, as probes and scrapes in a
        cluster send it, is safe on a listener that other hosts may reach. A request without the
        header is HTTP/1.0, which no browser sends.
        """
        host = headers.get("host")
        is_loopback = headers.get(BOUND_HEADER) == LOOPBACK
        allowed = self._allowed_hosts
        if host is None or (allowed is None and not is_loopback):
            return
        name = _name_of(host)
        if has_loopback_name(headers) or name in (allowed or ()):
            return
        if is_loopback or not _is_address(name):
            raise MisdirectedError(
                f"the Host header {host!r} is not allowed; to serve it, add it to "
                "args.ingress.allowed_hosts"
            )


def has_loopback_name(headers: Headers) -> bool:
    """Return whether a request has been sent to a loopback name, or has no `Host` header."""
    host = headers.get("host")
    return host is None or _name_of(host) in LOOPBACK_NAMES


def _name_of(host: str) -> str:
    """Return the name in a `Host` header, without port and final dot, in lower case."""
    name, colon, port = host.strip().lower().rpartition(":")
    # The colons of an IPv6 address are inside brackets.
    return (name if colon and not port.endswith("]") else host.strip().lower()).rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
