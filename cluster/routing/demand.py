"""The demand of a request: the value that queues, policies and pools take. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kv_transfer.block_hash import block_names, extend_block_hashes, prefix_root

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.block_hash import Image
    from replicas.kv_groups import KVGroup
    from replicas.messages import EngineRequest


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """A request as placement sees it; never changes while the request lives.

    Attributes:
        request_id: Name of the request and of its holds.
        prompt_token_ids: The prompt.
        num_choices: Number of sequences, each with a slot of its own.
        expected_output_tokens: Upper limit of each choice's output tokens.
        cache_salt: Requests share cached KV only under equal salts.
        adapter: LoRA adapter that it needs; "" is none.
        priority: Lower ones are placed first.
        tenant: The tenant whose account it runs on.
        deadline_s: Time on the event loop's clock after which its client has given up; None is
            never.
        session: Requests of one session are placed together where possible; "" is none.
        ttft_s: Its own objective for the time to first token; None means the configuration's.
        tpot_s: Its own objective for the time per output token; None means the configuration's.
        images: Images of the prompt. Requests share cached KV only with equal ones.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    num_choices: int = 1
    expected_output_tokens: int = 1
    cache_salt: str = ""
    adapter: str = ""
    priority: int = 0
    tenant: str = ""
    deadline_s: float | None = None
    session: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    images: tuple[Image, ...] = ()
    _hashes: dict[tuple[int, bytes], list[bytes]] = field(
        default_factory=dict, init=False, repr=False
    )
    _names: dict[tuple[int, bytes], list[int]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, request: EngineRequest, now_s: float) -> Demand:
        """Return the demand of a request that arrived at `now_s`."""
        return cls(
            request.request_id,
            request.prompt_token_ids,
            request.sampling.n,
            request.sampling.max_tokens,
            request.cache_salt,
            request.adapter,
            request.priority,
            request.tenant,
            None if request.timeout_s is None else now_s + request.timeout_s,
            request.session,
            request.ttft_s,
            request.tpot_s,
            request.images,
        )

    def with_output(self, request: EngineRequest, token_ids: Sequence[int]) -> Demand:
        """Return the demand of the same request after these tokens, for its next engine."""
        return replace(
            self,
            prompt_token_ids=[*request.prompt_token_ids, *token_ids],
            expected_output_tokens=max(request.sampling.max_tokens - len(token_ids), 1),
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_token_ids)

    @property
    def num_first_tokens(self) -> int:
        """Tokens that need KV blocks at the start: the prompt and the first output token."""
        return len(self.prompt_token_ids) + 1

    def num_blocks(self, kv_group: KVGroup) -> int:
        """Return the KV blocks of a group that it needs at the start."""
        return kv_group.num_blocks_for(self.num_first_tokens)

    def block_hashes(self, block_size: int, key: bytes) -> Sequence[bytes]:
        """Return the chain hashes of the prompt's full blocks, as engines index them.

        Computed at the first call for each block size.

        Args:
            block_size: Tokens per block.
            key: The deployment's key for `kv_transfer.block_hash.PREFIX_CACHE`.
        """
        hashes = self._hashes.get((block_size, key))
        if hashes is None:
            hashes = self._hashes[block_size, key] = []
            root = prefix_root(key, self.cache_salt, self.adapter, self.images)
            extend_block_hashes(hashes, self.prompt_token_ids, block_size, root)
        return hashes

    def block_names(self, block_size: int, key: bytes) -> Sequence[int]:
        """Return names of the blocks that a prefix cache may give it: of all but the last token.

        Computed once, from `block_hashes`.
        """
        names = self._names.get((block_size, key))
        if names is None:
            num_blocks = (self.num_prompt_tokens - 1) // block_size
            hashes = self.block_hashes(block_size, key)[:num_blocks]
            names = self._names[block_size, key] = block_names(hashes)
        return names
