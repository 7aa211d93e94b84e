"""One lane: its model, KV cache, persistent input tensors, and traces.

A lane's calls only enqueue commands and never wait for the device. Every input tensor is allocated
once and refreshed in place, for traced and untraced calls alike.

Dimensions: B rows of the lane's decode batch; S tokens of a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import ttnn

from replicas.generators.ttnn.attention import LARGEST_PIECE
from replicas.generators.ttnn.buckets import (
    bucket_for,
    decode_table_width,
    prefill_buckets,
    prefill_table_width,
    split_chunks,
    traced_buckets,
)
from replicas.generators.ttnn.inputs import (
    PADDING_POSITION,
    host_decode_inputs,
    host_page_table,
    host_prefill_inputs,
    refresh,
    to_device,
)
from replicas.generators.ttnn.sampling import (
    Sampler,
    greedy_rows,
    host_sampling_inputs,
    host_seeds,
)
from replicas.warm_up import timed_pass

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    import torch

    from replicas.generators.ttnn.inputs import IntArray, TTPrefillInputs
    from replicas.generators.ttnn.model import LaneCache, TTTransformer
    from replicas.generators.ttnn.sampling import SamplingRows
    from replicas.generators.ttnn.trace import Tracer

    Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LaneSizes:
    """Sizes that a lane's programs are compiled for.

    Attributes:
        num_rows: B.
        max_seq_len: Tokens of the longest sequence.
        block_size: Tokens per KV block.
        local_vocab: Vocabulary of one chip, padding included.
        hidden_size: Of the model.
    """

    num_rows: int
    max_seq_len: int
    block_size: int
    local_vocab: int
    hidden_size: int


class _TracedCall:
    """Forward pass of one shape over persistent tensors; traced once captured."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run
        self._replay = run

    def capture(self, tracer: Tracer, device: ttnn.MeshDevice) -> None:
        self._replay = tracer.capture(device, self._run)

    def __call__(self, *, traced: bool) -> Any:  # noqa: ANN401 - what the pass returns
        return self._replay() if traced else self._run()


class TTLane:
    """Data-parallel group of a mesh.

    Owns its input tensors and sampler. Model, cache and tracers belong to the caller.

    Args:
        device: Submesh (1, tp).
        model: The model on it.
        cache: ``[layer] -> [k, v]``.
        sizes: Shapes.
        prefill_tracer: Captures chunks.
        decode_tracer: Captures decode steps.
    """

    def __init__(
        self,
        device: ttnn.MeshDevice,
        model: TTTransformer,
        cache: LaneCache,
        sizes: LaneSizes,
        prefill_tracer: Tracer,
        decode_tracer: Tracer,
    ) -> None:
        self.device = device
        self._model = model
        self._cache = cache
        self._sizes = sizes
        self._table_width = decode_table_width(sizes.max_seq_len, sizes.block_size)
        self._prefill_tracer = prefill_tracer
        self._decode_tracer = decode_tracer
        self._sampler = Sampler(device, model.collectives, sizes.num_rows, sizes.local_vocab)
        # (bucket, whether the chunk begins at 0, attention's piece) -> call.
        self._chunks: dict[tuple[int, bool, int], tuple[TTPrefillInputs, _TracedCall]] = {}
        # Host copy of the device's positions for the next decode step.
        self._positions = np.full(sizes.num_rows, PADDING_POSITION, dtype=np.int64)
        self._continues = False
        self._rows = greedy_rows(sizes.num_rows)
        host = self._host_decode_inputs(self._positions, self._positions)
        self._inputs = to_device(host, device)
        host_sampling: Any = host_sampling_inputs(self._rows, self._positions)
        self._sampling = to_device(host_sampling, device)
        self._logits = _TracedCall(self._decode_logits)
        self._tokens = _TracedCall(self._decode_tokens)
        # Separate settings and tokens, so that a prefill's draw leaves the running decode batch
        # alone.
        self._chunk_sampling = to_device(host_sampling, device)
        self._chunk_tokens = ttnn.to_device(host.tokens, device)

    @property
    def is_live(self) -> npt.NDArray[np.bool_]:
        """Rows that the next decode step computes, bool (B,)."""
        live: npt.NDArray[np.bool_] = self._positions >= 0
        return live

    def close(self) -> None:
        """Free tensors that traces use; call after these are released. Idempotent."""
        self._model.close()

    # --- warm-up -------------------------------------------------------------------------------

    def compile_prefill(self, *, sample: bool) -> None:
        """Run every bucket in the null block, as a first chunk and as later chunks.

        One later chunk needs small pieces of attention, another allows large ones.
        """
        block_size, max_seq_len = self._sizes.block_size, self._sizes.max_seq_len
        done = set()
        for bucket in prefill_buckets(max_seq_len):
            for start in (0, block_size, LARGEST_PIECE):
                num_tokens = min(bucket, max_seq_len - start)
                # The longest bucket may only fit a whole prompt; it then has no later chunk.
                if num_tokens < 1 or bucket_for(num_tokens, max_seq_len) != bucket:
                    continue
                shape = self._shape(bucket, start)
                if shape in done:
                    continue
                done.add(shape)
                zeros = np.zeros(start + num_tokens, dtype=np.int64)
                with timed_pass(f"compile prefill of {bucket} tokens from {start}"):
                    logits = self._chunk(zeros, start, len(zeros), zeros, traced=False)
                    self._first_row(logits)
                    if sample:
                        self._sample_chunk(logits, greedy_rows(1), position=0)

    def capture_prefill(self) -> None:
        """Capture the calls that ``compile_prefill`` has run, for the traced buckets."""
        traced = traced_buckets(self._sizes.max_seq_len)
        for (bucket, *_), (_, call) in self._chunks.items():
            if bucket in traced:
                with timed_pass(f"capture prefill of {bucket} tokens"):
                    call.capture(self._prefill_tracer, self.device)

    def compile_decode(self, *, sample: bool) -> None:
        """Run a full decode batch in the null block."""
        zeros = np.zeros(self._sizes.num_rows, dtype=np.int64)
        self._load(self._host_decode_inputs(zeros, zeros), zeros - 1)
        self._logits(traced=False)
        if sample:
            _, logits = self._tokens(traced=False)
            self._row_major(logits)

    def capture_decode(self, *, sample: bool) -> None:
        """Capture the calls that ``compile_decode`` has run."""
        self._logits.capture(self._decode_tracer, self.device)
        if sample:
            self._tokens.capture(self._decode_tracer, self.device)

    # --- prefill -------------------------------------------------------------------------------

    def prefill(
        self,
        tokens: Int64Array,
        start: int,
        block_ids: IntArray,
        sampling: SamplingRows | None,
        *,
        traced: bool,
    ) -> ttnn.Tensor:
        """Compute the end of one prompt.

        Args:
            tokens: (n,) the prompt from position 0.
            start: First position whose KV is not in the cache.
            block_ids: The sequence's blocks from position 0.
            sampling: Settings of the row; None for logits.
            traced: Replay a trace if there is one.

        Returns:
            An output being copied to the host: logits of the last token, (1, 1, 1, V / tp) per
            chip, or uint32 (1, B) whose first entry is the token.
        """
        sizes = self._sizes
        *earlier, last = split_chunks(start, len(tokens), sizes.max_seq_len, sizes.block_size)
        for begin, end in earlier:
            self._chunk(tokens, begin, end, block_ids, traced=traced)
        logits = self._chunk(tokens, *last, block_ids, traced=traced)
        if sampling is None:
            return self.read(self._first_row(logits), wait=False)
        return self.read(self._sample_chunk(logits, sampling, position=len(tokens) - 1), wait=False)

    def _chunk(
        self, tokens: Int64Array, begin: int, end: int, block_ids: IntArray, *, traced: bool
    ) -> ttnn.Tensor:
        max_seq_len, block_size = self._sizes.max_seq_len, self._sizes.block_size
        host = host_prefill_inputs(
            tokens[begin:end],
            begin,
            block_ids,
            max_seq_len=max_seq_len,
            block_size=block_size,
            table_width=prefill_table_width(max_seq_len, block_size),
            hidden_size=self._sizes.hidden_size,
        )
        shape = self._shape(bucket_for(end - begin, max_seq_len), begin)
        if shape in self._chunks:
            inputs, call = self._chunks[shape]
            refresh(inputs, host)
        else:
            inputs = to_device(host, self.device)
            call = _TracedCall(lambda: self._model.prefill(inputs, self._cache, shape[-1]))
            self._chunks[shape] = inputs, call
        return call(traced=traced)

    def _shape(self, bucket: int, begin: int) -> tuple[int, bool, int]:
        return bucket, begin == 0, self._model.attention_piece(bucket, begin)

    def _first_row(self, logits: ttnn.Tensor) -> ttnn.Tensor:
        rows = ttnn.to_layout(logits, ttnn.ROW_MAJOR_LAYOUT)
        return ttnn.slice(rows, [0, 0, 0, 0], [1, 1, 1, self._sizes.local_vocab])

    def _sample_chunk(
        self, logits: ttnn.Tensor, sampling: SamplingRows, *, position: int
    ) -> ttnn.Tensor:
        # All rows of the logits are equal: give all rows the same settings.
        alike = np.zeros(self._sizes.num_rows, dtype=np.int64)
        host: Any = host_sampling_inputs(sampling.select(alike), alike + position)
        refresh(self._chunk_sampling, host)
        return self._sampler.sample(logits, self._chunk_sampling, self._chunk_tokens)

    # --- decode --------------------------------------------------------------------------------

    def load(self, tokens: Int64Array, positions: Int64Array, page_table: IntArray) -> None:
        """Overwrite the inputs of the next decode step; arguments as ``host_decode_inputs``."""
        if positions.max() < 0:  # The lane skips this step.
            self._positions = positions.copy()
            return
        self._load(self._host_decode_inputs(tokens, positions, page_table), positions)

    def load_page_table(self, page_table: IntArray) -> None:
        """Overwrite the page table alone."""
        host = host_page_table(self.is_live, page_table, table_width=self._table_width)
        ttnn.copy_host_to_device_tensor(host, self._inputs.page_table)

    def load_sampling(self, rows: SamplingRows) -> None:
        """Overwrite the sampling settings of the B rows."""
        self._rows = rows
        host: Any = host_sampling_inputs(rows, self._positions)
        refresh(self._sampling, host)

    def check_continues(self) -> None:
        """Check that the device can continue from its own draws.

        Raises:
            ValueError: The last step drew nothing, or a row is at its full length.
        """
        if self.is_live.any() and not self._continues:
            raise ValueError("the last decode drew no tokens on the device: set reload_inputs")
        if self._positions.max() >= self._sizes.max_seq_len:
            raise ValueError(
                f"position {self._positions.max()} does not fit in {self._sizes.max_seq_len} tokens"
            )

    def decode(
        self, *, sample: bool, logits: bool, traced: bool
    ) -> tuple[ttnn.Tensor | None, ttnn.Tensor | None]:
        """Compute a token of every live row.

        Args:
            sample: Whether to draw tokens and prepare the next step on the device.
            logits: Whether to return logits; `sample` or this must be set.
            traced: Replay a trace if there is one.

        Returns:
            The requested outputs: uint32 (1, B) tokens, which the next step overwrites; logits (1,
            1, B, V / tp) per chip, row-major.
        """
        self._continues = False
        if not sample:
            return None, self._logits(traced=traced)
        if not self._rows.is_greedy.all():
            seeds = host_seeds(self._rows, self._positions)
            ttnn.copy_host_to_device_tensor(seeds, self._sampling.seeds)
        tokens, rows = self._tokens(traced=traced)
        self._positions[self.is_live] += 1
        self._continues = True
        return tokens, self._row_major(rows) if logits else None

    def _decode_logits(self) -> ttnn.Tensor:
        return self._row_major(self._model.decode(self._inputs, self._cache))

    def _row_major(self, logits: ttnn.Tensor) -> ttnn.Tensor:
        rows = ttnn.to_layout(logits, ttnn.ROW_MAJOR_LAYOUT)
        return ttnn.slice(rows, [0, 0, 0, 0], [1, 1, self._sizes.num_rows, self._sizes.local_vocab])

    def _decode_tokens(self) -> tuple[ttnn.Tensor, ttnn.Tensor]:
        """Return tokens, and in tiles the logits they were drawn from, which the host may need."""
        logits = self._model.decode(self._inputs, self._cache)
        self._sampler.sample(logits, self._sampling, self._inputs.tokens)
        ttnn.plus_one(self._inputs.positions, skip_negative_entries=True)
        # Padding rows advance, too. They start at 0 after a reload, so they never pass a live row.
        ttnn.plus_one(self._inputs.rope_indices)
        return self._inputs.tokens, logits

    def _host_decode_inputs(
        self, tokens: Int64Array, positions: Int64Array, page_table: IntArray | None = None
    ) -> Any:  # noqa: ANN401 - TTDecodeInputs
        sizes = self._sizes
        return host_decode_inputs(
            tokens,
            positions,
            np.zeros((sizes.num_rows, 1), dtype=np.int64) if page_table is None else page_table,
            table_width=self._table_width,
        )

    def _load(self, host: Any, positions: Int64Array) -> None:  # noqa: ANN401 - TTDecodeInputs
        refresh(self._inputs, host)
        self._positions = positions.copy()

    # --- outputs -------------------------------------------------------------------------------

    def read(self, tensor: ttnn.Tensor, *, wait: bool) -> ttnn.Tensor:
        """Copy an output to the host, in the order of the commands.

        Args:
            tensor: On the device.
            wait: Until it has arrived; otherwise it may be used after an ``event`` recorded later.
        """
        return ttnn.from_device(tensor, blocking=wait)

    def event(self) -> ttnn.MeshEvent:
        """Return an event for the end of all commands so far, for ``ttnn.event_synchronize``."""
        return ttnn.record_event(self.device, 0)

    def logits(self, host: ttnn.Tensor) -> torch.Tensor:
        """Return a host tensor of logits as bfloat16 (rows, V), V with the vocabulary's padding."""
        whole: torch.Tensor = ttnn.to_torch(
            host, mesh_composer=ttnn.ConcatMeshToTensor(self.device, dim=3)
        )
        return whole[0, 0]

    def token_ids(self, host: ttnn.Tensor) -> Int64Array:
        """Return a host tensor of tokens as (B,); the chips have the same."""
        chip = ttnn.to_torch(ttnn.get_device_tensors(host)[0])
        tokens: Int64Array = chip.reshape(-1).numpy().astype(np.int64)
        return tokens
