"""Hand requests over between two real engines, and see how long the decode side waits for KV.

Two engine processes on the CPU, and a client in the router's place. The connectors' own records
give the end of the last prefill step and the time when the decode side could continue. All other
times are the client's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from benchmarks.kv.connector_process import KEYS
from benchmarks.kv.recording_connector import RECORD_VARIABLE, RECORDING_CONNECTOR, Stage
from cluster.routing.tickets import TicketOffice
from replicas.async_client import AsyncMPClient
from replicas.config import EngineConfig
from replicas.launch import start_engine
from replicas.messages import (
    Accepted,
    Activate,
    AddRequest,
    EngineRequest,
    KVLoaded,
    LoadKV,
    TokenOutput,
)
from replicas.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from replicas.launch import EngineHandle
    from replicas.messages import EngineEvent
    from replicas.streams import EngineStream

_Event = TypeVar("_Event", bound="EngineEvent")

DEMO_MODEL = Path(__file__).parents[2] / "configs" / "demo-model"
VOCAB_SIZE = 4096
BLOCK_SIZE = 32
CHUNK_TOKENS = 256
SAMPLING = SamplingParams(max_tokens=2, temperature=0.0, seed=0, ignore_eos=True)

STAGES = {
    "sent": ("rendezvous", "handover"),
    "committed": ("first_chunk", "stream", "commit", "total"),
}
"""Stages that the connectors count, by the event that reports them."""

LARGE_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""32 KiB of KV per token, so that 2,048 of them take longer to move than a message does."""


class Handover(NamedTuple):
    """Times of one request's hand-over, in seconds.

    Attributes:
        reserve_s: The client's wait for slot and blocks on the decode side.
        exposed_s: From the end of the last prefill step to the commit.
        load_s: From the start of the load to the commit.
        resume_s: From the commit to the decode side's first token, at the client.
        stages: Seconds that the connectors count: rendezvous and handover of the prefill side, the
            others of the decode side.
    """

    reserve_s: float
    exposed_s: float
    load_s: float
    resume_s: float
    stages: dict[str, float]


class EnginePair:
    """A prefill and a decode engine, with a client of both.

    Owner: of the client; the processes are their handles' owner's.
    """

    def __init__(
        self,
        client: AsyncMPClient,
        prefill: EngineHandle,
        decode: EngineHandle,
        record: Path,
        schemes: Sequence[str],
    ) -> None:
        self._client = client
        self._decode = decode.description
        # The ticket names only these endpoints of the prefill engine.
        endpoints = prefill.description.kv_endpoints or ()
        self._prefill = msgspec.structs.replace(
            prefill.description,
            kv_endpoints=tuple(x for x in endpoints if x.partition(":")[0] in schemes),
        )
        self._record = record
        self._office = TicketOffice(KEYS)
        self._random = random.Random(1)
        self._numbers = itertools.count()
        self._before: dict[str, dict[str, float]] = {}

    async def hand_over(self, num_tokens: int, *, overlapped: bool = True) -> Handover:
        """Run one request over both engines, alone.

        Args:
            num_tokens: Of its prompt, which is a new one.
            overlapped: Whether the decode side may fetch while the prompt is being computed.
        """
        name = f"request-{next(self._numbers)}"
        prompt = [self._random.randrange(8, VOCAB_SIZE) for _ in range(num_tokens)]
        request = EngineRequest(name, prompt, SAMPLING)
        transfer = self._office.begin(request, 1, self._prefill)
        ticket = self._office.seal(transfer, self._decode.incarnation)
        load = LoadKV(name, ticket, 1)
        clock = asyncio.get_running_loop().time

        asked_s = clock()
        decoding = self._open(self._decode.incarnation, AddRequest(request, "decode"))
        await _until(decoding, Accepted)
        reserved_s = clock()
        prefilling = self._open(
            self._prefill.incarnation, AddRequest(request, "prefill", ticket=ticket)
        )
        if overlapped:
            self._client.send(self._decode.incarnation, load)
        first = await _until(prefilling, TokenOutput)
        if not overlapped:
            self._client.send(self._decode.incarnation, load)
        loaded = await _until(decoding, KVLoaded)
        if loaded.failure is not None:
            raise SystemExit(f"{name}: KV transfer failed: {loaded.failure}")
        self._client.send(self._decode.incarnation, Activate(name, [first.token_ids]))
        await _until(decoding, TokenOutput)
        resumed_s = clock()
        for stream in (decoding, prefilling):
            stream.close(abort=False)
        at, stages = await self._recorded(name)
        return Handover(
            reserve_s=reserved_s - asked_s,
            exposed_s=at["committed"] - at["computed"],
            load_s=at["committed"] - at["loading"],
            resume_s=resumed_s - at["committed"],
            stages=stages,
        )

    def _open(self, incarnation: str, message: AddRequest) -> EngineStream:
        return self._client.open_stream(incarnation, message.request.request_id, message)

    async def _recorded(self, name: str) -> tuple[dict[str, float], dict[str, float]]:
        """Wait for a request's last line; return the time of each event, and seconds of stages."""
        wanted = {"computed", "loading", "committed", "sent"}
        while True:
            lines = self._record.read_bytes().splitlines()
            found = [msgspec.json.decode(line, type=Stage) for line in lines]
            mine = {stage.event: stage for stage in found if stage.request_id == name}
            if wanted <= mine.keys():
                break
            await asyncio.sleep(0.002)
        stages = {}
        for event, names in STAGES.items():
            now, before = mine[event].stages, self._before.get(event, {})
            stages.update({name: now[name] - before.get(name, 0.0) for name in names})
            self._before[event] = now
        self._record.write_bytes(b"")
        return {event: stage.at_s for event, stage in mine.items()}, stages


async def _until(stream: EngineStream, kind: type[_Event]) -> _Event:
    """Wait for an event of a kind."""
    while True:
        event = await stream.get()
        if isinstance(event, kind):
            return event


@contextlib.asynccontextmanager
async def engine_pair(config: EngineConfig, schemes: Sequence[str]) -> AsyncIterator[EnginePair]:
    """Start two engines; end them afterwards.

    Args:
        config: Of both, but for the connector.
        schemes: Of the endpoints by which the decode engine may reach the other one.
    """
    config = msgspec.structs.replace(
        config, kv_connector=RECORDING_CONNECTOR, keys=KEYS, num_threads=1
    )
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"
        record.touch()
        env = {**os.environ, RECORD_VARIABLE: str(record)}
        handles: list[EngineHandle] = []
        client = AsyncMPClient(KEYS)
        try:
            for _ in range(2):
                handles.append(await asyncio.to_thread(start_engine, config, env=env))
                await client.connect(handles[-1].description)
            prefill, decode = handles
            yield EnginePair(client, prefill, decode, record, schemes)
        finally:
            await client.close()
            for handle in handles:
                handle.stop()


@contextlib.contextmanager
def large_model() -> Iterator[str]:
    """A folder with a model of random weights whose KV is worth hiding."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LARGE_MODEL))
        yield folder


async def short_handovers(schemes: Sequence[str], count: int) -> list[Handover]:
    """Hand over prompts of one block, one after the other."""
    config = EngineConfig(model=str(DEMO_MODEL), block_size=BLOCK_SIZE, num_blocks=256)
    async with engine_pair(config, schemes) as pair:
        for _ in range(5):
            await pair.hand_over(BLOCK_SIZE)
        return [await pair.hand_over(BLOCK_SIZE) for _ in range(count)]


class HiddenShare(NamedTuple):
    """Share of a transfer that is hidden behind the prefill; seconds, medians.

    Attributes:
        num_tokens: Of the prompt.
        exposed_s: From the end of the last prefill step to the commit, with overlap.
        total_s: The same transfer, begun after the prefill.
    """

    num_tokens: int
    exposed_s: float
    total_s: float

    @property
    def share(self) -> float:
        """1 where nothing is seen of the transfer, 0 where overlap gains nothing."""
        return 1.0 - self.exposed_s / self.total_s


async def hidden_shares(
    schemes: Sequence[str], lengths: Sequence[int], count: int
) -> list[HiddenShare]:
    """Hand over long prompts, with and without overlap in turn."""
    found = []
    longest = max(lengths)
    with large_model() as folder:
        config = EngineConfig(
            model=folder,
            load_format="random",
            dtype="float32",
            block_size=BLOCK_SIZE,
            num_blocks=2 * longest // BLOCK_SIZE + 16,
            max_model_len=longest + BLOCK_SIZE,
            max_num_batched_tokens=CHUNK_TOKENS,
        )
        async with engine_pair(config, schemes) as pair:
            await pair.hand_over(min(lengths))
            for num_tokens in lengths:
                exposed, total = [], []
                for _ in range(count):
                    exposed.append((await pair.hand_over(num_tokens)).exposed_s)
                    total.append((await pair.hand_over(num_tokens, overlapped=False)).load_s)
                found.append(
                    HiddenShare(num_tokens, statistics.median(exposed), statistics.median(total))
                )
    return found
