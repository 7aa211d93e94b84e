"""Random changes of inputs: of their bytes, and of the structure that a format gives them."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

MAX_BYTES = 16 * 2**10
"""Largest input. Longer ones are cut, so that one processor-time limit fits all of them."""
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 255, 2**31, -(2**31), 2**32, 2**53, 2**63 - 1, -(2**63),
    2**64 - 1, 0.0, -0.5, 1.5, 1e-300, 1e300, "", " ", "\0", "a", "é", "🙂", "x" * 300, "{", "\n",
    "../..", "/", "*", "1", "null", [], [[]], {}, {"": {}}, [None], [0] * 40, {"a": "b"},
)  # fmt: skip
_BYTES = (b"\0", b"\xff", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\n", b" ", b"\xc3")


class Parts(NamedTuple):
    """An input, of which a format describes the middle."""

    before: bytes
    middle: bytes
    behind: bytes = b""


class Format(NamedTuple):
    """How inputs of a target are built.

    Attributes:
        decode: Returns the value that bytes stand for; raises ValueError if they are none.
        encode: The opposite; raises ValueError or TypeError for a value without bytes.
        split: Divides an input.
        join: The opposite.
    """

    decode: Callable[[bytes], Any] | None = None
    encode: Callable[[Any], bytes] | None = None
    split: Callable[[bytes], Parts] = lambda data: Parts(b"", data)
    join: Callable[[Parts], bytes] = b"".join


def _split_head(data: bytes) -> Parts:
    head, line, body = data.partition(b"\n\n")
    return Parts(head + line, body)


def _split_safetensors(data: bytes) -> Parts:
    size = int.from_bytes(data[:8], "little")
    return Parts(data[:8], data[8 : 8 + size], data[8 + size :])


def _join_safetensors(parts: Parts) -> bytes:
    return struct.pack("<Q", len(parts.middle)) + parts.middle + parts.behind


def _dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


TEXT_WITH_HEAD = Format(split=_split_head)
"""A line that selects what reads the text behind an empty line."""
JSON = Format(json.loads, _dumps)
JSON_WITH_HEAD = Format(json.loads, _dumps, _split_head)
MSGPACK_WITH_HEAD = Format(msgspec.msgpack.decode, msgspec.msgpack.encode, _split_head)
SAFETENSORS = Format(json.loads, _dumps, _split_safetensors, _join_safetensors)
PLAIN = Format()


class Mutator:
    """Source of changed inputs.

    Args:
        format_: The inputs' format.
        words: Pieces of text that mean something to what is tested.
        rng: Source of every choice.
    """

    def __init__(self, format_: Format, words: tuple[bytes, ...], rng: random.Random) -> None:
        self._format = format_
        self._words = (*_BYTES, *words)
        self._rng = rng

    def mutate(self, data: bytes, other: bytes) -> bytes:
        """Return an input made of one input and parts of another."""
        for _ in range(self._rng.choice((1, 1, 1, 2, 2, 3, 6))):
            changed = None
            if self._format.decode is not None and self._rng.random() < 0.75:
                changed = self._restructured(data, other)
            data = self._rewritten(data, other) if changed is None else changed
            # Repetitions of repetitions would not fit into memory.
            data = data[:MAX_BYTES]
        return data

    def _restructured(self, data: bytes, other: bytes) -> bytes | None:
        """Return an input with another structure; None if it has none."""
        assert self._format.decode is not None
        assert self._format.encode is not None
        parts = self._format.split(data)
        try:
            value = self._format.decode(parts.middle)
            try:
                donor = self._format.decode(self._format.split(other).middle)
            except ValueError:
                donor = None
            value = self._changed(value, donor)
            return self._format.join(parts._replace(middle=self._format.encode(value)))
        except (ValueError, TypeError, OverflowError, RecursionError):
            return None

    def _changed(self, value: Any, donor: Any) -> Any:
        """Change one place of a value."""
        holders = [each for each in _values(value) if isinstance(each, (dict, list)) and each]
        if not holders:
            return self._drawn(value, donor)
        holder = self._rng.choice(holders)
        key = self._rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        match self._rng.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                names = [n for each in _values(donor) if isinstance(each, dict) for n in each]
                words = [word.decode(errors="replace") for word in self._words]
                holder[self._rng.choice([*names, *words])] = self._drawn(holder[key], donor)
            case 1:
                holder.insert(key, self._drawn(holder[key], donor))
            case 2:
                holder[key] = [holder[key]] * self._rng.choice((1, 2, 30))
            case 3:
                nested = holder[key]
                for _ in range(self._rng.choice((1, 3, 100))):
                    nested = [nested] if self._rng.random() < 0.5 else {"a": nested}
                holder[key] = nested
            case _:
                holder[key] = self._drawn(holder[key], donor)
        return value

    def _drawn(self, old: Any, donor: Any) -> Any:
        """Return a value to put in the place of an old one."""
        match self._rng.randrange(4):
            case 0:
                return self._rng.choice([*_values(donor)])
            case 1 if isinstance(old, str):
                raw = old.encode("utf-8", "surrogatepass")
                return self._rewritten(raw, raw).decode(errors="replace")
            case 1 if isinstance(old, int):
                return old + self._rng.choice((-1, 1, 16, -1000))
            case 2:
                return self._rng.choice(self._words).decode(errors="replace")
            case _:
                return self._rng.choice(_VALUES)

    def _rewritten(self, data: bytes, other: bytes) -> bytes:
        """Return other bytes in one place."""
        rng = self._rng
        begin = rng.randint(0, len(data))
        end = min(len(data), begin + rng.choice((0, 1, 2, 8, 64, len(data))))
        match rng.randrange(6):
            case 0:
                return data[:begin] + data[end:]
            case 1:
                return data[:begin] + rng.choice(self._words) + data[begin:]
            case 2:
                return data[:begin] + data[begin:end] * rng.choice((2, 3, 50, 500)) + data[end:]
            case 3:
                at = rng.randint(0, len(other))
                piece = other[at : at + rng.choice((1, 4, 16, 64, len(other)))]
                return data[:begin] + piece + data[end:]
            case 4 if begin < len(data):
                changed = bytearray(data)
                changed[begin] ^= 1 << rng.randrange(8)
                return bytes(changed)
            case _:
                return data[:begin] + rng.choice(self._words) + data[end:]


def _values(value: Any) -> Iterator[Any]:
    """Yield a value and all that it holds."""
    left = [value]
    while left:
        each = left.pop()
        yield each
        if isinstance(each, dict):
            left += each.values()
        elif isinstance(each, list):
            left += each
