"""HAProxy settings that Serve has no option for, read from environment variables.

They are variables because Serve writes HAProxy's configuration file. `ttserve environment` prints
them for `ray start`; `ttserve serve` passes on its own.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.config.ray_auth import front_proof
from cluster.errors import ClusterConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

HAPROXY_VARIABLE = "RAY_SERVE_ENABLE_HA_PROXY"
"""Serve's own variable: "1" if HAProxy is in front of the ingresses."""
OPERATIONS_VARIABLE = "TTSERVE_OPERATIONS_BIND"
TRUSTED_PROXIES_VARIABLE = "TTSERVE_TRUSTED_PROXIES"
CERTIFICATE_VARIABLE = "TTSERVE_TLS_CERTIFICATE"
CORS_ORIGINS_VARIABLE = "TTSERVE_CORS_ORIGINS"

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.*-]*):(?P<port>\d{1,5})")
_LARGEST_PORT = 65535
# No character with a meaning in HAProxy's configuration.
_PATH = re.compile(r"/[A-Za-z0-9._/+=@-]+")
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]+")


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """HAProxy settings that `http_options` does not have.

    Attributes:
        operations_bind: Address and port of the operations listener; None: 127.0.0.1, at the public
            port + 1.
        trusted_proxies: Addresses and networks of proxies whose `X-Forwarded-For` is believed, and
            whose connections are not limited like those of one client.
        certificate: PEM file with a certificate, its chain and its private key. With it the public
            listener speaks TLS alone; None: plain HTTP.
        proof: Value that proves to ingresses that a request came through HAProxy, see
            `front_proof`.
        cors_origins: Origins of web pages that may read HAProxy's own errors, as
            `args.ingress.cors_origins` lets them read the answers of ingresses.
    """

    operations_bind: str | None = None
    trusted_proxies: tuple[str, ...] = ()
    certificate: str | None = None
    proof: str = field(default="", repr=False)
    cors_origins: tuple[str, ...] = ()

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> FrontSettings:
        """Read the settings; an empty variable counts as unset.

        Raises:
            ClusterConfigError: A variable is not valid; the message names it.
        """
        bind = environment.get(OPERATIONS_VARIABLE) or None
        if bind is not None:
            found = _ADDRESS.fullmatch(bind)
            if found is None or not 0 < int(found["port"]) <= _LARGEST_PORT:
                raise ClusterConfigError(
                    f"{OPERATIONS_VARIABLE} must be ADDRESS:PORT, like 0.0.0.0:8001; got {bind!r}"
                )
        proxies = environment.get(TRUSTED_PROXIES_VARIABLE, "").replace(",", " ").split()
        certificate = environment.get(CERTIFICATE_VARIABLE) or None
        if certificate is not None and not _PATH.fullmatch(certificate):
            raise ClusterConfigError(
                f"{CERTIFICATE_VARIABLE} must be an absolute path of letters, digits and ._+=@-/; "
                f"got {certificate!r}"
            )
        origins = tuple(environment.get(CORS_ORIGINS_VARIABLE, "").replace(",", " ").split())
        for origin in origins:
            if not is_origin(origin):
                raise ClusterConfigError(
                    f"{CORS_ORIGINS_VARIABLE} must be origins, such as https://chat.example.com, "
                    f"without a path; got {origin!r}"
                )
        networks = tuple(map(_network, proxies))
        return cls(bind, networks, certificate, front_proof(environment), origins)

    def public_url(self, url: str) -> str:
        """Return the URL of the public listener, given the one that it has without TLS."""
        return url if self.certificate is None else "https" + url.removeprefix("http")

    def require_haproxy(self, has_haproxy: bool) -> None:
        """Refuse a certificate without HAProxy: Serve's own proxy would speak plain HTTP.

        Raises:
            ClusterConfigError: There is a certificate and no HAProxy.
        """
        if self.certificate is not None and not has_haproxy:
            raise ClusterConfigError(
                f"{CERTIFICATE_VARIABLE} needs HAProxy, which is not available here; install "
                "ray[serve] on Linux, or unset it and end TLS at a gateway"
            )

    def operations_address(self, public_port: int) -> str:
        """Return address and port of the operations listener that belongs to a public port."""
        return self.operations_bind or f"127.0.0.1:{public_port + 1}"


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address, or the name localhost."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_origin(text: str) -> bool:
    """Return whether a text is the origin of a web page, or "*" for all of them."""
    return text == "*" or _ORIGIN.fullmatch(text) is not None


def _network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise ClusterConfigError(
            f"{TRUSTED_PROXIES_VARIABLE} must be addresses or networks, such as 10.0.0.0/8: {error}"
        ) from error
