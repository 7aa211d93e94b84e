"""Decides whether an engine may change its role now, prefill to decode or back. Pure.

An engine that changes its role takes no requests until those of its old role have ended or moved.
Until then another engine has to have that role, and must not be about to leave it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from replicas.config import Role

if TYPE_CHECKING:
    from collections.abc import Iterable

_OTHERS: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}


class FlipError(Exception):
    """An engine cannot take a role; the message says why and what to do."""


class UnknownReplicaError(FlipError):
    """No replica of that name runs."""


class FixedRoleError(FlipError):
    """The configuration fixes the engine's role."""


class LastOfRoleError(FlipError):
    """No other engine would have its role."""


class RoleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The role of an engine in its cluster, and what limits a change of it.

    Attributes:
        replica: Its name, as in `/debug/slots`.
        role: Its role; during a change, the old one.
        next_role: Its role after a change that is under way; else equal to `role`.
        has_connector: Whether it has a KV connector.
        in_gang: Whether it is a rank of a gang.
        is_scaled: Whether autoscaling controls its pool's number of replicas.
    """

    replica: str
    role: Role
    next_role: Role
    has_connector: bool = True
    in_gang: bool = False
    is_scaled: bool = False

    @property
    def keeps(self) -> Role | None:
        """Its role; None during a change."""
        return self.role if self.role == self.next_role else None


def other_role(role: Role) -> Role | None:
    """Return the role that an engine with this role can change to, or None."""
    return _OTHERS.get(role)


def check_flip(engines: Iterable[RoleStatus], replica: str, role: Role) -> None:
    """Check that an engine may change to a role.

    An engine that is leaving that role may always go back to it.

    Args:
        engines: Every running engine, once.
        replica: Name of the engine's replica.
        role: The new role, prefill or decode.

    Raises:
        FlipError: The change is refused; the subclass says why.
    """
    all_of_them = list(engines)
    flipped = next((engine for engine in all_of_them if engine.replica == replica), None)
    if flipped is None:
        names = ", ".join(sorted(e.replica for e in all_of_them)) or "none"
        raise UnknownReplicaError(f"no replica {replica!r} runs; running replicas: {names}")
    if role == flipped.role:
        return
    _check_can_change(flipped, role)
    if not any(e.keeps == flipped.role for e in all_of_them if e is not flipped):
        raise LastOfRoleError(
            f"{replica} is the last engine with role {flipped.role}: without it no request "
            f"could run; start another replica of pool {flipped.role}, or change the role of "
            f"one that has role {role}, then try again"
        )


def _check_can_change(engine: RoleStatus, role: Role) -> None:
    if _OTHERS.get(engine.role) != role:
        raise FixedRoleError(
            f"{engine.replica} has role {engine.role!r} and cannot take {role!r}: roles change "
            "between prefill and decode, in a cluster with both pools"
        )
    if not engine.has_connector:
        raise FixedRoleError(
            f"{engine.replica} has no KV connector, so it can neither send nor receive KV: set "
            "kv_connector in its pool and deploy again"
        )
    if engine.in_gang:
        raise FixedRoleError(
            f"{engine.replica} is a rank of a gang, whose engines step together: change the "
            "`replicas` of the pools instead"
        )
    if engine.is_scaled:
        raise FixedRoleError(
            f"the pool of {engine.replica} is scaled automatically, by the role that its replicas "
            "started with: remove max_replicas from both pools first"
        )
