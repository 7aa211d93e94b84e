"""A worked example of preparing a pass: every array of two steps, through scheduler and batch.

Source: vllm-ascend docs/source/developer_guide/feature_guide/ModelRunner_prepare_inputs.md. Three
requests with prompts of 3, 2 and 8 tokens, 10 tokens a step, blocks of 2, sequences of 12.
"""

from __future__ import annotations

import numpy as np

from replicas.engine.input_batch import PersistentBatch
from tests.replicas.engine.fakes import make_sequence, result_of, scheduler_of

M, BLOCK_SIZE, K = 12, 2, 6
T = [[100, 101, 102], [110, 111], [120, 121, 122, 123, 124, 125, 126, 127]]
"""The prompts: 120 is T_2_0 of the example."""
T_0_3, T_1_2 = 103, 112
"""The tokens that the first step samples."""


class Engine:
    """A scheduler and the persistent batch of its worker."""

    def __init__(self):
        self.scheduler = scheduler_of(
            20, max_model_len=M, max_batch_size=3, block_size=BLOCK_SIZE, max_num_batched_tokens=10
        )
        self.batch = PersistentBatch(3, M, [BLOCK_SIZE])
        assert self.batch.table_width == K
        for number, prompt in enumerate(T):
            self.scheduler.add(make_sequence(str(number), prompt), 0.0)

    def step(self, *runs):
        """Plan and prepare a step that gives rows these runs; return every array by its name."""
        scheduled, batch = self.scheduler.schedule(), self.batch
        batch.apply(scheduled)
        slots = np.array(scheduled.slots, dtype=np.int32)
        counts = np.array(scheduled.num_scheduled_tokens, dtype=np.int32)
        num_logits = batch.num_logits(slots, counts)
        flat = batch.flat_inputs(slots, counts, num_logits)
        arrays = {
            **batch.places_of_tokens(slots, counts)._asdict(),
            **{name: getattr(flat, name) for name in (
                "input_ids", "slot_mapping", "query_start_loc", "seq_lens", "logits_indices",
                "num_computed_tokens",
            )},
            "token_ids": batch.token_ids,
            "block_table": batch.block_table[0],
        }  # fmt: skip
        for name in ("block_table_indices", "block_numbers", "slot_mapping"):
            [arrays[name]] = arrays[name]
        found = {name: array.tolist() for name, array in arrays.items()}
        found |= {"num_scheduled_tokens": scheduled.num_scheduled_tokens}
        found |= {"num_reqs": flat.num_reqs, "max_query_len": flat.max_query_len}
        places = batch.num_tokens[slots]
        batch.advance(slots, counts, num_logits)
        sampled = num_logits > 0
        batch.record(slots[sampled], places[sampled], np.array([run[0] for run in runs if run]))
        self.scheduler.update(scheduled, result_of(runs))
        return found


def padded(rows, width):
    return [row + [0] * (width - len(row)) for row in rows]


def test_every_array_of_both_steps():
    """The example gives blocks for scheduled tokens alone; this engine for whole prompts.

    A prompt's blocks are taken at admission, so that two half-computed prompts cannot starve each
    other. So the third request has its block 7 in the first step already, and the second one gets
    block 8 in the second: 16 is where the example has 14, and 14, 15 where it has 16, 17.
    """
    engine = Engine()
    assert engine.step([T_0_3], [T_1_2], []) == {
        "num_scheduled_tokens": [3, 2, 5],
        "request_indices": [0, 0, 0, 1, 1, 2, 2, 2, 2, 2],
        "positions": [0, 1, 2, 0, 1, 0, 1, 2, 3, 4],
        "token_ids": padded(T, M),
        "token_indices": [0, 1, 2, 12, 13, 24, 25, 26, 27, 28],
        "input_ids": [*T[0], *T[1], *T[2][:5]],
        "block_table": padded([[1, 2], [3], [4, 5, 6, 7]], K),
        "block_table_indices": [0, 0, 1, 6, 6, 12, 12, 13, 13, 14],
        "block_numbers": [1, 1, 2, 3, 3, 4, 4, 5, 5, 6],
        "block_offsets": [0, 1, 0, 0, 1, 0, 1, 0, 1, 0],
        "slot_mapping": [2, 3, 4, 6, 7, 8, 9, 10, 11, 12],
        "query_start_loc": [0, 3, 5, 10],
        "seq_lens": [3, 2, 5],
        "num_computed_tokens": [0, 0, 0],
        "num_reqs": 3,
        "max_query_len": 5,
        "logits_indices": [2, 4],
    }
    assert engine.step([1], [1], [1]) == {
        "num_scheduled_tokens": [1, 1, 3],
        "request_indices": [0, 1, 2, 2, 2],
        "positions": [3, 2, 5, 6, 7],
        "token_ids": padded([[*T[0], T_0_3], [*T[1], T_1_2], T[2]], M),
        "token_indices": [3, 14, 29, 30, 31],
        "input_ids": [T_0_3, T_1_2, *T[2][5:]],
        "block_table": padded([[1, 2], [3, 8], [4, 5, 6, 7]], K),
        "block_table_indices": [1, 7, 14, 15, 15],
        "block_numbers": [2, 8, 6, 7, 7],
        "block_offsets": [1, 0, 1, 0, 1],
        "slot_mapping": [5, 16, 13, 14, 15],
        "query_start_loc": [0, 1, 2, 5],
        "seq_lens": [4, 3, 8],
        "num_computed_tokens": [3, 2, 5],
        "num_reqs": 3,
        "max_query_len": 3,
        "logits_indices": [0, 1, 4],
    }
