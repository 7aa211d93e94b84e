"""Which ranks hold each expert of a mixture-of-experts model. Pure.

The same ranks hold an expert in every layer. An expert that many tokens choose may be held by
several ranks: a rank that holds it computes its own tokens, and the others share theirs out.

Source: the logical-to-physical map of vLLM's expert parallel load balancer
(vllm/distributed/eplb), which moves experts while it runs; here the table is a setting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from replicas.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Ranks of experts.

    Attributes:
        ranks: For each expert the ranks that hold it, ascending; at least one.
        size: Number of ranks.
    """

    ranks: tuple[tuple[int, ...], ...]
    size: int

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Return the experts that a rank holds, ascending; there may be none."""
        return tuple(expert for expert, ranks in enumerate(self.ranks) if rank in ranks)


def place_experts(
    num_experts: int, size: int, table: Sequence[Sequence[int]] | None
) -> ExpertPlacement:
    """Return the placement of a table, or without one equal runs of experts.

    Args:
        num_experts: Experts of a layer.
        size: Number of ranks.
        table: For each expert the ranks that hold it.

    Raises:
        ConfigError: The table does not fit the model or the gang, or there is none and the experts
            do not divide by the ranks.
    """
    if table is None:
        share, rest = divmod(num_experts, size)
        if rest:
            raise ConfigError(
                f"the model's {num_experts} experts do not divide by gang_size {size}: change it, "
                "or set expert_placement"
            )
        return ExpertPlacement(tuple((expert // share,) for expert in range(num_experts)), size)
    if len(table) != num_experts:
        raise ConfigError(
            f"expert_placement has ranks for {len(table)} experts, and the model has {num_experts}"
        )
    for expert, ranks in enumerate(table):
        if not ranks or len(set(ranks)) < len(ranks):
            raise ConfigError(
                f"expert_placement[{expert}] {list(ranks)} must be one or more different ranks"
            )
        if min(ranks) < 0 or max(ranks) >= size:
            raise ConfigError(
                f"expert_placement[{expert}] {list(ranks)} must be ranks from 0 to {size - 1}, "
                f"for gang_size {size}"
            )
    return ExpertPlacement(tuple(tuple(sorted(ranks)) for ranks in table), size)
