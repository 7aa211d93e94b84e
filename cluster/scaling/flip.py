"""Decides whether an engine may change its role now, or be drained by an operator. Pure.

An engine that changes its role, prefill to decode or back, takes no requests until those of its old
role have ended or moved; a drained one takes none until it is undrained. Meanwhile another engine
has to have that role, and must not be about to leave it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

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


class BusyReplicaError(FlipError):
    """Another change of the replica is under way."""


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
        is_draining: Whether an operator drains it.
        is_drained: Whether it has no request left since then.
    """

    replica: str
    role: Role
    next_role: Role
    has_connector: bool = True
    in_gang: bool = False
    is_scaled: bool = False
    is_draining: bool = False
    is_drained: bool = False

    @property
    def keeps(self) -> Role | None:
        """Its role; None during a change, and while it is drained."""
        return self.role if self.role == self.next_role and not self.is_draining else None


class Replicas(Protocol):
    """The replicas of an application, whose roles can be read and changed.

    Calls block for a bounded time.
    """

    def role_statuses(self) -> list[RoleStatus]:
        """Return the role status of each replica that answers."""
        ...

    def change_role(self, replica: str, role: Role) -> None:
        """Ask the named replica to change its role."""
        ...

    def set_draining(self, replica: str, is_draining: bool) -> None:
        """Ask the named replica to drain, or to take requests again."""
        ...


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
    flipped = find_replica(all_of_them, replica)
    if role == flipped.role:
        return
    if flipped.is_draining:
        raise BusyReplicaError(f"{replica} is drained by an operator: undrain it first")
    _check_can_change(flipped, role)
    _check_not_last(all_of_them, flipped, role)


def check_drain(engines: Iterable[RoleStatus], replica: str) -> None:
    """Check that an engine may be drained. One that is drained already may be.

    Args:
        engines: Every running engine, once.
        replica: Name of the engine's replica.

    Raises:
        FlipError: It is refused; the subclass says why.
    """
    all_of_them = list(engines)
    drained = find_replica(all_of_them, replica)
    if drained.is_draining:
        return
    if drained.role != drained.next_role:
        raise BusyReplicaError(f"{replica} is changing its role: wait for the end of that")
    if drained.in_gang:
        raise FixedRoleError(
            f"{replica} is a rank of a gang, whose engines step together: pause its pool, or "
            "change the `replicas` of the pool instead"
        )
    _check_not_last(all_of_them, drained, other_role(drained.role))


def find_replica(engines: Iterable[RoleStatus], replica: str) -> RoleStatus:
    """Return the status of the named replica.

    Raises:
        UnknownReplicaError: There is none.
    """
    of_name = {engine.replica: engine for engine in engines}
    if replica not in of_name:
        names = ", ".join(sorted(of_name)) or "none"
        raise UnknownReplicaError(f"no replica {replica!r} runs; running replicas: {names}")
    return of_name[replica]


def _check_not_last(engines: list[RoleStatus], engine: RoleStatus, other: Role | None) -> None:
    """Refuse to take the last engine of a role out of it.

    Args:
        engines: Every running engine.
        engine: The engine.
        other: The role of engines that could take its place; None if there is none.
    """
    if any(e.keeps == engine.role for e in engines if e is not engine):
        return
    instead = "" if other is None else f", or change the role of one that has role {other}"
    raise LastOfRoleError(
        f"{engine.replica} is the last engine with role {engine.role}: without it no request "
        f"could run; start another replica of pool {engine.role}{instead}, then try again"
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
