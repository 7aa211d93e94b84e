"""A ttnn generator with its cache, called with arguments that are right unless told otherwise."""

from __future__ import annotations

import torch

from replicas.generators.ttnn.generator import TTGenerator

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
}
"""Configuration of a model for mock chips."""

BLOCK = 64
MAX_SEQ_LEN = 300
"""Buckets of 128 and 384 tokens."""
NUM_BLOCKS = 60
ROWS = 4
"""Slots of a lane."""


class Calls:
    """A ttnn generator, its cache, and valid arguments for its calls.

    Attributes:
        batch: Slots of all lanes.
        width: Entries of a page table.
    """

    def __init__(self, config, mesh, num_lanes=1, num_rows=ROWS, max_seq_len=MAX_SEQ_LEN):
        self.generator = TTGenerator.initialize_vllm_model(
            config, mesh, num_rows * num_lanes, max_seq_len=max_seq_len, tt_data_parallel=num_lanes
        )
        self.config = config
        self.batch = num_rows * num_lanes
        self.width = -(-max_seq_len // BLOCK)
        self.cache = self.allocate()

    def allocate(self, dtype=torch.bfloat16, **changes):
        config = self.config
        sizes = {
            "num_blocks": NUM_BLOCKS,
            "num_heads": config.num_key_value_heads,
            "block_size": BLOCK,
            "head_dim": config.head_dim,
            "num_layers": config.num_hidden_layers,
            **changes,
        }
        *shape, num_layers = sizes.values()
        return self.generator.allocate_kv_cache(tuple(shape), dtype, num_layers)

    def warm_up_prefill(self, *, enable_trace=False, samples=True, **changes):
        self.generator.warmup_model_prefill(
            kv_cache=self.cache, enable_trace=enable_trace, can_sample_on_device=samples, **changes
        )

    def warm_up_decode(self, *, enable_trace=False, samples=True, **changes):
        arguments = {
            "kv_cache": self.cache,
            "enable_trace": enable_trace,
            "can_sample_on_device": samples,
            "max_batch_size": self.batch,
            "num_blocks": self.width,
        }
        self.generator.warmup_model_decode(**{**arguments, **changes})

    def warm_up(self, **settings):
        self.warm_up_prefill(**settings)
        self.warm_up_decode(**settings)

    def table(self, num_rows):
        """Return the blocks of each row, without the null block; rows share none if possible."""
        blocks = torch.arange(num_rows * self.width, dtype=torch.int32) % (NUM_BLOCKS - 1) + 1
        return blocks.reshape(num_rows, self.width)

    def prefill(self, slots=(0,), starts=None, ends=None, **changes):
        num_rows = len(slots)
        ends = [100] * num_rows if ends is None else ends
        tokens = torch.arange(num_rows * max(ends), dtype=torch.int32) % 97
        arguments = {
            "tokens": tokens.reshape(num_rows, -1),
            "page_table": self.table(num_rows),
            "kv_cache": self.cache,
            "enable_trace": True,
            "prompt_lens": torch.tensor(ends),
            "start_pos": torch.tensor(starts or [0] * num_rows, dtype=torch.int32),
            "empty_slots": list(slots),
        }
        return self.generator.prefill_forward(**{**arguments, **changes})

    def decode(self, positions=None, **changes):
        positions = [5] * self.batch if positions is None else list(positions)
        arguments = {
            "tokens": torch.arange(self.batch, dtype=torch.int32).reshape(-1, 1),
            "page_table": self.table(self.batch),
            "kv_cache": self.cache,
            "start_pos": torch.tensor(positions, dtype=torch.int32),
            "enable_trace": True,
        }
        return self.generator.decode_forward(**{**arguments, **changes})


def note_runs(monkeypatch, generator, noted):
    """Append the number of a lane to `noted` whenever its model runs."""
    for index, lane in enumerate(generator._batch.lanes):
        for name in ("prefill", "decode"):
            run = getattr(lane._model, name)

            def call(*arguments, run=run, index=index):
                noted.append(index)
                return run(*arguments)

            monkeypatch.setattr(lane._model, name, call)
