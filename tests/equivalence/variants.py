"""The ways to cut up and place the same work, and the prompts to do it with."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from unittest import mock

from kv_transfer.store import StoreConfig
from replicas.config import SpeculativeConfig
from replicas.speculation.controller import DraftController
from tests.engines import engine_core, generate, make_config, num_preemptions, num_prefix_hits
from tests.replicas.engine.shelf_connector import SHELVES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.sampling_params import SamplingParams

_LONG = [(7 * i * i + 3 * i) % 157 for i in range(90)]
PROMPTS = [
    _LONG[:70],
    [11],
    [5, 9, 3],
    _LONG[:64],
    list(range(1, 34)),
    [13 * i % 151 for i in range(2, 34)],
    [*_LONG[:40], 1, 2, 3],
    [17 * i % 149 for i in range(1, 22)],
    [2, 2],
    [*_LONG[:32], 150],
]
"""Lengths from 1 to 70: inside, at and across ends of blocks of 16 and 32; some begin alike."""


@dataclass(frozen=True)
class Variant:
    """One way to run the prompts.

    Attributes:
        settings: Of the engine, besides those of `make_config`.
        stagger: Steps between two arrivals.
        repeat: Run this often on one engine; the last time counts.
        must_preempt: The engine must have taken blocks away.
        must_hit: The engine must have found prompts in its prefix cache.
        must_load: The engine must have got KV from a store.
        must_draft: Drafts must have been verified, which happens wherever there are some,
            whatever they cost.
    """

    settings: dict[str, object] = field(default_factory=dict)
    stagger: int = 0
    repeat: int = 1
    must_preempt: bool = False
    must_hit: bool = False
    must_load: bool = False
    must_draft: bool = False


_MISS = {"enable_prefix_caching": False}
_CHUNKED = {"max_num_batched_tokens": 16}
_WHOLE = {"enable_chunked_prefill": False, "max_num_batched_tokens": 256}
_APART = {"mixed_batches": False}
_FOUR_LANES = {"tt_data_parallel": 4}
_MOST_DRAFTS = 4
_DRAFTS = {
    "speculative_config": SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=_MOST_DRAFTS,
        prompt_lookup_min=1,
        prompt_lookup_max=3,
    )
}
_POOLED = {
    "kv_connector": "pooled",
    "kv_store": StoreConfig(
        backend="tests.kv_transfer.memory_store:MemoryStore",
        address=__name__,
        capacity_bytes=1 << 30,
        unit_tokens=32,
        timeout_s=20.0,
    ),
}

VARIANTS = {
    "mixed, chunked": Variant({**_MISS, **_CHUNKED}),
    "mixed, whole": Variant({**_MISS, **_WHOLE}),
    "apart, chunked": Variant({**_MISS, **_CHUNKED, **_APART}),
    "apart, whole": Variant({**_MISS, **_WHOLE, **_APART}),
    "mixed, whole, batched attention": Variant({**_MISS, **_WHOLE, "attention": "batched"}),
    "mixed, chunked, arrivals apart": Variant({**_MISS, **_CHUNKED}, stagger=3),
    "mixed, chunked, four lanes": Variant({**_MISS, **_CHUNKED, **_FOUR_LANES}),
    "apart, whole, four lanes": Variant({**_MISS, **_WHOLE, **_APART, **_FOUR_LANES}),
    "mixed, chunked, prefix hit": Variant(_CHUNKED, repeat=2, must_hit=True),
    "apart, whole, prefix hit": Variant({**_WHOLE, **_APART}, repeat=2, must_hit=True),
    "apart, chunked, four lanes, prefix hit, arrivals apart": Variant(
        {**_CHUNKED, **_APART, **_FOUR_LANES}, stagger=2, repeat=2, must_hit=True
    ),
    "mixed, chunked, preempted": Variant(
        {**_MISS, **_CHUNKED, "block_size": 16, "num_blocks": 9}, must_preempt=True
    ),
    "apart, whole, preempted, prefix hit": Variant(
        {**_WHOLE, **_APART, "block_size": 16, "num_blocks": 9},
        repeat=2,
        must_preempt=True,
        must_hit=True,
    ),
    "mixed, chunked, drafts": Variant({**_MISS, **_CHUNKED, **_DRAFTS}, must_draft=True),
    "mixed, whole, four lanes, drafts, arrivals apart": Variant(
        {**_MISS, **_WHOLE, **_FOUR_LANES, **_DRAFTS}, stagger=3, must_draft=True
    ),
    "mixed, chunked, preempted, prefix hit, drafts": Variant(
        {**_CHUNKED, **_DRAFTS, "block_size": 16, "num_blocks": 9},
        repeat=2,
        must_draft=True,
        must_preempt=True,
        must_hit=True,
    ),
    "mixed, chunked, pooled": Variant({**_MISS, **_CHUNKED, **_POOLED}, repeat=2, must_load=True),
    "apart, whole, four lanes, somebody else's connector": Variant(
        {**_MISS, **_WHOLE, **_APART, **_FOUR_LANES, "kv_connector": SHELVES}, stagger=2, repeat=2
    ),
}


def run(
    variant: Variant,
    folder: str,
    sampling: SamplingParams | Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]] = PROMPTS,
    **changes: object,
) -> list[list[int]]:
    """Output tokens of each prompt."""
    with contextlib.ExitStack() as stack:
        if variant.must_draft:
            patch = mock.patch.object(DraftController, "limit", return_value=_MOST_DRAFTS)
            stack.enter_context(patch)
        config = make_config(folder, **{**variant.settings, **changes})
        core = stack.enter_context(engine_core(config))
        for _ in range(variant.repeat):
            outputs = generate(core, prompts, sampling, stagger=variant.stagger)
        assert not variant.must_preempt or num_preemptions(core)
        assert not variant.must_hit or num_prefix_hits(core)
        assert not variant.must_draft or core.metrics(0.0).drafts.num_draft_tokens
        assert not variant.must_load or core.metrics(0.0).transfer.store.hits
    return outputs
