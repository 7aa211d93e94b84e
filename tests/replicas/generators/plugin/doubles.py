"""Models written to the plugin's interface that check every argument and compute real tokens.

Three generations of the interface: contract 1, the legacy contract, and the first one; and two
families of classes: those of tt-transformers, where the named class only chooses the model, and
those of a Galaxy, whose columns are lanes. Each takes exactly the keywords of its generation, by
name, so that any other fails. The token after a context is a hash of the rows found through the
page tables (`replicas.generators.simulated.tokens`). The doubles keep a device's state from step to
step, so that a missing reload gives wrong tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from typing import Any, ClassVar

import numpy as np
import torch
import transformers

from replicas.generators.plugin.adapter import adapt
from replicas.generators.protocol import CpuDevice
from replicas.generators.simulated.tokens import NextToken, PagedKVCache, kv_rows

VOCAB_SIZE = 160
PADDED_VOCAB_SIZE = 192
HEAD_DIM = 16
NUM_KV_HEADS = 2
NUM_LAYERS = 3


@dataclass
class Mesh:
    """The bare mesh; a class must be given it and not its wrapping."""

    num_devices: int = 1

    def get_num_devices(self) -> int:
        return self.num_devices


@dataclass
class WrappedMesh:
    """A mesh as an engine opens it."""

    device: Mesh
    is_closed: bool = False

    def close(self) -> None:
        self.is_closed = True


@dataclass(frozen=True)
class DeviceTensor:
    """A plane of the cache, which only has a dtype."""

    dtype: str = "DataType.BFLOAT8_B"


@dataclass
class Event:
    """An event that happens when it is waited for."""

    is_done: bool = False


@dataclass
class OnDevice:
    """A decode's output on the device, which cannot be read directly."""

    values: torch.Tensor
    is_tokens: bool
    event: Event | None = None


MISSING = object()
"""Default of every optional keyword: a double knows whether it was given."""
SAMPLING_FIELDS = [
    "temperature", "top_k", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "num_logprobs", "enable_log_probs",
]  # fmt: skip
PADDING_ROW = (0.0, 1, 1.0, 0.0, 0.0, 1.0, None, -2, False)
"""Sampling parameters of a row without a request, as upstream documents them."""


class Double:
    """The common base of the three generations; not itself a plugin class."""

    def __init__(self, mesh: Mesh, max_batch_size: int, max_seq_len: int, num_lanes: int) -> None:
        self.mesh = mesh
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.num_lanes = num_lanes
        self.next_token = NextToken(VOCAB_SIZE, ())
        self.already_warmed_up_prefill = False
        self.can_sample_on_device = False
        self.has_prefill_trace = False
        self.warm_ups: list[str] = []
        # Decodes that reloaded nothing.
        self.num_steady = 0
        # Outputs that were not processed yet, in order.
        self.pending: list[OnDevice] = []
        # A device's state: that of each slot, and the inputs of the last decode.
        self.state: list[int | None] = [None] * max_batch_size
        self.tokens = np.zeros(max_batch_size, np.int64)
        self.positions = np.full(max_batch_size, -1, np.int64)
        self.tables = np.zeros((max_batch_size, 1), np.int64)
        # Of the last decode: its live slots (none after a prefill), its table, whether it drew.
        self.live: set[int] | None = None
        self.last_table: torch.Tensor | None = None
        self.drew = False
        # Of each slot: the end of its last chunk.
        self.ends = np.zeros(max_batch_size, np.int64)

    @property
    def given_cache(self) -> Any:
        """The object that must come back with every call, not a copy."""
        return self.cache

    @classmethod
    def make(
        cls, hf_config: Any, mesh: Any, max_batch_size: Any, max_seq_len: int, lanes: int
    ) -> Any:
        assert isinstance(hf_config, transformers.PretrainedConfig)
        assert hf_config.num_key_value_heads == NUM_KV_HEADS
        assert isinstance(max_batch_size, int)
        assert max_batch_size % lanes == 0
        return cls(mesh, max_batch_size, max_seq_len, lanes)

    def allocate(self, shape: Any, dtype: Any, num_layers: int) -> list[Any]:
        assert isinstance(shape, tuple)
        assert all(type(size) is int for size in shape)
        num_blocks, heads, block_size, head_dim = shape
        chips = 1 if isinstance(self.mesh, CpuDevice) else self.mesh.get_num_devices()
        assert heads == NUM_KV_HEADS // min(chips // self.num_lanes, NUM_KV_HEADS)
        assert head_dim == HEAD_DIM
        assert isinstance(dtype, torch.dtype)
        assert num_layers == NUM_LAYERS
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.paged = PagedKVCache(self.num_lanes, num_blocks, block_size)
        self.width = min(-(-self.max_seq_len // block_size), num_blocks)
        self.cache = [
            [[DeviceTensor(), DeviceTensor()] for _ in range(num_layers)]
            for _ in range(self.num_lanes)
        ]
        return self.cache

    # --- warm-up -----------------------------------------------------------------------------

    def warm_prefill(self, enable_trace: bool) -> None:
        self.warm_ups.append(f"prefill {'captured' if enable_trace else 'compiled'}")
        self.check_warm_ups()
        if self.already_warmed_up_prefill:
            return
        self.already_warmed_up_prefill = True
        self.has_prefill_trace = enable_trace

    def warm_decode(self, enable_trace: bool) -> None:
        self.warm_ups.append(f"decode {'captured' if enable_trace else 'compiled'}")
        self.check_warm_ups()

    def check_warm_ups(self) -> None:
        """All is compiled before anything is captured."""
        captured = [i for i, name in enumerate(self.warm_ups) if "captured" in name]
        compiled = [i for i, name in enumerate(self.warm_ups) if "compiled" in name]
        assert not captured or max(compiled) < min(captured), self.warm_ups
        assert len(set(self.warm_ups)) == len(self.warm_ups), self.warm_ups

    # --- prefill -----------------------------------------------------------------------------

    def prefill(
        self, tokens: Any, page_table: Any, kv_cache: Any, lens: Any, start_pos: Any, slots: Any
    ) -> np.ndarray:
        """The next tokens of all rows, after every check."""
        assert kv_cache is self.given_cache
        num_rows = len(tokens)
        assert tokens.dtype == torch.int32
        assert tokens.shape == (num_rows, int(max(lens)))
        assert page_table.dtype == torch.int32
        assert page_table.shape == (num_rows, self.width)
        assert len(lens) == len(start_pos) == len(slots) == num_rows
        assert type(slots) is list
        assert len(set(slots)) == num_rows
        lanes = np.array([self.lane(slot) for slot in slots])
        tables = page_table.numpy().astype(np.int64)
        for row, (start, end) in enumerate(zip(start_pos, lens, strict=True)):
            ids, table = tokens[row].numpy(), tables[row]
            assert 0 <= start < end <= self.max_seq_len
            assert not ids[end:].any()
            self.check_table(table, int(end))
            assert start % self.block_size == 0 or start == self.ends[slots[row]]
            self.ends[slots[row]] = end
            held = self.paged.context_sums(lanes[[row]], table[None], np.array([start]))
            said = kv_rows(ids[:start], np.arange(start)).sum(dtype=np.uint64)
            assert held[0] == said, "the KV before the chunk is not that of these tokens"
            self.paged.write_tokens(int(lanes[row]), table, ids[start:end], int(start))
            self.state[slots[row]] = int(ids[0])
        self.live = None
        sums = self.paged.context_sums(lanes, tables, np.asarray(lens, np.int64))
        return self.next_token(sums)

    # --- decode ------------------------------------------------------------------------------

    def load(self, tokens: torch.Tensor, start_pos: torch.Tensor, page_table: torch.Tensor) -> None:
        """Copy all inputs to the device."""
        self.tokens = tokens[:, 0].numpy().astype(np.int64)
        self.positions = start_pos.numpy().astype(np.int64)
        self.tables = page_table.numpy().astype(np.int64)

    def check_decode(self, tokens: Any, page_table: Any, kv_cache: Any, start_pos: Any) -> None:
        assert kv_cache is self.given_cache
        assert all(output.event is not None for output in self.pending), "never read"
        # A step takes two calls if the host draws for some of its rows, and the next one then one.
        assert len(self.pending) <= 2, "more than two steps in flight"
        assert tokens.dtype == torch.int32
        assert tokens.shape == (self.max_batch_size, 1)
        assert start_pos.dtype == torch.int32
        assert start_pos.shape == (self.max_batch_size,)
        assert page_table.dtype == torch.int32
        assert page_table.shape == (self.max_batch_size, self.width)
        padding = start_pos == -1
        assert not tokens[padding].any()
        assert not page_table[padding].any()
        assert bool((start_pos[~padding] >= 0).all())

    def is_new(self, start_pos: Any, page_table: Any, *, draws: bool) -> Any:
        """Return whether a decode has other rows than the last one, and another page table.

        vllm-tt-plugin's DECODE_RELOAD_CONTRACT.md: the first must reload all, the second its table.
        """
        live = set(torch.nonzero(start_pos >= 0).flatten().tolist())
        rows = not draws or (live, True) != (self.live, self.drew)
        table = self.last_table is None or not torch.equal(page_table, self.last_table)
        self.live, self.drew, self.last_table = live, draws, page_table.clone()
        return rows, table

    def decode(self) -> np.ndarray:
        """The next token of every row from what the device holds; moves its positions on."""
        live = np.nonzero(self.positions >= 0)[0]
        lanes = np.array([self.lane(row) for row in live], np.int64)
        result = np.zeros(self.max_batch_size, np.int64)
        if len(live):
            positions, tables = self.positions[live], self.tables[live]
            for row, table, position in zip(live, tables, positions, strict=True):
                self.check_table(table, int(position) + 1)
                first = self.paged.rows[self.lane(row), table[0], 0]
                state = self.state[row]
                assert state is not None
                assert (first == kv_rows([state], [0])[0]).all(), f"slot {row} has another's state"
            written = [
                (self.lane(r), t[p // self.block_size])
                for r, t, p in zip(live, tables, positions, strict=True)
            ]
            assert len(set(written)) == len(written), "two rows write one block"
            self.paged.write_rows(lanes, tables, self.tokens[live], positions)
            result[live] = self.next_token(self.paged.context_sums(lanes, tables, positions + 1))
        self.positions[live] += 1
        self.tokens = result.copy()
        return result

    def check_table(self, table: np.ndarray, num_tokens: int) -> None:
        used = -(-num_tokens // self.block_size)
        assert (table[:used] > 0).all(), "a token would go to the null block"
        assert len(set(table[:used])) == used, "a block is there twice"
        assert (table < self.num_blocks).all()

    def lane(self, slot: int) -> int:
        assert 0 <= slot < self.max_batch_size
        return int(slot) // (self.max_batch_size // self.num_lanes)

    # --- outputs -----------------------------------------------------------------------------

    def logits(self, tokens: np.ndarray) -> torch.Tensor:
        """(rows, 1, V): the vocabulary is padded, and the padding must never win."""
        logits = torch.zeros(len(tokens), 1, PADDED_VOCAB_SIZE)
        logits[:, 0, VOCAB_SIZE:] = 1e6
        logits[torch.arange(len(tokens)), 0, torch.from_numpy(tokens)] = 100.0
        return logits

    def leave_on_device(self, values: torch.Tensor, *, is_tokens: bool) -> OnDevice:
        self.pending.append(OnDevice(values, is_tokens))
        return self.pending[-1]

    def check_params(self, params: Any, num_rows: int, padding: Any = ()) -> None:
        assert self.can_sample_on_device, "not warmed up for it"
        names = [field.name for field in fields(params)]
        assert names == SAMPLING_FIELDS
        for name in names:
            column = getattr(params, name)
            assert type(column) is list, name
            assert len(column) == num_rows, name
        assert all(type(seed) is int or seed is None for seed in params.seed)
        for row in padding:
            assert tuple(getattr(params, name)[row] for name in names) == PADDING_ROW


class ReadsLater(Double):
    """Decode leaves its output on the device, to be read in two calls."""

    def warmup_model_prefill(
        self, kv_cache: Any, enable_trace: bool, can_sample_on_device: bool
    ) -> None:
        self.warm_prefill(enable_trace)

    def warmup_model_decode(
        self,
        kv_cache: Any,
        enable_trace: bool,
        max_batch_size: int,
        num_blocks: int,
        can_sample_on_device: bool,
    ) -> None:
        assert max_batch_size == self.max_batch_size
        assert num_blocks == self.width
        self.can_sample_on_device = can_sample_on_device
        self.warm_decode(enable_trace)

    def read_decode_output(self, tt_out: Any, async_read: bool = False) -> Any:
        assert async_read
        assert tt_out is self.pending[-1]
        tt_out.event = Event()
        return tt_out, [tt_out.event]

    def process_decode_output_host(self, tt_out: Any, is_tokens: bool = False) -> Any:
        assert tt_out is self.pending.pop(0)
        assert tt_out.event.is_done, "nobody waited for the copy"
        assert is_tokens == tt_out.is_tokens
        return tt_out.values


class Contract1(ReadsLater):
    """Decode contract 1, with all that it allows."""

    decode_input_update_contract = 1
    model_capabilities: ClassVar = {
        "supports_prefix_caching": True,
        "supports_chunked_prefill": True,
        "supports_async_decode": True,
        "supports_sample_on_device": True,
        "max_device_top_k": 32,
    }

    @classmethod
    def initialize_vllm_model(
        cls,
        hf_config: Any,
        mesh_device: Any,
        max_batch_size: int,
        max_seq_len: int,
        tt_data_parallel: int = 1,
        optimizations: str | None = None,
    ) -> Contract1:
        return cls.make(hf_config, mesh_device, max_batch_size, max_seq_len, tt_data_parallel)

    @classmethod
    def get_max_tokens_all_users(cls, **kwargs: Any) -> int:
        return 4096

    def allocate_kv_cache_per_layer(self, per_layer_specs: Any) -> list[Any]:
        assert [index for _, _, index in per_layer_specs] == list(range(NUM_LAYERS))
        (shape, dtype), *others = {spec[:2] for spec in per_layer_specs}
        assert not others
        return self.allocate(shape, dtype, len(per_layer_specs))

    def allocate_kv_cache(self, *args: Any) -> Any:
        raise AssertionError("the other one is preferred")

    def prefill_forward(
        self,
        *,
        tokens: Any,
        page_table: Any,
        kv_cache: Any,
        enable_trace: Any,
        prompt_lens: Any,
        start_pos: Any,
        empty_slots: Any,
        sampling_params: Any = MISSING,
    ) -> Any:
        assert isinstance(prompt_lens, np.ndarray)
        assert prompt_lens.dtype == np.int64
        assert isinstance(start_pos, np.ndarray)
        assert start_pos.dtype == np.int32
        assert not enable_trace or self.has_prefill_trace
        result = self.prefill(tokens, page_table, kv_cache, prompt_lens, start_pos, empty_slots)
        if sampling_params is MISSING:
            return self.logits(result)
        self.check_params(sampling_params, len(tokens))
        return torch.from_numpy(result).to(torch.int32)[:, None]

    def decode_forward(
        self,
        *,
        tokens: Any,
        page_table: Any,
        kv_cache: Any,
        start_pos: Any,
        enable_trace: Any,
        read_from_device: Any,
        reload_inputs: Any,
        reload_page_table: Any,
        reload_sampling_params: Any,
        reset_sampling_state: Any,
        sampling_params: Any = MISSING,
    ) -> Any:
        commands = (reload_inputs, reload_page_table, reload_sampling_params, reset_sampling_state)
        assert all(type(command) is bool for command in commands)
        assert read_from_device is False
        samples = sampling_params is not MISSING
        self.check_decode(tokens, page_table, kv_cache, start_pos)
        rows, table = self.is_new(start_pos, page_table, draws=samples)
        # With the rows as they were, an engine may also send all inputs again.
        is_same = not rows and commands == (True, False, False, False)
        assert is_same or commands == (
            rows, not rows and table, rows and samples, rows and samples,
        )  # fmt: skip
        self.num_steady += not any(commands)
        if reload_inputs:
            self.load(tokens, start_pos, page_table)
        elif reload_page_table:
            self.tables = page_table.numpy().astype(np.int64)
        result = self.decode()
        if not samples:
            return self.leave_on_device(self.logits(result), is_tokens=False)
        self.check_params(sampling_params, self.max_batch_size, torch.nonzero(start_pos < 0))
        return self.leave_on_device(torch.from_numpy(result).to(torch.int32), is_tokens=True)


class Widths(Contract1):
    """A class of contract 1 that has captured decodes of one, two and four rows."""

    tt_supported_decode_batch_sizes: ClassVar = (4, 2, 1, 8)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.widths: list[int] = []

    def decode_forward(
        self,
        *,
        tokens: Any,
        page_table: Any,
        kv_cache: Any,
        start_pos: Any,
        enable_trace: Any,
        read_from_device: Any,
        reload_inputs: Any,
        reload_page_table: Any,
        reload_sampling_params: Any,
        reset_sampling_state: Any,
        sampling_params: Any = MISSING,
    ) -> Any:
        width = len(tokens)
        assert width in {1, 2, 4}
        assert len(page_table) == len(start_pos) == width
        assert reload_inputs or width == self.widths[-1], "the device has inputs of another width"
        self.widths.append(width)
        others = self.max_batch_size - width
        fills = {"pad": (0, 0, 0, others)}
        output = super().decode_forward(
            tokens=torch.nn.functional.pad(tokens, **fills),
            page_table=torch.nn.functional.pad(page_table, **fills),
            kv_cache=kv_cache,
            start_pos=torch.nn.functional.pad(start_pos, (0, others), value=-1),
            enable_trace=enable_trace,
            read_from_device=read_from_device,
            reload_inputs=reload_inputs,
            reload_page_table=reload_page_table,
            reload_sampling_params=reload_sampling_params,
            reset_sampling_state=reset_sampling_state,
            sampling_params=sampling_params,
        )
        output.values = output.values[:width]
        return output

    def check_params(self, params: Any, num_rows: int, padding: Any = ()) -> None:
        width = self.widths[-1]
        super().check_params(params, width, [row for row in padding if row < width])


class Penalises(Contract1):
    """Contract 1 with penalties and log probabilities; it checks what they are given."""

    model_capabilities: ClassVar = {
        **Contract1.model_capabilities,
        "supports_device_penalties": True,
        "max_device_logprobs": 0,
    }

    def decode_forward(
        self, *, prompt_tokens: Any = MISSING, output_tokens: Any = MISSING, **arguments: Any
    ) -> Any:
        params = arguments.get("sampling_params", MISSING)
        is_penalised: list[int] = []
        if params is not MISSING:
            assert set(params.frequency_penalty) == {0.0}
            is_penalised = [i for i, value in enumerate(params.presence_penalty) if value]
            assert {params.presence_penalty[i] for i in is_penalised} <= {0.5}
            assert {params.repetition_penalty[i] for i in is_penalised} <= {1.25}
        is_given = bool(is_penalised) and arguments["reset_sampling_state"]
        assert is_given == (prompt_tokens is not MISSING) == (output_tokens is not MISSING)
        if is_given:
            for history in (prompt_tokens, output_tokens):
                assert history.dtype == torch.int32
                others = [i for i in range(len(history)) if i not in is_penalised]
                assert (history[others] == -1).all()
            for row in is_penalised:
                prompt, output = (h[row][h[row] >= 0] for h in (prompt_tokens, output_tokens))
                assert len(prompt) + len(output) == int(arguments["start_pos"][row]) + 1
                assert int(output[-1]) == int(arguments["tokens"][row, 0])
        output = super().decode_forward(**arguments)
        if params is not MISSING and any(params.enable_log_probs):
            output.values = (output.values, torch.full((len(output.values), 1), -0.25))
        return output


class Blocks(Contract1):
    """A class of contract 1 whose decode gives each row one to four tokens, padded with -1."""

    WIDTH, EXTENT = 4, 9
    model_capabilities: ClassVar = {
        "supports_prefix_caching": True,
        "supports_async_decode": True,
        "supports_sample_on_device": True,
        "output_tokens_per_step": WIDTH,
        "tt_adaptive_block_output": True,
        "tt_block_kv_extent_tokens": EXTENT,
    }
    # Lengths of the runs given so far.
    lengths: frozenset[int] = frozenset()

    def decode(self) -> np.ndarray:
        """Return (B, 4): as many tokens for each row as its position says."""
        start, table = self.positions.copy(), self.tables
        for row in np.nonzero(start >= 0)[0]:
            assert start[row] + 1 + self.WIDTH <= self.max_seq_len, "a block would not fit"
            self.check_table(table[row], min(int(start[row]) + self.EXTENT, self.max_seq_len))
        lengths = np.where(start >= 0, 1 + start % self.WIDTH, 0)
        self.lengths = self.lengths.union(lengths[lengths > 0].tolist())
        runs = np.full((self.max_batch_size, self.WIDTH), -1)
        for step in range(self.WIDTH):
            gets = step < lengths
            self.positions = np.where(gets, start + step, -1)
            runs[gets, step] = super().decode()[gets]
        return runs


class Canvases(Contract1):
    """A class of contract 1 that gives its only row four tokens with every call."""

    WIDTH = 4
    model_capabilities: ClassVar = {
        "supports_sample_on_device": True,
        "output_tokens_per_step": WIDTH,
    }

    def prefill(self, *args: Any) -> np.ndarray:
        first = super().prefill(*args)
        [end] = args[3]
        self.tokens, self.positions = first.astype(np.int64), np.array([end])
        self.tables = args[1].numpy().astype(np.int64)
        return np.concatenate([first[:, None], self.rest(1)], axis=1)

    def decode(self) -> np.ndarray:
        return self.rest(self.WIDTH) if (self.positions >= 0).any() else super().decode()[:, None]

    def rest(self, count: int) -> np.ndarray:
        """Return (1, n): the tokens of the canvas from here on."""
        return np.stack([Contract1.decode(self) for _ in range(count)], axis=1)


class _LegacyText(ReadsLater):
    """The base of `Legacy`, as tt_transformers' ``Generator`` is."""

    def prefill_forward_text(
        self,
        tokens: Any,
        page_table: Any = None,
        kv_cache: Any = None,
        prompt_lens: Any = None,
        empty_slots: Any = None,
        enable_trace: Any = True,
        sampling_params: Any = MISSING,
        start_pos: Any = None,
    ) -> Any:
        assert len(tokens) == 1, "it looks its rows up by slot"
        result = self.prefill(tokens, page_table, kv_cache, prompt_lens, start_pos, empty_slots)
        if sampling_params is MISSING:
            return self.logits(result)[:, 0]
        self.check_params(sampling_params, len(tokens))
        return torch.from_numpy(result).to(torch.int32), None

    def decode_forward_text(
        self,
        tokens: Any,
        start_pos: Any,
        page_table: Any = None,
        kv_cache: Any = None,
        enable_trace: Any = True,
        read_from_device: Any = True,
        sampling_params: Any = MISSING,
        reset_batch: Any = MISSING,
        prompt_tokens: Any = None,
        output_tokens: Any = None,
    ) -> Any:
        assert read_from_device is False
        samples = sampling_params is not MISSING
        self.check_decode(tokens, page_table, kv_cache, start_pos)
        rows, _ = self.is_new(start_pos, page_table, draws=samples)
        assert reset_batch == (rows if samples else MISSING)
        self.num_steady += samples and not rows
        if not samples or reset_batch:
            self.load(tokens, start_pos, page_table)
        elif (self.tables != page_table.numpy()).any():
            self.tables = page_table.numpy().astype(np.int64)
        result = self.decode()
        if not samples:
            return self.leave_on_device(self.logits(result), is_tokens=False)
        self.check_params(sampling_params, self.max_batch_size, torch.nonzero(start_pos < 0))
        values = torch.from_numpy(result).to(torch.int32)[:, None]
        return self.leave_on_device(values, is_tokens=True)


class Legacy(_LegacyText):
    """The interface of early 2026: the model decides when to reload, except for ``reset_batch``."""

    model_capabilities: ClassVar = {
        "supports_prefix_caching": True,
        "supports_chunked_prefill": True,
        "supports_async_decode": True,
        "supports_sample_on_device": True,
    }

    @classmethod
    def initialize_vllm_model(
        cls,
        hf_config: Any,
        mesh_device: Any,
        max_batch_size: int,
        max_seq_len: int,
        n_layers: int | None = None,
        tt_data_parallel: int = 1,
        optimizations: str | None = "performance",
    ) -> Legacy:
        assert n_layers is None
        return cls.make(hf_config, mesh_device, max_batch_size, max_seq_len, tt_data_parallel)

    def allocate_kv_cache(self, *args: Any) -> list[Any]:
        return self.allocate(*args)

    def warmup_model_decode(
        self,
        kv_cache: Any,
        enable_trace: bool,
        max_batch_size: int,
        num_blocks: int,
        can_sample_on_device: bool,
        non_greedy_decoding_on_device: bool,
    ) -> None:
        assert non_greedy_decoding_on_device == can_sample_on_device
        super().warmup_model_decode(
            kv_cache, enable_trace, max_batch_size, num_blocks, can_sample_on_device
        )

    def prefill_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Delegate as tt_transformers does: only the called method shows the parameters."""
        return super().prefill_forward_text(*args, **kwargs)

    def decode_forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().decode_forward_text(*args, **kwargs)


class Seed(ReadsLater):
    """The interface as first documented, in 2025, of V0: whole prompts, several in a call."""

    model_capabilities: ClassVar = {"supports_prefix_caching": False}
    warmup_model_decode = None  # type: ignore[assignment]
    # Most prompts of one prefill, and the calls that drew tokens for a request.
    most_prompts = 0
    num_drawn = 0

    @classmethod
    def initialize_vllm_model(
        cls,
        hf_config: Any,
        mesh_device: Any,
        max_batch_size: int,
        tt_data_parallel: int,
        optimizations: str | None,
    ) -> Seed:
        return cls.make(hf_config, mesh_device, max_batch_size, 128, tt_data_parallel)

    def allocate_kv_cache(self, kv_cache_shape: Any, dtype: Any, num_layers: int) -> list[Any]:
        return self.allocate(kv_cache_shape, dtype, num_layers)

    def warmup_model_prefill(
        self, kv_cache: Any, enable_trace: bool, sampling_params: list[Any]
    ) -> None:
        assert sampling_params[-1] is None
        self.can_sample_on_device = len(sampling_params) > 1
        self.warm_prefill(enable_trace)

    def prefill_forward(
        self,
        tokens: Any,
        page_table: Any,
        kv_cache: Any,
        prompt_lens: Any,
        sampling_params: Any = MISSING,
        empty_slots: Any = None,
    ) -> Any:
        assert isinstance(prompt_lens, torch.Tensor)
        self.most_prompts = max(self.most_prompts, len(tokens))
        assert page_table.shape[1] == -(-tokens.shape[1] // self.block_size)
        page_table = torch.nn.functional.pad(page_table, (0, self.width - page_table.shape[1]))
        starts = np.zeros(len(tokens), np.int64)
        lens = prompt_lens.numpy()
        result = self.prefill(tokens, page_table, kv_cache, lens, starts, empty_slots)
        if sampling_params is MISSING:
            return self.logits(result)
        self.check_params(sampling_params, len(tokens))
        self.num_drawn += 1
        return torch.from_numpy(result).to(torch.int32)

    def decode_forward(
        self,
        tokens: Any,
        start_pos: Any,
        page_table: Any,
        kv_cache: Any,
        enable_trace: bool,
        read_from_device: bool = True,
        sampling_params: Any = MISSING,
    ) -> Any:
        assert read_from_device is False
        self.check_decode(tokens, page_table, kv_cache, start_pos)
        self.load(tokens, start_pos, page_table)
        result = self.decode()
        if sampling_params is MISSING:
            return self.leave_on_device(self.logits(result), is_tokens=False)
        # A batch of padding is the warm-up of decodes.
        is_warm_up = bool((start_pos < 0).all())
        self.can_sample_on_device |= is_warm_up
        self.check_params(sampling_params, self.max_batch_size, torch.nonzero(start_pos < 0))
        self.num_drawn += not is_warm_up
        return self.leave_on_device(torch.from_numpy(result).to(torch.int32), is_tokens=True)


class SeedV1(Seed):
    """The same interface of V1, whose decode returns its output on the host."""

    read_decode_output = None  # type: ignore[assignment]
    process_decode_output_host = None  # type: ignore[assignment]

    def decode_forward(
        self,
        tokens: Any,
        start_pos: Any,
        page_table: Any,
        kv_cache: Any,
        enable_trace: bool,
        read_from_device: bool = True,
        sampling_params: Any = MISSING,
    ) -> Any:
        assert read_from_device is True
        given = (tokens, start_pos, page_table, kv_cache, enable_trace, False, sampling_params)
        super().decode_forward(*given)
        return self.pending.pop().values


class Chosen(Contract1):
    """A model of tt-transformers: contract 1, whole prompts, a cache of one lane without a list."""

    model_capabilities: ClassVar = {
        "supports_prefix_caching": True,
        "supports_async_decode": True,
        "supports_sample_on_device": True,
        "max_device_top_k": 32,
    }
    allocate_kv_cache_per_layer = None
    is_cleaned_up = False

    @property
    def given_cache(self) -> Any:
        return self.cache[0] if self.num_lanes == 1 else self.cache

    def allocate_kv_cache(
        self, kv_cache_shape: Any = None, dtype: Any = None, num_layers: Any = None
    ) -> Any:
        self.allocate(kv_cache_shape, dtype, num_layers)
        return self.given_cache

    def process_decode_output_host(self, tt_out: Any, *, is_tokens: bool = False) -> Any:
        values = super().process_decode_output_host(tt_out, is_tokens=is_tokens)
        return values, None

    def cleanup(self) -> None:
        assert not self.is_cleaned_up
        self.is_cleaned_up = True


class Registered:
    """The class in a registry of tt-transformers; it chooses a model's class by checkpoint name."""

    model_capabilities: ClassVar = {
        "supports_prefix_caching": True,
        "supports_async_decode": True,
        "supports_sample_on_device": True,
    }
    models: ClassVar = {"some-org/Tiny-8B-Instruct": Chosen}

    @classmethod
    def supported_hf_ids(cls) -> tuple[str, ...]:
        return tuple(cls.models)

    @classmethod
    def select(cls, name_or_path: str | None) -> Any:
        name = str(name_or_path or "")
        parts = PurePosixPath(name).parts
        if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
            name = parts[-3].removeprefix("models--").replace("--", "/")
        if name not in cls.models:
            raise ValueError(f"does not serve {name_or_path!r}; supported: {', '.join(cls.models)}")
        return cls.models[name]

    @classmethod
    def get_max_tokens_all_users(
        cls,
        model_name: str = "",
        num_devices: int = 1,
        tt_data_parallel: int = 1,
        max_model_len: int = 0,
        max_num_seqs: int = 1,
    ) -> int:
        cls.select(model_name)
        return max_model_len * max_num_seqs

    @classmethod
    def initialize_vllm_model(
        cls,
        hf_config: Any,
        mesh_device: Any,
        max_batch_size: int,
        max_seq_len: int,
        tt_data_parallel: int = 1,
    ) -> Chosen:
        chosen = cls.select(hf_config._name_or_path)
        return chosen.initialize_vllm_model(
            hf_config, mesh_device, max_batch_size, max_seq_len, tt_data_parallel
        )


class Galaxy(Legacy):
    """A class for the 32 chips of a Galaxy, whose columns are lanes of eight slots each."""

    model_capabilities: ClassVar = {
        "supports_prefix_caching": True,
        "supports_sample_on_device": True,
    }

    @property
    def given_cache(self) -> Any:
        """One for all columns: each chip's part of a tensor is its column's."""
        return self._whole

    def allocate_kv_cache(self, *args: Any) -> Any:
        self._whole = self.allocate(*args)[:1]
        return self._whole


AdaptedContract1 = adapt(Contract1)
AdaptedWidths = adapt(Widths)
AdaptedLegacy = adapt(Legacy)
AdaptedSeed = adapt(Seed)
AdaptedSeedV1 = adapt(SeedV1)
