"""How many requests and tokens may wait at an ingress's door, and of one tenant. Pure.

Owner of nothing: it looks at the line of those who wait.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cluster.config.schema import TenantConfig
from cluster.errors import QuotaError

if TYPE_CHECKING:
    from cluster.config.schema import AdmissionConfig
    from cluster.routing.entry import AdmissionEntry
    from cluster.routing.tenants import FairLine

_ANYBODY = TenantConfig()


class Bounds:
    """See the module docstring.

    Args:
        config: Tokens that may wait, and tenants.
        max_queued_requests: How many may wait.
    """

    def __init__(self, config: AdmissionConfig, max_queued_requests: int) -> None:
        self._config = config
        self._max_queued_requests = max_queued_requests

    def tenant(self, name: str) -> TenantConfig:
        """What a tenant may; one that is not named has no bounds of its own."""
        return self._config.tenants.get(name, _ANYBODY)

    def check_quota(
        self, entry: AdmissionEntry, line: FairLine[AdmissionEntry], slot_s: float
    ) -> None:
        """Whether its tenant may have one more.

        Args:
            entry: Who has come.
            line: Those who wait, and whom tenants have here.
            slot_s: How long a slot is held.

        Raises:
            QuotaError: It has as many as it may.
        """
        most, count = self.tenant(entry.tenant).max_requests, line.num_requests(entry.tenant)
        if most is not None and count >= most:
            raise QuotaError(
                f"tenant {entry.tenant!r} already has {count} requests here and may have {most}; "
                "retry when one has ended",
                retry_after_s=whole(slot_s / max(count, 1)),
            )

    def is_too_many(self, entry: AdmissionEntry, line: FairLine[AdmissionEntry]) -> bool:
        """Whether there is no room, and nobody has more waiting than its tenant."""
        is_full = bool(line) and self.is_over(line, 1, entry.num_tokens)
        return is_full and line.has_most(entry.tenant)

    def is_over(
        self, line: FairLine[AdmissionEntry], further: int = 0, further_tokens: int = 0
    ) -> bool:
        """Whether more wait, or would with some further ones, than may."""
        limit = self._config.max_queued_tokens
        if limit is not None and num_waiting_tokens(line) + further_tokens > limit:
            return True
        return len(line) + further > self._max_queued_requests


def num_waiting_tokens(line: FairLine[AdmissionEntry]) -> int:
    """Prompt tokens that wait."""
    return sum(entry.num_tokens for entry in line)


def whole(seconds: float) -> int:
    """A time that a client is told to wait."""
    return max(math.ceil(seconds), 1)
