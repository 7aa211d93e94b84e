"""KV specs of layers, and KV groups: layers of equal spec that share one block table. Pure.

A model states one `KVSpec` per layer (`ModelConfig.kv_specs`). Cache sizes, block counts, cache
shapes and transfer layouts follow from these specs and are computed nowhere else.

An engine gets its groups once, at start (`ModelFacts.kv_groups`). Sizes, pools, tables, snapshots
and a KV connector's settings have one entry for each group, in this order. Not to be confused with
DP groups: each DP group has a pool of blocks for every KV group.

Source of the terms: vLLM v1/kv_cache_interface.py `KVCacheSpec`, `KVCacheGroupSpec`.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from kv_transfer.layout import BFLOAT8_B, BFLOAT8_B_TILE_BYTES, DTYPE_BYTES, ROW_TOKENS
from replicas.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KVKind: TypeAlias = Literal["full", "window", "latent", "state", "cross"]
"""What a layer keeps: keys and values of all tokens (full), or of the last ones (window); one
compressed vector per token (latent); a recurrent state of fixed size (state); keys and values of
an encoder's tokens (cross)."""


ANY_LENGTH = 1 << 40
"""Tokens of a sequence that no KV group limits."""


_MIN_CHECKPOINT_TOKENS = 256
"""A prefix hit recomputes the tokens after its checkpoint, of which fewer cost little."""


class KVSpec(msgspec.Struct, frozen=True, kw_only=True):
    """KV of one layer.

    Attributes:
        heads: KV heads over all device shards; 1 for a latent cache.
        width: Elements of one token in one head; of a state, its elements in one head.
        dtype: Element type, a key of `kv_transfer.layout.DTYPE_BYTES` or "bfloat8_b".
        kind: See `KVKind`.
        planes: 2 for K and V, 1 for a latent cache or a state.
        window: Tokens that a position sees, its own included; only of kind window.
    """

    heads: int
    width: int
    dtype: str
    kind: KVKind = "full"
    planes: int = 2
    window: int | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: A size is not positive, the dtype is unknown, or a window is missing or of
                another kind; names the field.
        """
        for name in ("heads", "width", "planes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"KV spec: {name} {getattr(self, name)} must be positive")
        if self.dtype not in DTYPE_BYTES and self.dtype != BFLOAT8_B:
            known = sorted([*DTYPE_BYTES, BFLOAT8_B])
            raise ConfigError(f"KV spec: dtype {self.dtype!r} is unknown; use one of {known}")
        if (self.kind == "window") != (self.window is not None):
            raise ConfigError(
                f"KV spec: kind {self.kind!r} with window {self.window}; only kind 'window' has one"
            )
        if self.window is not None and self.window <= 0:
            raise ConfigError(f"KV spec: window {self.window} must be positive")

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of a block of so many tokens; a state has the same size for any."""
        elements = self.planes * self.heads * self.width
        if self.kind != "state":
            elements *= block_size
        if self.dtype == BFLOAT8_B:
            return elements * BFLOAT8_B_TILE_BYTES // ROW_TOKENS**2
        return elements * DTYPE_BYTES[self.dtype]


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of equal spec, whose KV a sequence keeps in blocks of one table.

    A block of states has one state, whatever number of tokens an entry of the table stands for:
    that after the last token that was computed, in the entry of this token. Consecutive entries are
    one and the same block, so that each token overwrites the state. Where the next entry is another
    block, the state at the end of an entry is kept: a checkpoint, from which the prefix cache can
    continue.

    Attributes:
        layers: Indices of its layers, 0-based.
        spec: KV of each of these layers.
        block_size: Tokens per block.
        num_blocks: Blocks of each lane, null block included.
        max_blocks: Most blocks that a sequence holds at once; None for those of all its tokens.
    """

    layers: tuple[int, ...]
    spec: KVSpec
    block_size: int
    num_blocks: int
    max_blocks: int | None = None

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all of these layers and planes."""
        return len(self.layers) * self.spec.bytes_per_block(self.block_size)

    @property
    def is_rolling(self) -> bool:
        """Whether a sequence needs the blocks of its last tokens alone: of a window, or a state."""
        return self.spec.window is not None or self.spec.kind == "state"

    @property
    def num_usable_blocks(self) -> int:
        """Blocks of each lane that a sequence can have: all but the null block."""
        return self.num_blocks - 1

    def table_length(self, num_tokens: int) -> int:
        """Return how many entries the block table of so many tokens has."""
        return -(-num_tokens // self.block_size)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a sequence of so many tokens holds at once, at most."""
        length = self.table_length(num_tokens)
        return length if self.max_blocks is None else min(length, self.max_blocks)

    def first_block_seen(self, position: int) -> int:
        """Return the index of the first block with KV that a token at this position sees.

        It sees those before it to the last of its window, itself included; of a state that of the
        token before.
        """
        window = 2 if self.spec.kind == "state" else self.spec.window
        return 0 if window is None else max(position + 1 - window, 0) // self.block_size

    def first_position_moved(self, num_tokens: int) -> int:
        """Return the first position whose KV is loaded from elsewhere, of so many tokens.

        As `kv_transfer.layout.KVLayout.first_row`: a token computed again sees its whole window.
        """
        window = self.spec.window
        return 0 if window is None else max(num_tokens - window, 0) // ROW_TOKENS * ROW_TOKENS

    def num_tokens_in(self, num_blocks: int) -> int:
        """Return the longest sequence, in tokens, that fits into so many blocks."""
        if self.max_blocks is not None and num_blocks >= self.max_blocks:
            return ANY_LENGTH
        return num_blocks * self.block_size


def layers_by_spec(specs: Sequence[KVSpec]) -> list[tuple[KVSpec, tuple[int, ...]]]:
    """Return the layers of each different spec, in the order of their first layers.

    Args:
        specs: KV of each layer of a model.
    """
    layers: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers.setdefault(spec, []).append(layer)
    return [(spec, tuple(indices)) for spec, indices in layers.items()]


def served_by_windows(
    kv_groups: Sequence[KVGroup], num_tokens: int, is_cached: Callable[[int, int], bool]
) -> int:
    """Return the longest prefix that all groups with windows or states serve.

    Such a group serves a prefix if it has the blocks that the token behind it sees. Each
    block is looked up once for each group and length: a missing one cuts the prefix before it.

    Args:
        kv_groups: The model's KV groups.
        num_tokens: Most tokens of the prefix; fills whole blocks in each group, as the result does.
        is_cached: Returns whether a KV group, by its index, has the block of this number.
    """
    multiple = lcm(*(kv_group.block_size for kv_group in kv_groups))
    windowed = [i for i, kv_group in enumerate(kv_groups) if kv_group.is_rolling]
    turn = 0
    while num_tokens and turn < len(windowed):
        index, served = windowed[turn], num_tokens
        kv_group = kv_groups[index]
        number = served // kv_group.block_size
        while number > kv_group.first_block_seen(served):
            number -= 1
            if not is_cached(index, number):
                served = number * kv_group.block_size
                served -= served % multiple
                number = served // kv_group.block_size
        # A shorter prefix is another one for the groups before.
        turn = turn + 1 if served == num_tokens else 0
        num_tokens = served
    return num_tokens


def max_concurrency(groups: Sequence[KVGroup], max_model_len: int, num_lanes: int) -> float:
    """Return how many sequences of the longest length have KV at once, in all KV groups.

    Source: vLLM v1/core/kv_cache_utils.py, `get_max_concurrency_for_kv_cache_config`.
    """
    return num_lanes * min(g.num_usable_blocks / g.num_blocks_for(max_model_len) for g in groups)


def checkpoint_tokens(by_spec: Sequence[tuple[KVSpec, tuple[int, ...]]], block_size: int) -> int:
    """Return the tokens between regular checkpoints of states, a multiple of `block_size`.

    The KV of so many tokens takes as much memory as a state, or more.

    Args:
        by_spec: The layers of each spec of a model.
        block_size: Tokens per block.
    """
    state = sum(len(ls) * s.bytes_per_block(1) for s, ls in by_spec if s.kind == "state")
    kv = sum(len(ls) * s.bytes_per_block(block_size) for s, ls in by_spec if s.kind != "state")
    num_blocks = max(-(-state // kv) if kv else 1, -(-_MIN_CHECKPOINT_TOKENS // block_size))
    return num_blocks * block_size
