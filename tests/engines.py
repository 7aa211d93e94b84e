"""Runs requests through engine cores of this process, step by step."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from replicas.columns import ColumnReader
from replicas.config import EngineConfig
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.messages import AddRequest, EngineRequest, Refused, TokenOutput
from replicas.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from replicas.messages import EngineEvent

CLIENT = b"test"
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, seed=0)


def make_config(model: str, **changes: object) -> EngineConfig:
    """A float32 engine of one thread with eight slots and blocks of 32 tokens."""
    settings: dict[str, object] = {
        "model": model,
        "dtype": "float32",
        "max_batch_size": 8,
        "max_model_len": 128,
        "block_size": 32,
        "num_blocks": 64,
        "num_threads": 1,
    }
    return EngineConfig(**{**settings, **changes})


@contextlib.contextmanager
def engine_core(config: EngineConfig, **arguments: object) -> Iterator[EngineCore]:
    """An engine core that is shut down, and must have given everything back."""
    core = EngineCore(config, UniProcExecutor(config, **arguments))
    before = core.snapshot(0)
    try:
        yield core
        core.check_invariants()
        assert core.num_live == 0
        assert core.snapshot(0).groups == before.groups
    finally:
        core.shutdown()


def generate(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    *,
    stagger: int = 0,
) -> list[list[int]]:
    """Output tokens of each prompt.

    Args:
        core: An idle engine.
        prompts: Token ids.
        sampling: For all, or one for each.
        stagger: How many steps pass between two arrivals; 0 adds all at once.
    """
    params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    waiting = [
        EngineRequest(f"r{i}", list(prompt), param)
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True))
    ]
    outputs: dict[str, list[int]] = {request.request_id: [] for request in waiting}
    num_open = len(waiting)
    for step in range(100_000):
        while waiting and (not stagger or step % stagger == 0):
            core.handle(CLIENT, AddRequest(waiting.pop(0)), 0.0)
            if stagger:
                break
        core.step(0.0)
        core.check_invariants()
        for event in take_events(core).get(CLIENT, []):
            assert not isinstance(event, Refused), event
            if isinstance(event, TokenOutput):
                assert event.index == len(outputs[event.request_id])
                outputs[event.request_id].extend(event.token_ids)
                num_open -= event.finish_reason is not None
        if not num_open:
            _settle(core)
            return list(outputs.values())
    raise AssertionError(f"{num_open} requests did not end")


_readers: WeakKeyDictionary[EngineCore, defaultdict[bytes, ColumnReader]] = WeakKeyDictionary()


def take_events(core: EngineCore) -> dict[bytes, list[EngineEvent]]:
    """What a core has to tell its clients, as each of them reads it."""
    readers = _readers.setdefault(core, defaultdict(ColumnReader))
    return {client: readers[client].read(found) for client, found in core.take_events().items()}


def _settle(core: EngineCore) -> None:
    """Let a KV connector finish with what the requests have left behind."""
    end_s = time.monotonic() + 20.0
    while core.num_live:
        assert time.monotonic() < end_s, f"something is held for ever: {core!r}"
        if not core.step(0.0):
            time.sleep(0.001)
        core.check_invariants()


def num_preemptions(core: EngineCore) -> int:
    """How often a sequence lost its blocks."""
    return sum(group.num_preemptions for group in core.metrics(0.0).groups)


def num_prefix_hits(core: EngineCore) -> int:
    """Prompt tokens that were found in the prefix cache."""
    return sum(group.prefix_cache_hits for group in core.metrics(0.0).groups)
