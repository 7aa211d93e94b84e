"""The contract of every generator on any device: check one with ``check_generator``.

Needs nothing but the generator: it compares the generator with itself across chunking, lanes, batch
forms and cache contents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from tests.replicas.generators.paged_loop import PagedLoop

if TYPE_CHECKING:
    from replicas.generators.model_config import ModelConfig

PROMPTS = ([5, 9, 3], list(range(7, 30)), [11], list(range(40, 3, -1)), list(range(2, 18)))
NUM_NEW = 6
MAX_SEQ_LEN = 128


class Maker(Protocol):
    """Makes a generator; ``tt_data_parallel`` divides ``max_batch_size``."""

    def __call__(
        self, *, max_batch_size: int, max_seq_len: int, tt_data_parallel: int
    ) -> tuple[Any, ModelConfig]:
        """Return (generator, configuration)."""
        ...


def check_generator(
    maker: Maker, *, block_size: int = 32, dtype: torch.dtype = torch.float32
) -> None:
    """Assert the generator contract on tiny prompts (token ids below 64, six output tokens).

    Args:
        maker: Makes generators of one model with a vocabulary of at least 64.
        block_size: Tokens per KV block.
        dtype: Dtype of the KV cache.
    """
    loop, generator = _loop(maker, 1, block_size, dtype)
    capabilities = generator.model_capabilities
    _check_budget(generator)
    whole = _outputs(loop)
    assert all(len(output) == NUM_NEW for output in whole)
    four, _ = _loop(maker, 4, block_size, dtype)
    assert _outputs(four) == whole, "lanes change tokens"
    if capabilities.get("supports_chunked_prefill"):
        loop, _ = _loop(maker, 1, block_size, dtype)
        assert _outputs(loop, chunk=7) == whole, "chunking changes tokens"
    if capabilities.get("supports_mixed_batch"):
        for lanes in (1, 4):
            loop, _ = _loop(maker, lanes, block_size, dtype)
            assert _outputs(loop, chunk=5, mixed=True) == whole, "mixed batches change tokens"
    if capabilities.get("supports_prefix_caching"):
        _check_prefix_hit(maker, block_size, dtype)
    if capabilities.get("supports_layer_callbacks"):
        _check_layer_callbacks(maker, block_size, dtype)
    _check_padding_rows(maker, block_size, dtype)
    _check_warm_up(maker, block_size, dtype)


def _loop(maker: Maker, lanes: int, block_size: int, dtype: torch.dtype) -> tuple[PagedLoop, Any]:
    generator, config = maker(max_batch_size=8, max_seq_len=MAX_SEQ_LEN, tt_data_parallel=lanes)
    loop = PagedLoop(
        generator,
        config,
        num_lanes=lanes,
        slots_per_lane=8 // lanes,
        block_size=block_size,
        max_seq_len=MAX_SEQ_LEN,
        dtype=dtype,
    )
    return loop, generator


def _outputs(loop: PagedLoop, chunk: int | None = None, mixed: bool = False) -> list[list[int]]:
    sequences = loop.generate(PROMPTS, NUM_NEW, chunk=chunk, mixed=mixed)
    return [sequence.output for sequence in sequences]


def _check_budget(generator: Any) -> None:
    if hasattr(generator, "get_max_tokens_all_users"):
        budget = type(generator).get_max_tokens_all_users(
            model_name="", num_devices=1, tt_data_parallel=1, max_model_len=128, max_num_seqs=8
        )
        assert budget > 0


def _check_prefix_hit(maker: Maker, block_size: int, dtype: torch.dtype) -> None:
    loop, _ = _loop(maker, 1, block_size, dtype)
    prompt = [3 + 5 * i % 59 for i in range(2 * block_size + 3)]
    (first,) = loop.generate([prompt], 1)
    # Two whole blocks are shared, the rest is the second sequence's own.
    hit = loop.add(prompt, 1)
    hit.block_ids[:2] = first.block_ids[:2]
    hit.num_computed_tokens = 2 * block_size
    loop.step_prefill([hit])
    assert hit.output == first.output, "a prefix hit changes tokens"


def _check_layer_callbacks(maker: Maker, block_size: int, dtype: torch.dtype) -> None:
    loop, generator = _loop(maker, 1, block_size, dtype)
    calls: list[tuple[str, int]] = []
    generator.set_layer_callbacks(
        lambda layer: calls.append(("before", layer)), lambda layer: calls.append(("after", layer))
    )
    sequence = loop.add(PROMPTS[0], 3)
    loop.step_prefill([sequence])
    num_layers = len(calls) // 2
    layers = [(when, layer) for layer in range(num_layers) for when in ("before", "after")]
    assert calls == layers
    assert layers
    loop.step_decode([sequence])
    assert calls == layers * 2
    generator.set_layer_callbacks(None, None)
    loop.step_decode([sequence])
    assert calls == layers * 2, "the callbacks outlive their removal"


def _check_padding_rows(maker: Maker, block_size: int, dtype: torch.dtype) -> None:
    loop, _ = _loop(maker, 2, block_size, dtype)
    sequence = loop.add(PROMPTS[1], 2)
    loop.step_prefill([sequence])
    logits = loop.step_decode([sequence])
    padding = [slot for slot in range(8) if slot != sequence.slot]
    assert logits[sequence.slot].any()
    assert not logits[padding].any(), "a padding row has logits"


def _check_warm_up(maker: Maker, block_size: int, dtype: torch.dtype) -> None:
    """Warm up, both phases, between a prefill and its decode: nothing may change."""
    loop, generator = _loop(maker, 1, block_size, dtype)
    kept, _ = _loop(maker, 1, block_size, dtype)
    sequences = [each.add(PROMPTS[3], 2) for each in (loop, kept)]
    for each, sequence in zip((loop, kept), sequences, strict=True):
        each.step_prefill([sequence])
    for enable_trace in (False, True):
        generator.warmup_model_prefill(kv_cache=loop.cache, enable_trace=enable_trace)
        generator.warmup_model_decode(
            kv_cache=loop.cache,
            enable_trace=enable_trace,
            max_batch_size=8,
            num_blocks=loop.table_width,
        )
    for each, sequence in zip((loop, kept), sequences, strict=True):
        each.step_decode([sequence])
    assert sequences[0].output == sequences[1].output, "warm-up changes tokens"
