"""The order of a KV connector's calls in a step, and that no request waits for others' copies."""

from __future__ import annotations

import msgspec
import pytest

from replicas.columns import ColumnReader
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.engine_process.parent import STOP, Inbox
from replicas.engine_process.process import EngineProcess
from replicas.engine_process.server import EngineServer
from replicas.messages import (
    PROTOCOL_VERSION,
    AddRequest,
    EngineRequest,
    Hello,
    KVTransfers,
    TokenOutput,
    Utility,
)
from replicas.sampling_params import SamplingParams
from tests.engines import (
    CLIENT,
    engine_core,
    generate,
    make_config,
    num_preemptions,
    take_events,
)
from tests.models import model_folder
from tests.replicas.engine.shelf_connector import SHELVES, calls, shelf

PROMPT = [(7 * i + 3) % 150 for i in range(70)]
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, seed=0, ignore_eos=True)
NUM_LAYERS = 3
LAYERS = [
    (call, layer)
    for layer in range(NUM_LAYERS)
    for call in ("wait_for_layer_load", "save_kv_layer")
]
AFTER = [
    ("mark_ready",),
    ("wait_for_save",),
    ("get_transfer_results",),
    ("update_connector_output",),
]


@pytest.fixture(autouse=True)
def empty():
    calls.clear()
    shelf.clear()


def config(**changes):
    return make_config(model_folder("llama-gqa"), **{"kv_connector": SHELVES, **changes})


def test_a_connector_from_elsewhere_is_called_in_the_documented_order():
    with engine_core(config()) as core:
        assert calls == [("register_kv_caches",)]
        calls.clear()
        (first,) = generate(core, [PROMPT], GREEDY)
        assert calls == [
            ("on_new_request", "r0"),
            ("get_num_new_matched_tokens", "r0", 0),
            ("build_connector_meta", [70]),
            ("start_load_kv",),
            *LAYERS,
            *AFTER,
            # Two steps without a prompt or a transfer: no call.
            ("request_finished", "r0"),
        ]
        core.handle(CLIENT, Utility(1, "reset_prefix_cache"), 0.0)
        take_events(core)
        calls.clear()
        (second,) = generate(core, [PROMPT], GREEDY)
        assert calls == [
            ("on_new_request", "r0"),
            ("get_num_new_matched_tokens", "r0", 0),
            ("update_state_after_alloc", "r0", 64),
            # A step of transfers alone.
            ("build_connector_meta", []),
            ("start_load_kv",),
            *AFTER,
            # The missing KV is computed.
            ("build_connector_meta", [70]),
            ("start_load_kv",),
            *LAYERS,
            *AFTER,
            ("request_finished", "r0"),
        ]
        assert second == first
        calls.clear()
    assert calls == [("close",)]


def test_chunks_and_calls_of_either_kind_tell_of_their_layers():
    changes = {"mixed_batches": False, "max_num_batched_tokens": 40}
    with engine_core(config(**changes)) as core:
        calls.clear()
        generate(core, [PROMPT], GREEDY)
        assert [c[1] for c in calls if c[0] == "build_connector_meta"] == [[40], [70]]
        assert [c for c in calls if c[0] in {"wait_for_layer_load", "save_kv_layer"}] == 2 * LAYERS


def test_an_aborted_request_is_cancelled_and_a_finished_one_is_not():
    with engine_core(config()) as core:
        core.handle(CLIENT, AddRequest(EngineRequest("r", PROMPT, GREEDY)), 0.0)
        core.step(0.0)
        core.client_gone(CLIENT)
    assert calls[-3:-1] == [("cancel", "r"), ("request_finished", "r")]


def test_preemption_is_told():
    prompts = [[i, *PROMPT[:30]] for i in range(4)]
    params = msgspec.structs.replace(GREEDY, max_tokens=50)
    with engine_core(config(num_blocks=7)) as core:
        found = generate(core, prompts, params)
        assert num_preemptions(core)
    assert any(call[0] == "request_preempted" for call in calls)
    with engine_core(config(kv_connector=None)) as core:
        assert generate(core, prompts, params) == found


def test_salts_keep_what_a_connector_kept_apart():
    with engine_core(config()) as core:
        for request_id, salt in (("a", "one"), ("b", "two"), ("c", "one")):
            core.handle(CLIENT, Utility(1, "reset_prefix_cache"), 0.0)
            request = EngineRequest(request_id, PROMPT, GREEDY, salt)
            core.handle(CLIENT, AddRequest(request), 0.0)
            while core.step(0.0):
                pass
    loads = [c[1] for c in calls if c[0] == "update_state_after_alloc"]
    assert loads == ["c"]


def test_blocks_that_a_step_gave_up_are_whole_while_the_connector_reads_them():
    with engine_core(config(kv_connector=None)) as core:
        (wanted,) = generate(core, [PROMPT], GREEDY)
    with engine_core(config(num_blocks=5)) as core:
        one = msgspec.structs.replace(GREEDY, max_tokens=1)
        # Each ends in the step that computes its prompt, and the next one takes over its blocks.
        prompts = [PROMPT, PROMPT[::-1], [1, *PROMPT]]
        generate(core, prompts, one)
        assert len(shelf) == 3
        core.handle(CLIENT, Utility(1, "reset_prefix_cache"), 0.0)
        take_events(core)
        assert generate(core, [PROMPT], GREEDY) == [wanted]
    assert calls.count(("update_state_after_alloc", "r0", 64)) == 1


# --- tokens first ------------------------------------------------------------------------------


def test_tokens_are_there_before_the_connector_reads_kv():
    with engine_core(config()) as core:
        core.handle(CLIENT, AddRequest(EngineRequest("r", PROMPT, GREEDY)), 0.0)
        take_events(core)
        step = core.begin_step(0.0)
        assert take_events(core) == {}
        core.collect_step(step)
        [output] = take_events(core)[CLIENT]
        assert isinstance(output, TokenOutput)
        assert ("mark_ready",) not in calls
        assert not shelf
        assert core.end_step(step, 0.0)
        assert len(shelf) == 1
        while core.step(0.0):
            pass


class _Sender:
    """Notes when frames with tokens leave, and stops the engine after the last."""

    def __init__(self, inbox):
        self._inbox = inbox
        self._columns = ColumnReader()

    def send(self, _client, frame):
        outputs = [e for e in self._columns.read(frame.events) if isinstance(e, TokenOutput)]
        if outputs:
            calls.append(("frame", outputs[0].index))
        if any(output.finish_reason for output in outputs):
            self._inbox.put((b"", STOP))


def test_an_engine_process_sends_the_first_token_before_it_copies_kv():
    core = EngineCore(config(), UniProcExecutor(config()))
    inbox = Inbox()
    inbox.put((CLIENT, Hello(PROTOCOL_VERSION)))
    inbox.put((CLIENT, AddRequest(EngineRequest("r", PROMPT, GREEDY))))
    EngineProcess(EngineServer(core, "e"), inbox, _Sender(inbox)).run()
    core.shutdown()
    first = calls.index(("frame", 0))
    assert calls[first - 1] == LAYERS[-1]
    assert calls[first + 1 : first + 5] == AFTER
    assert [c for c in calls if c[0] == "frame"] == [("frame", 0), ("frame", 1), ("frame", 2)]
    # Each part of a step has its time, to the last frame.
    assert min(msgspec.structs.astuple(core.timer.host_seconds())) > 0


def test_transfers_under_way_can_be_looked_at():
    with engine_core(config()) as core:
        core.handle(CLIENT, Utility(4, "kv_transfers"), 2.5)
        [answer] = take_events(core)[CLIENT]
        found = msgspec.convert(msgspec.to_builtins(answer.result), KVTransfers)
        [info] = found.transfers
        assert (info.request_id, info.path, info.age_s) == ("r", "shelf", 2.5)
        assert (found.num_leased_blocks, found.num_reserved_blocks) == (0, 7)
    with engine_core(config(kv_connector=None)) as core:
        assert core.kv_transfers(0.0) == KVTransfers()
