"""Clients that compare each response with a known answer, token by token.

Tokens before an error, or before the client disconnects, have to be the beginning of the answer.
A request that has not ended within its deadline counts as hung.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import aiohttp
import msgspec

from benchmarks.soaking.load import WORDS

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

Ending = Literal["ok", "typed_error", "aborted", "cut", "wrong", "hung"]
"""cut: the connection ended without an answer, as when an ingress dies."""

ABORTED_SHARE = 0.15
_ABORT_WITHIN_S = 1.0
_MAX_NOTES = 5
_MAX_OPEN = 64


class Ask(msgspec.Struct, frozen=True):
    """One request that is sent again and again, and always has the same answer.

    Attributes:
        body: Its body, but for whether it is streamed.
    """

    body: dict[str, Any]


def make_asks(model: str, num_asks: int, rng: random.Random) -> list[Ask]:
    """Requests of many lengths, half of them drawn at random from their own seed."""
    asks = []
    for number in range(num_asks):
        is_drawn = number % 2 == 1
        body = {
            "model": model,
            "prompt": " ".join(rng.choices(WORDS, k=rng.randint(4, 120))),
            "max_tokens": rng.randint(16, 160),
            "temperature": 0.8 if is_drawn else 0.0,
            "seed": number,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        asks.append(Ask(body))
    return asks


@dataclass
class Tally:
    """Counts of how requests ended.

    Attributes:
        endings: How many ended so.
        errors: Typed errors by their code, or else their type.
        wrong_after: Why the first few are wrong.
    """

    endings: dict[Ending, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("ok", "typed_error", "aborted", "cut", "wrong", "hung"), 0
        )
    )
    errors: dict[str, int] = field(default_factory=dict)
    wrong_after: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """Return how many were sent."""
        return sum(self.endings.values())

    def note_wrong(self, why: str) -> Ending:
        """Keep the reason, and return the ending to count."""
        if len(self.wrong_after) < _MAX_NOTES:
            self.wrong_after.append(why)
        return "wrong"


class TypedError(Exception):
    """An answer, or the last event of a stream, that says what went wrong."""


class CutError(Exception):
    """The connection ended before the answer was whole."""


class Clients:
    """Clients that send requests at random times and check the responses.

    Args:
        url: The endpoint, without a path.
        asks: The requests.
        answers: The token ids of each.
        deadline_s: A request that takes longer hangs.
        is_excused: Whether a connection that began and ended then (`time.monotonic`) may have been
            cut: an ingress was in trouble meanwhile.
        rng: Source of all random draws.
    """

    def __init__(
        self,
        url: str,
        asks: Sequence[Ask],
        answers: Sequence[list[int]],
        deadline_s: float,
        is_excused: Callable[[float, float], bool],
        rng: random.Random,
    ) -> None:
        self._url = url
        self._asks = asks
        self._answers = answers
        self._deadline_s = deadline_s
        self._is_excused = is_excused
        self._rng = rng
        self._open = asyncio.Semaphore(_MAX_OPEN)
        self.tally = Tally()

    async def run(self, num_requests: int, requests_per_s: float) -> None:
        """Send them all; returns when the last one has ended."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        async with session() as http:
            tasks = []
            for _ in range(num_requests):
                due_s += self._rng.expovariate(requests_per_s)
                await asyncio.sleep(max(due_s - loop.time(), 0.0))
                await self._open.acquire()
                is_aborted = self._rng.random() < ABORTED_SHARE
                abort_s = self._rng.uniform(0.0, _ABORT_WITHIN_S) if is_aborted else None
                number = self._rng.randrange(len(self._asks))
                is_streamed = self._rng.random() < 0.8
                tasks.append(asyncio.create_task(self._request(http, number, is_streamed, abort_s)))
            await asyncio.gather(*tasks)

    async def _request(
        self,
        http: aiohttp.ClientSession,
        number: int,
        is_streamed: bool,
        abort_s: float | None,
    ) -> None:
        try:
            ending = await self._judge(http, number, is_streamed, abort_s)
        finally:
            self._open.release()
        self.tally.endings[ending] += 1

    async def _judge(
        self, http: aiohttp.ClientSession, number: int, is_streamed: bool, abort_s: float | None
    ) -> Ending:
        """Run one request; how it ended."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        right, tokens = self._answers[number], list[int]()
        ending: Ending = "ok"
        limit_s = self._deadline_s if abort_s is None else abort_s
        try:
            await asyncio.wait_for(
                ask(http, self._url, self._asks[number], is_streamed, tokens), limit_s
            )
        except TypedError as error:
            ending = "typed_error"
            self.tally.errors[str(error)] = self.tally.errors.get(str(error), 0) + 1
        except (asyncio.TimeoutError, TimeoutError):
            ending = "hung" if abort_s is None else "aborted"
        except (aiohttp.ClientError, CutError, OSError) as error:
            ending = "cut"
            if not self._is_excused(began_s, loop.time()):
                return self.tally.note_wrong(f"cut while every ingress lived: {error!r}")
        if tokens != right[: len(tokens)] or (ending == "ok" and len(tokens) != len(right)):
            return self.tally.note_wrong(f"ask {number} ({ending}): {tokens} instead of {right}")
        return ending


def session() -> aiohttp.ClientSession:
    """A session whose requests have a connection each, as those of many clients have."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
    )


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    what: Ask,
    is_streamed: bool,
    tokens: list[int],
) -> None:
    """Send one request; its token ids go to `tokens` as they come.

    Raises:
        TypedError: The server said what went wrong.
        CutError: The connection ended before the answer was whole.
        aiohttp.ClientError: So it did.
    """
    async with http.post(
        f"{url}/v1/completions", json=what.body | {"stream": is_streamed}
    ) as reply:
        if reply.status != 200:
            raise _problem(await reply.read(), reply.status)
        if not is_streamed:
            tokens += (await reply.json())["choices"][0]["token_ids"]
            return
        async for line in reply.content:
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            if not data or data.startswith(b":"):
                continue
            event = json.loads(data)
            if "error" in event:
                raise _typed(event)
            tokens += [token for choice in event["choices"] for token in choice["token_ids"]]
    raise CutError("the stream ended without [DONE]")


def _problem(body: bytes, status: int) -> Exception:
    """Return the error that a response other than 200 stands for."""
    try:
        return _typed(json.loads(body))
    except (ValueError, KeyError, TypeError):
        return CutError(f"status {status}: {body[:80]!r}")


def _typed(body: dict[str, Any]) -> TypedError:
    error = body["error"]
    return TypedError(str(error.get("code") or error["type"]))


async def answers_of(url: str, asks: Sequence[Ask]) -> list[list[int]]:
    """The token ids of each, asked of a cluster that nothing disturbs; some at a time.

    Raises:
        SystemExit: One was not answered.
    """
    found: list[list[int]] = [[] for _ in asks]
    at_once = asyncio.Semaphore(8)
    async with session() as http:

        async def one(number: int) -> None:
            async with at_once:
                await ask(http, url, asks[number], True, found[number])

        try:
            await asyncio.gather(*map(one, range(len(asks))))
        except (TypedError, CutError, aiohttp.ClientError) as error:
            raise SystemExit(f"undisturbed, a request failed: {error!r}") from error
    return found
