"""Limits of admission: queued requests and tokens of an ingress. Pure.

It owns nothing: it looks at the line of queued requests.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cluster.config.schema import TenantConfig

if TYPE_CHECKING:
    from cluster.config.schema import AdmissionConfig
    from cluster.routing.entry import AdmissionEntry
    from cluster.routing.tenants import FairLine

_DEFAULT_TENANT = TenantConfig()


class Bounds:
    """The configured limits of admission.

    Args:
        config: Limit of queued tokens, and tenants.
        max_queued_requests: Limit of queued requests.
    """

    def __init__(self, config: AdmissionConfig, max_queued_requests: int) -> None:
        self._config = config
        self._max_queued_requests = max_queued_requests

    def tenant(self, name: str) -> TenantConfig:
        """Return the configuration of a tenant; the default one sets no limits."""
        return self._config.tenants.get(name, _DEFAULT_TENANT)

    def is_too_many(self, entry: AdmissionEntry, line: FairLine[AdmissionEntry]) -> bool:
        """Return whether the queue is full and no other tenant has more waiting than this one."""
        is_full = bool(line) and self.is_over(line, 1, entry.num_tokens)
        return is_full and line.has_most(entry.tenant)

    def is_over(
        self, line: FairLine[AdmissionEntry], further: int = 0, further_tokens: int = 0
    ) -> bool:
        """Return whether the queue exceeds its limits, with the given additions."""
        limit = self._config.max_queued_tokens
        if limit is not None and num_waiting_tokens(line) + further_tokens > limit:
            return True
        return len(line) + further > self._max_queued_requests


def num_waiting_tokens(line: FairLine[AdmissionEntry]) -> int:
    """Return the prompt tokens of all queued requests."""
    return sum(entry.num_tokens for entry in line)


def whole_seconds(seconds: float) -> int:
    """Round up to whole seconds, at least 1, for a `Retry-After` header."""
    return max(math.ceil(seconds), 1)
