"""All layers in one call give the results of single operations, to the bit."""

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.generators.torch import generator, native, stack
from replicas.generators.torch.fast_attention import tiles_of
from replicas.generators.torch.inputs import PagedBatch
from replicas.generators.torch.kernels import kernels_for
from replicas.generators.torch.native import Feature
from replicas.kv_groups import KVGroup
from tests.replicas.generators.conftest import make_generator

BLOCK, WIDTH, MOST = 16, 12, 8
NO_TILES, NO_PAIRS = Feature.AMX, Feature.AMX | Feature.AVX512
# Threads, and features of the processor to do without.
HOSTS = {
    "1 thread": (1, Feature(0)),
    "5 threads": (5, Feature(0)),
    "2 threads, no tiles": (2, NO_TILES),
    "5 threads, no pairs": (5, NO_PAIRS),
}


@pytest.fixture(params=HOSTS.values(), ids=HOSTS, autouse=True, scope="module")
def _host(request):
    before = torch.get_num_threads()
    num_threads, without = request.param
    torch.set_num_threads(num_threads)
    kernel_set = native.kernel_set
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator, "LONG_PRODUCTS", 0)  # no pass is too short for threads
        patch.setattr(native, "kernel_set", lambda _none=None: kernel_set(without))
        kernels_for.cache_clear()
        yield
    kernels_for.cache_clear()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def made(_host, tiny):
    """A generator and a cache for it, of each case one."""

    @cache
    def make(case):
        config = tiny(case).config
        found = make_generator(
            config, torch.bfloat16, max_batch_size=MOST, max_seq_len=BLOCK * WIDTH
        )
        return found, cache_for(found)

    return make


def cache_for(torch_generator):
    config = torch_generator._config
    layers = range(config.num_hidden_layers)
    if not any(map(config.has_window, layers)):
        shape = (MOST * WIDTH + 1, config.num_key_value_heads, BLOCK, config.head_dim)
        return torch_generator.allocate_kv_cache(shape, torch.bfloat16, len(layers))
    [spec, *_] = config.kv_specs("bfloat16")
    return torch_generator.allocate_kv_groups(
        [
            KVGroup(
                layers=tuple(i for i in layers if config.has_window(i) == has_window),
                spec=spec,
                block_size=BLOCK,
                num_blocks=MOST * WIDTH + 1 + has_window,
            )
            for has_window in (False, True)
        ],
        torch.bfloat16,
    )


def batch_of(parts, wanted, seed, num_groups=1):
    """Requests of (tokens before, tokens now), each with blocks of its own in any order."""
    random = np.random.default_rng(seed)
    counts = np.array([now for _, now in parts])
    positions = np.concatenate([np.arange(before, before + now) for before, now in parts])
    tables = np.stack([
        random.permutation(MOST * WIDTH)[: len(parts) * WIDTH].reshape(-1, WIDTH) + 1
        for _ in range(num_groups)
    ])  # fmt: skip
    rows = np.repeat(np.arange(len(parts)), counts)
    blocks = np.ascontiguousarray(tables[:, rows, positions // BLOCK])
    return PagedBatch(
        input_ids=torch.from_numpy(random.integers(0, 100, len(rows))),
        positions=torch.from_numpy(positions),
        kv_positions=torch.from_numpy(blocks * BLOCK + positions % BLOCK),
        query_start_loc=np.concatenate(([0], np.cumsum(counts))),
        seq_lens=np.array([before + now for before, now in parts]),
        block_table=tables,
        logits_indices=torch.tensor(wanted(len(rows)), dtype=torch.int64),
    )


def fill(kv_cache, seed):
    stream = torch.Generator().manual_seed(seed)
    for planes in kv_cache.planes:
        for plane in planes:
            plane.copy_(torch.randn(plane.shape, generator=stream))


def run(made, batch, monkeypatch, *, in_one, seed=0, shares="tokens"):
    torch_generator, kv_cache = made
    fill(kv_cache, seed)
    with monkeypatch.context() as patch:
        if not in_one:
            layers = range(torch_generator._config.num_hidden_layers)
            patch.setattr(torch_generator._model, "_parts", [(layers, None)])
        elif shares == "weights":
            patch.setattr(stack.LayerStack, "plan", share_weights)
        logits = torch_generator._forward(batch, kv_cache)
    return logits, [plane.clone() for planes in kv_cache.planes for plane in planes]


def share_weights(_stack, batch, wanted):
    """Split weights as for a model with many weights, and few tokens."""
    return stack.Shares(wanted, *tiles_of(batch))


def assert_equal(found, wanted):
    assert torch.equal(found[0], wanted[0])
    assert all(torch.equal(*planes) for planes in zip(found[1], wanted[1], strict=True))


requests = st.lists(
    st.tuples(st.integers(0, 90), st.one_of(st.just(1), st.integers(1, 100))),
    min_size=1,
    max_size=MOST,
)


@pytest.mark.parametrize("shares", ["tokens", "weights"])
@pytest.mark.parametrize("case", ["llama-gqa", "qwen2", "qwen3", "qwen2-windows"])
@settings(max_examples=10)
@given(requests, st.data(), st.integers(0, 2**20))
def test_passes_of_any_requests(made, case, shares, parts, data, seed):
    num_tokens = sum(now for _, now in parts)
    wanted = data.draw(st.lists(st.integers(0, num_tokens - 1), min_size=1, max_size=num_tokens))
    _, kv_cache = made(case)
    batch = batch_of(parts, lambda _: wanted, seed, len(kv_cache.num_blocks))
    with pytest.MonkeyPatch.context() as patch:
        one = run(made(case), batch, patch, in_one=True, seed=seed, shares=shares)
        assert_equal(one, run(made(case), batch, patch, in_one=False, seed=seed))


@pytest.mark.parametrize("case", ["llama-gqa", "qwen2", "qwen3"])
@settings(max_examples=6)
@given(st.lists(st.one_of(st.just(1), st.integers(1, 60)), min_size=2, max_size=6), requests)
def test_a_prompt_is_the_same_to_the_bit_however_it_is_cut_and_whatever_is_beside_it(
    made, case, chunks, others
):
    length = min(sum(chunks), BLOCK * WIDTH)
    tokens = np.random.default_rng(length).integers(0, 100, length)
    torch_generator, kv_cache = made(case)

    def prompt(before, now):
        """A chunk of it, behind other requests."""
        parts = [*others[: MOST - 1], (before, now)]
        batch = batch_of(parts if now < length else parts[-1:], lambda n: [n - 1], 0)
        batch.input_ids[-now:] = torch.from_numpy(tokens[before : before + now])
        table = np.arange(WIDTH) + 1 + (MOST - 1) * WIDTH  # blocks of its own
        [tables] = batch.block_table
        tables[:-1] = np.arange(len(tables) - 1)[:, None] * WIDTH + 1
        tables[:-1] += np.arange(WIDTH)
        tables[-1] = table
        rows = np.repeat(np.arange(len(batch.seq_lens)), np.diff(batch.query_start_loc))
        places = batch.positions.numpy()
        blocks = tables[rows, places // BLOCK]
        batch.kv_positions.copy_(torch.from_numpy(blocks * BLOCK + places % BLOCK))
        return torch_generator._forward(batch, kv_cache)

    fill(kv_cache, 1)
    wanted = prompt(0, length)
    planes = [plane[-WIDTH:].clone() for planes in kv_cache.planes for plane in planes]
    fill(kv_cache, 1)
    done = 0
    for chunk in chunks:
        if done < length:
            now = min(chunk, length - done)
            found = prompt(done, now)
            done += now
    assert torch.equal(found, wanted)
    now = [plane[-WIDTH:] for planes in kv_cache.planes for plane in planes]
    assert all(torch.equal(*both) for both in zip(now, planes, strict=True))


@pytest.mark.parametrize("shares", ["tokens", "weights"])
@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("has", ["before", "after", "both"])
def test_layers_are_complete_when_their_callbacks_run(made, monkeypatch, has, is_short, shares):
    monkeypatch.setattr(stack, "SHORT_PASS", 10**12 if is_short else 0)
    parts = [(0, 70), (5, 1), (30, 40)]
    batch = batch_of(parts, range, 3)
    wanted = run(made("qwen3"), batch, monkeypatch, in_one=True)
    torch_generator, kv_cache = made("qwen3")
    seen = []

    def look(when):
        return lambda layer: seen.append(
            (when, layer, [[plane.clone() for plane in planes] for planes in kv_cache.planes])
        )

    torch_generator.set_layer_callbacks(
        look("before") if has != "after" else None, look("after") if has != "before" else None
    )
    try:
        assert_equal(run(made("qwen3"), batch, monkeypatch, in_one=True, shares=shares), wanted)
    finally:
        torch_generator.set_layer_callbacks(None, None)
    fill(kv_cache, 0)
    whole, empty = wanted[1], [plane for planes in kv_cache.planes for plane in planes]
    order = ["before", "after"] if has == "both" else [has]
    layers = range(len(kv_cache.planes))
    expected = [(when, layer) for layer in layers for when in order]
    if is_short:  # one call: all layers before it, and all after it
        expected = [(when, layer) for when in order for layer in layers]
    assert [(when, layer) for when, layer, _ in seen] == expected
    for when, layer, planes in seen:
        for i, plane in enumerate(planes[layer]):
            expected = whole if when == "after" else empty
            assert torch.equal(plane, expected[2 * layer + i])


def test_passes_over_two_caches_at_once_do_not_meet(made, monkeypatch):
    batch = batch_of([(0, 90), (40, 1)], range, 1)
    torch_generator, kv_cache = made("qwen3")
    wanted = run(made("qwen3"), batch, monkeypatch, in_one=True)
    caches = kv_cache, cache_for(torch_generator)
    for one in caches:
        fill(one, 0)

    def passes(one):
        return [torch_generator._forward(batch, one) for _ in range(30)]

    with ThreadPoolExecutor(2) as pool:
        for one, found in zip(caches, pool.map(passes, caches), strict=True):
            assert all(torch.equal(logits, wanted[0]) for logits in found)
            now = [plane for planes in one.planes for plane in planes]
            assert all(torch.equal(*both) for both in zip(now, wanted[1], strict=True))


def test_a_thread_that_waits_sleeps_and_is_woken(made, monkeypatch):
    batch, call_kernel = batch_of([(0, 40)], range, 1), native.Worker.__call__
    wanted = run(made("llama-gqa"), batch, monkeypatch, in_one=True)
    seconds = []

    def withhold(worker, call):
        """Let a thread wait for the first phase of the first layer, whose tasks start later."""
        if not isinstance(call, native.WeightLayersCall):
            call_kernel(worker, call)
            return
        num_first = ctypes.c_int64.from_address(call.phase_tasks).value
        first = native.WeightLayersCall.from_buffer_copy(call)
        first.tasks.count = call.tasks.next = num_first
        waiting = threading.Thread(target=worker._function, args=(ctypes.byref(call),))
        waiting.start()
        time.sleep(0.5)
        seconds.append(time.clock_gettime(time.pthread_getcpuclockid(waiting.ident)))
        worker._function(ctypes.byref(first))
        waiting.join()

    monkeypatch.setattr(native.Worker, "__call__", withhold)
    assert_equal(run(made("llama-gqa"), batch, monkeypatch, in_one=True, shares="weights"), wanted)
    # A thread that is busy while it waits would have used half a second.
    assert len(seconds) == 1
    assert seconds[0] < 0.25


@pytest.mark.parametrize("index", [-1, 20])
def test_logits_of_no_token_are_refused(made, index):
    torch_generator, kv_cache = made("llama-gqa")
    with pytest.raises(IndexError, match="logits of tokens"):
        torch_generator._forward(batch_of([(0, 20)], lambda _: [index], 1), kv_cache)
