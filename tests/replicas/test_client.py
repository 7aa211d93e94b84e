"""Both clients of one process: a refusal costs no other request a token."""

import itertools
import queue
from collections import deque

import pytest

from replicas.client import InprocClient, SyncMPClient
from replicas.columns import ColumnReader
from replicas.errors import RequestRefusedError
from replicas.llm_engine import LLMEngine
from replicas.messages import EngineRequest, Refused, TokenOutput
from replicas.sampling_params import SamplingParams
from tests.engines import make_config
from tests.models import model_folder

REFUSED = Refused("b", "queue_full", "the queue is full")


def frames():
    """Return an engine's frames: a token beside a refusal, and the next token."""
    return [[TokenOutput("a", 0, [5]), REFUSED], [TokenOutput("a", 1, [6], "length")]]


class HeardClient(SyncMPClient):
    """A client whose reading thread hands over scripted frames, without an engine."""

    def __init__(self, live, heard):
        self._frames = queue.SimpleQueue()
        self._columns = ColumnReader()
        self._kept = deque()
        self._unanswered = set(live)
        for frame in heard:
            self._frames.put(frame)


@pytest.fixture(params=["process", "in process"])
def client(request, monkeypatch):
    if request.param == "process":
        yield HeardClient({"a", "b"}, frames())
        return
    inproc = InprocClient(make_config(model_folder("llama-gqa")))
    told = itertools.chain(frames(), itertools.repeat([]))
    monkeypatch.setattr(inproc.core, "take_events", lambda: {b"": next(told)})
    yield inproc
    inproc.shutdown()


def test_a_refusal_loses_no_tokens_of_others(client):
    tokens, refusals = [], 0
    for _ in range(5):
        try:
            outputs = client.get_outputs()
        except RequestRefusedError:
            refusals += 1
            continue
        for output in outputs:
            assert output.index == len(tokens)
            tokens += output.token_ids
        if outputs and outputs[-1].finish_reason is not None:
            break
    assert (tokens, refusals) == ([5, 6], 1)


def test_a_refusal_at_the_door_is_raised_where_the_request_was_added():
    inproc = InprocClient(make_config(model_folder("llama-gqa")))
    try:
        with pytest.raises(RequestRefusedError):
            inproc.add_request(EngineRequest("long", [1] * 4096, SamplingParams(max_tokens=1)))
        assert inproc.get_outputs() == []
    finally:
        inproc.shutdown()


def test_an_engine_of_requests_forgets_one_that_was_refused():
    process = SyncMPClient(
        make_config(model_folder("llama-gqa"), max_batch_size=1, max_num_waiting=0)
    )
    engine = LLMEngine(process, None)
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    try:
        for i in range(5):
            engine.add_request([5, 6, 7], sampling, f"r{i}")
        refused, ended = set(), {}
        while engine.has_unfinished_requests():
            outputs = []
            try:
                outputs = engine.step()
            except RequestRefusedError as error:
                refused.add(error.request_id)
            ended |= {o.request_id: o for o in outputs if o.finished}
        assert refused
        assert refused | ended.keys() == {f"r{i}" for i in range(5)}
        assert all(len(o.outputs[0].token_ids) == 4 for o in ended.values())
    finally:
        process.shutdown()
