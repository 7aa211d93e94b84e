"""Tenants as the edge knows them: a name, and what its API key permits. Pure.

A request belongs to one tenant, and its ASGI scope holds that `Tenant`: the tenant of its API key
(`cluster.edge.api_keys`), or the one that a gateway names in a header (`cluster.edge.headers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from cluster.config.schema import TenantLimits
from cluster.errors import PermissionDeniedError

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

_SCOPE_KEY = "ttserve.tenant"


class Named(Protocol):
    """A model of /v1/models."""

    @property
    def id(self) -> str:
        """Its name in requests."""


_NamedT = TypeVar("_NamedT", bound=Named)


@dataclass(frozen=True, slots=True)
class Tenant:
    """The tenant of a request.

    Attributes:
        name: Its name; "" without tenants.
        weight: Its share of the encoding threads, relative to others.
        is_admin: Whether it may use the routes of operators.
        models: Names of the models and adapters that it may use; None allows all.
        limits: Its limits on requests and tokens; None if it has none.
        priorities: Smallest and largest `priority` that its requests may have; None: any.
    """

    name: str
    weight: float = 1.0
    is_admin: bool = False
    models: frozenset[str] | None = None
    limits: TenantLimits | None = None
    priorities: tuple[int | None, int | None] = (None, None)

    @classmethod
    def limited(cls, name: str, entry: TenantLimits, **more: Any) -> Tenant:  # noqa: ANN401 - fields
        """Return the tenant of a configuration's entry.

        Args:
            name: Its name.
            entry: Its limits, and perhaps further fields.
            **more: Further attributes of the tenant.
        """
        limits = TenantLimits(
            **{field: getattr(entry, field) for field in TenantLimits.__struct_fields__}
        )
        counts = (limits.max_requests, limits.requests_per_minute, limits.tokens_per_minute)
        has_counts = any(count is not None for count in counts)
        return cls(
            name,
            limits=limits if has_counts else None,
            priorities=(limits.min_priority, limits.max_priority),
            **more,
        )

    def clamped(self, priority: int) -> int:
        """Return the nearest priority that a request of this tenant may have."""
        low, high = self.priorities
        priority = priority if low is None else max(priority, low)
        return priority if high is None else min(priority, high)

    def check_admin(self, path: str) -> None:
        """Refuse a path that only admins may use.

        Raises:
            PermissionDeniedError: The tenant is not an admin.
        """
        if not self.is_admin:
            raise PermissionDeniedError(
                f"{path} needs the key of a tenant with admin: true in the file of API keys"
            )

    def share(self, source: str) -> tuple[str, float]:
        """Return the key of the fair share that pays for a request's texts, and its weight.

        Args:
            source: The client's source, which shares are by without tenants.
        """
        return (f"tenant {self.name}", self.weight) if self.name else (source, 1.0)

    def visible(self, cards: Sequence[_NamedT]) -> Sequence[_NamedT]:
        """Return the models that exist for this tenant."""
        if self.models is None:
            return cards
        return [card for card in cards if card.id in self.models]


NO_TENANT = Tenant("")
"""The tenant of every request where there are neither API keys nor a header of tenants."""


def cache_salt(tenant: str, given: str, *, is_shared: bool) -> str:
    """Return the salt under which a request's KV is cached.

    With tenants, the salt begins with the length and name of the tenant, so that no `cache_salt` of
    one tenant equals that of another.

    Args:
        tenant: The request's tenant.
        given: The client's `cache_salt`; "" if it has none.
        is_shared: Whether all tenants share one cache.
    """
    return given if is_shared else f"{len(tenant)}:{tenant}{given}"


def tenant_of(scope: MutableMapping[str, Any]) -> Tenant:
    """Return the tenant in a request's scope; `NO_TENANT` before one has been found."""
    tenant: Tenant = scope.get(_SCOPE_KEY, NO_TENANT)
    return tenant


def set_tenant(scope: MutableMapping[str, Any], tenant: Tenant) -> None:
    """Store the tenant of a request in its scope."""
    scope[_SCOPE_KEY] = tenant
