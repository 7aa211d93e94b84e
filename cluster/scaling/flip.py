"""Which engines may take another role now, prefill for decode or back. Pure.

An engine that changes its role serves nobody until nothing is left of its old one, so somebody else
has to have that role, and to keep it.
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
    """Nobody of that name is there."""


class FixedRoleError(FlipError):
    """The engine can have no other role, by its configuration."""


class LastOfRoleError(FlipError):
    """Nobody else would have its role."""


class Posture(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine does in its cluster.

    Attributes:
        replica: Its name, as `/debug/slots` has it.
        role: What it takes, or took before it began to change that.
        next_role: What it takes once it has changed; the same where it does not.
        has_connector: Whether KV can come to it and leave it.
        in_gang: Whether it steps together with others.
        is_scaled: Whether somebody counts the replicas of its pool, as they began.
    """

    replica: str
    role: Role
    next_role: Role
    has_connector: bool = True
    in_gang: bool = False
    is_scaled: bool = False

    @property
    def keeps(self) -> Role | None:
        """The role that it has now and will have; None while it changes that."""
        return self.role if self.role == self.next_role else None


def other_role(role: Role) -> Role | None:
    """The role that an engine of this one can change to, if there is any."""
    return _OTHERS.get(role)


def check_flip(engines: Iterable[Posture], replica: str, role: Role) -> None:
    """Check that an engine may take a role.

    One that is about to leave that role may always go back to it.

    Args:
        engines: All that run, each once.
        replica: Its name.
        role: Prefill or decode.

    Raises:
        FlipError: It may not; which kind says why.
    """
    all_of_them = list(engines)
    flipped = next((engine for engine in all_of_them if engine.replica == replica), None)
    if flipped is None:
        names = ", ".join(sorted(e.replica for e in all_of_them)) or "nobody"
        raise UnknownReplicaError(f"no replica {replica!r} runs; there is {names}")
    if role == flipped.role:
        return
    _check_can_change(flipped, role)
    if not any(e.keeps == flipped.role for e in all_of_them if e is not flipped):
        raise LastOfRoleError(
            f"{replica} is the last engine with role {flipped.role}: without it no request "
            f"could run; start another replica of pool {flipped.role}, or change the role of "
            f"one that has role {role}, then try again"
        )


def _check_can_change(engine: Posture, role: Role) -> None:
    if _OTHERS.get(engine.role) != role:
        raise FixedRoleError(
            f"{engine.replica} has role {engine.role!r} and cannot take {role!r}: roles change "
            "between prefill and decode, in a cluster with both pools"
        )
    if not engine.has_connector:
        raise FixedRoleError(
            f"{engine.replica} has no KV connector, so no KV can come or go: set kv_connector in "
            "its pool and deploy that"
        )
    if engine.in_gang:
        raise FixedRoleError(
            f"{engine.replica} is a rank of a gang, whose engines step together: change the "
            "replicas of the pools instead"
        )
    if engine.is_scaled:
        raise FixedRoleError(
            f"the pool of {engine.replica} is scaled automatically, by replicas as they began: "
            "remove max_replicas from both pools first"
        )
