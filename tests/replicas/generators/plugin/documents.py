"""What upstream's documents say of the calls that a generator gets, held to recordings of them.

Written from the documents alone, never from a recording, so that a recording that was written anew
cannot bring its mistake along. Sources: tt-metal's models/common/readiness_check/contract_vllm.py,
and of vllm-tt-plugin docs/DECODE_RELOAD_CONTRACT.md, docs/MODEL_CAPABILITIES.md and the calls of
src/vllm_tt_plugin/{worker,model_runner}.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

KV_HEADS = 2
SAMPLING_FIELDS = (
    "temperature", "top_k", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "num_logprobs", "enable_log_probs",
)  # fmt: skip
PADDING_ROW = (0.0, 1, 1.0, 0.0, 0.0, 1.0, None, -2, False)
"""A row that nobody uses: greedy, no penalty, no seed, no log-probabilities."""
COMMANDS = ("reload_inputs", "reload_page_table", "reload_sampling_params", "reset_sampling_state")
LARGEST_QUEUE = 2
"""Decodes that are submitted and not processed."""


@dataclass(frozen=True)
class Array:
    """A tensor or array; rows of a matrix without the zeros on their right."""

    library: str
    dtype: str
    shape: tuple[int, ...]
    values: list[Any]

    def row(self, i: int) -> list[Any]:
        """A row of a matrix, with its zeros."""
        return self.values[i] + [0] * (self.shape[1] - len(self.values[i]))


@dataclass(frozen=True)
class Call:
    """One call, as it was recorded."""

    name: str
    positional: list[Any]
    named: dict[str, Any]


def read(text: str) -> list[Call]:
    """The calls of a recording, in order; remarks are left out."""
    calls: list[str] = []
    for line in text.splitlines():
        if line.startswith("    "):
            calls[-1] += " " + line.strip()
        elif not line.startswith("  #"):
            calls.append(line)
    return [_Reader(call).call() for call in calls]


class _Reader:
    """Reads one call from its text."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def call(self) -> Call:
        name = self._take(r"[\w.]+")
        self._take(r"\(")
        positional, named = [], {}
        while not self._sees(r"\)"):
            if self._sees(r"\w+="):
                key = self._take(r"\w+")
                self._take("=")
                named[key] = self._value()
            else:
                positional.append(self._value())
            self._sees(r", ", skip=True)
        self._take(r"\)")
        return Call(name, positional, named)

    def _value(self) -> Any:
        if self._sees(r"(numpy )?[a-z]+\d+\["):
            return self._array()
        if self._sees(r"\["):
            return self._list()
        if self._sees(r"\("):
            return tuple(self._items(r"\(", r"\)"))
        if self._sees("<"):
            return self._take(r"<[^>]*>")
        if self._sees(r"[A-Za-z]\w*\("):
            return self.call()
        word = self._take(r"[-\w.]+")
        names = {"True": True, "False": False, "None": None}
        if word in names:
            return names[word]
        return float(word) if re.fullmatch(r"-?\d+\.\d+", word) else _number(word)

    def _array(self) -> Array:
        library = "numpy" if self._sees("numpy ", skip=True) else "torch"
        dtype, shape = self._take(r"[a-z]+\d+"), tuple(self._list())
        if self._sees(r" \{", skip=True):
            rows = []
            while not self._sees(r"\}", skip=True):
                rows.append(self._list())
                self._sees(" ", skip=True)
            return Array(library, dtype, shape, rows)
        self._sees(" ", skip=True)
        return Array(library, dtype, shape, self._list() if self._sees(r"\[") else [])

    def _list(self) -> list[Any]:
        values = self._items(r"\[", r"\]")
        if self._sees(r" \* \d+"):
            self._take(r" \* ")
            values *= int(self._take(r"\d+"))
        return values

    def _items(self, begin: str, end: str) -> list[Any]:
        self._take(begin)
        values: list[Any] = []
        while not self._sees(end, skip=True):
            if self._sees(r"\d+\.\.\d+"):
                first, last = map(int, self._take(r"\d+\.\.\d+").split(".."))
                values += range(first, last + 1)
            else:
                values.append(self._value())
            self._sees(", ", skip=True)
        return values

    def _sees(self, pattern: str, *, skip: bool = False) -> bool:
        found = re.compile(pattern).match(self._text, self._at)
        if found and skip:
            self._at = found.end()
        return found is not None

    def _take(self, pattern: str) -> str:
        found = re.compile(pattern).match(self._text, self._at)
        assert found, f"no {pattern} at {self._text[self._at :]!r}"
        self._at = found.end()
        return found[0]


def _number(word: str) -> Any:
    return int(word) if re.fullmatch(r"-?\d+", word) else word


@dataclass
class Documents:
    """Holds the calls that one instance got to the documents.

    Attributes:
        generation: "contract1", "legacy" or "seed"; "chosen" is of contract 1, with one cache for
            all layers and an end.
    """

    generation: str
    expected: dict[int, int] = field(default_factory=dict)
    """Slot -> position of its next token, as prefills and decodes have left it."""
    live: set[int] | None = None
    """Slots of the last decode, None where a prefill came after it."""
    last_table: list[list[int]] = field(default_factory=list)
    drew: bool = False
    num_decodes: int = 0
    unread: list[int] = field(default_factory=list)
    unprocessed: list[int] = field(default_factory=list)
    drawn: dict[int, bool] = field(default_factory=dict)

    def check(self, calls: list[Call]) -> None:
        """Every call of an instance.

        Raises:
            AssertionError: One is not as the documents say.
        """
        rest = self._check_start(calls)
        methods = {
            "prefill_forward": self._prefill,
            "decode_forward": self._decode,
            "read_decode_output": self._read,
            "process_decode_output_host": self._process,
            "release_request": lambda _: None,
            "cleanup": lambda _: None,
        }
        ends = [call.name == "cleanup" for call in rest]
        assert ends == [False] * (len(ends) - 1) + [self.generation == "chosen"]
        for call in rest:
            methods[call.name](call)
        assert not self.unread
        assert not self.unprocessed

    # --- until the first request ---------------------------------------------------------------

    def _check_start(self, calls: list[Call]) -> list[Call]:
        """Made, cache allocated, all compiled, then all captured. Returns the calls after that."""
        made, allocated, *rest = calls
        assert made.name == "initialize_vllm_model"
        self.num_slots = made.positional[2]
        assert made.named["tt_data_parallel"] == 1
        num_chips = 2 if made.positional[1] == "<mesh of 2>" else 1
        shape = self._shape_of_cache(allocated)
        self.num_blocks, heads, self.block_size, _ = shape
        assert heads == KV_HEADS // min(num_chips, KV_HEADS)
        max_seq_len = made.named.get("max_seq_len", 128)
        self.width = min(-(-max_seq_len // self.block_size), self.num_blocks)
        is_seed = self.generation == "seed"
        kinds = ["warmup_model_prefill", "decode_forward" if is_seed else "warmup_model_decode"]
        warm_ups, rest = rest[:4], rest[4:]
        assert [call.name for call in warm_ups] == 2 * kinds
        assert [call.named["enable_trace"] for call in warm_ups] == [False, False, True, True]
        for call in warm_ups:
            if call.name == "warmup_model_decode":
                assert call.named["max_batch_size"] == self.num_slots
                assert call.named["num_blocks"] == self.width
            if call.name == "decode_forward":
                self._is_int32(call.named["tokens"], (self.num_slots, 1))
                assert call.named["start_pos"].values == [-1] * self.num_slots
                assert call.named["read_from_device"] is True
            if not is_seed:
                assert isinstance(call.named["can_sample_on_device"], bool)
        self.samples_on_device = bool(warm_ups[0].named.get("can_sample_on_device"))
        assert all(not call.name.startswith("warmup") for call in rest)
        return rest

    def _shape_of_cache(self, call: Call) -> tuple[int, ...]:
        if self.generation == "contract1":
            assert call.name == "allocate_kv_cache_per_layer"
            [specs] = call.positional
            assert [index for *_, index in specs] == list(range(len(specs)))
            assert {dtype for _, dtype, _ in specs} == {"torch.bfloat16"}
            shape, *others = {shape for shape, *_ in specs}
            assert not others
        else:
            assert call.name == "allocate_kv_cache"
            shape, dtype, num_layers = call.positional
            assert (dtype, num_layers) == ("torch.bfloat16", 3)
        return tuple(shape)

    # --- steps -----------------------------------------------------------------------------------

    def _prefill(self, call: Call) -> None:
        named = call.named
        ends, slots = named["prompt_lens"], named["empty_slots"]
        [num_rows] = ends.shape
        self._is_int32(named["tokens"], (num_rows, max(ends.values)))
        self._is_int32(named["page_table"], (num_rows, self.width))
        assert ends.dtype == "int64"
        if self.generation == "seed":
            assert "start_pos" not in named
            starts = [0] * num_rows
        else:
            start_pos = named["start_pos"]
            assert (start_pos.dtype, start_pos.shape) == ("int32", (num_rows,))
            starts = start_pos.values
        assert len(slots) == len(set(slots)) == num_rows
        if self.generation in ("legacy", "seed"):
            # They index by slot what has an entry for each row, so only one row is ever safe.
            assert num_rows == 1
        assert set(slots) <= set(range(self.num_slots))
        for row, (start, end, slot) in enumerate(zip(starts, ends.values, slots, strict=True)):
            assert 0 <= start < end
            assert not any(named["tokens"].row(row)[end:])
            assert start in (0, self.expected.get(slot)) or start % self.block_size == 0
            self._has_blocks(named["page_table"].row(row), end - 1)
            self.expected[slot] = end
        if "sampling_params" in named:
            self._are_params(named["sampling_params"], num_rows)
            assert self.samples_on_device
        self.live = None

    def _decode(self, call: Call) -> None:
        named = call.named
        size, positions = self.num_slots, named["start_pos"].values
        self._is_int32(named["tokens"], (size, 1))
        self._is_int32(named["start_pos"], (size,))
        self._is_int32(named["page_table"], (size, self.width))
        table = [named["page_table"].row(i) for i in range(size)]
        live = {slot for slot, position in enumerate(positions) if position >= 0}
        for slot in set(range(size)) - live:
            assert positions[slot] == -1
            assert named["tokens"].row(slot) == [0]
            assert not any(table[slot])
        written = [table[slot][positions[slot] // self.block_size] for slot in live]
        assert len(set(written)) == len(written), "two rows write one block"
        draws = "sampling_params" in named
        if draws:
            self._are_params(named["sampling_params"], size, padding=set(range(size)) - live)
        self._moved(named.get("slot_remap"))
        changed = self.live != live or self.drew != draws or "slot_remap" in named
        reloads = self._commands(named, draws=draws, changed=changed, table=table)
        if reloads:
            for slot in live:
                self._has_blocks(table[slot], positions[slot])
                assert positions[slot] == self.expected[slot], "a position that no step has left"
        for slot in live:
            self.expected[slot] += 1
        self.live, self.drew, self.last_table = live, draws, table
        self._submitted(named["read_from_device"], draws=draws)

    def _commands(
        self, named: dict[str, Any], *, draws: bool, changed: bool, table: list[list[int]]
    ) -> bool:
        """Whether the host's tokens and positions are those that count."""
        if self.generation in ("contract1", "chosen"):
            assert "reset_batch" not in named
            inputs, page, params, state = (named[key] for key in COMMANDS)
            assert not (inputs and page)
            assert inputs or not state
            is_steady = draws and not changed
            assert inputs == (not is_steady)
            assert page == (is_steady and table != self.last_table)
            assert (params, state) == (draws and changed, draws and changed)
            return bool(inputs)
        assert not set(COMMANDS) & set(named)
        if self.generation == "seed":
            assert "reset_batch" not in named
            return True
        assert ("reset_batch" in named) == draws
        if draws:
            assert named["reset_batch"] == changed
        return not draws or changed

    def _moved(self, slot_remap: Array | None) -> None:
        if slot_remap is None:
            return
        self._is_int32(slot_remap, (self.num_slots,))
        assert sorted(slot_remap.values) == list(range(self.num_slots))
        before = dict(self.expected)
        self.expected = {
            i: before[source] for i, source in enumerate(slot_remap.values) if source in before
        }

    # --- outputs ---------------------------------------------------------------------------------

    def _submitted(self, read_from_device: bool, *, draws: bool) -> None:
        if self.generation == "seed":
            assert read_from_device is True
            return
        assert read_from_device is False
        assert not self.unread, "a decode before the last one's read-out"
        self.num_decodes += 1
        self.drawn[self.num_decodes] = draws
        self.unread.append(self.num_decodes)
        self.unprocessed.append(self.num_decodes)
        assert len(self.unprocessed) <= LARGEST_QUEUE

    def _read(self, call: Call) -> None:
        assert call.named == {"async_read": True}
        assert call.positional == [f"<output {self.unread.pop(0)} on the device>"]

    def _process(self, call: Call) -> None:
        number = self.unprocessed.pop(0)
        assert number not in self.unread
        assert call.positional == [f"<output {number} on the device>"]
        assert call.named == {"is_tokens": self.drawn[number]}

    # --- parts -----------------------------------------------------------------------------------

    @staticmethod
    def _is_int32(array: Array, shape: tuple[int, ...]) -> None:
        assert (array.library, array.dtype, array.shape) == ("torch", "int32", shape)

    def _has_blocks(self, table: list[int], position: int) -> None:
        """Blocks up to a position, none twice, none the null block."""
        used = table[: position // self.block_size + 1]
        assert all(0 < block < self.num_blocks for block in used)
        assert len(set(used)) == len(used)

    @staticmethod
    def _are_params(params: Call, num_rows: int, padding: Iterable[int] = ()) -> None:
        assert tuple(params.named) == SAMPLING_FIELDS
        assert all(len(values) == num_rows for values in params.named.values())
        for slot in padding:
            assert tuple(values[slot] for values in params.named.values()) == PADDING_ROW
