"""After any calls of a scheduler, each request ends once and returns everything it held."""

from __future__ import annotations

from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from replicas.config import SpeculativeConfig
from replicas.engine.sequence import Phase
from replicas.sampling.preparation import Prepared
from replicas.sampling_params import StructuredOutputs
from tests.kv_groups import one_kv_group, states_group
from tests.replicas.engine.fakes import (
    EOS,
    make_config,
    make_sequence,
    make_siblings,
    make_ticket,
)
from tests.replicas.engine.scheduler_world import World, key_of

TOKENS = st.integers(0, 3)
OUTPUTS = st.sampled_from([EOS, 1, 1, 1, 2, 2, 3, 3])
_DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
GRAMMARS = [StructuredOutputs(regex=letter) for letter in "abc"]
CLIENTS = st.sampled_from([b"one", b"two", b"three"])


_NO_WINDOW = st.none()


@st.composite
def prompts(draw, longest):
    """Most begin alike, so that prefixes are found."""
    start = [1, 2, 3, 1, 1, 2, 2, 3, 3, 1][: draw(st.integers(0, 10))]
    return (start + draw(st.lists(TOKENS, min_size=1, max_size=3)))[-longest:]


@st.composite
def worlds(draw, num_kv_groups=1, most_tokens=1, windows=_NO_WINDOW, has_states=False):
    groups, slots, block_size = (draw(st.integers(1, n)) for n in (2, 3, 4))
    kv_groups = one_kv_group(draw(st.integers(4, 8)), block_size, window=draw(windows))
    room = kv_groups[0].num_usable_blocks * block_size
    for _ in range(num_kv_groups - 1):
        # About as much room in other blocks, so that either group may be the one without.
        other_size = draw(st.integers(1, 6))
        other_blocks = max(2, room // other_size + draw(st.integers(-2, 3)))
        kv_groups += one_kv_group(1 + other_blocks, other_size, window=draw(windows))
    room = min(g.num_usable_blocks * g.block_size for g in kv_groups)
    if has_states:
        kv_groups += (states_group(draw(st.integers(2, 8)), draw(st.integers(1, 4))),)
    tokens_per_pass = min(draw(st.integers(min(most_tokens, 2), most_tokens)), room - 1)
    extent = draw(st.integers(tokens_per_pass, 2 * tokens_per_pass)) if most_tokens > 1 else 1
    max_model_len = draw(st.integers(max(room // 2, tokens_per_pass) + 1, room))
    chunked = draw(st.booleans())
    chunk_alignment = draw(st.sampled_from([1, block_size]))
    least = max(groups * slots, chunk_alignment if chunked else max_model_len)
    mixed_batches = draw(st.booleans())
    num_partial = draw(st.sampled_from([1, 1, 2, 3])) if chunked else 1
    can_draft = mixed_batches and tokens_per_pass == 1 and not has_states
    config = make_config(
        max_batch_size=groups * slots,
        tt_data_parallel=groups,
        block_size=block_size,
        max_num_batched_tokens=draw(st.integers(least, least + 8)),
        max_num_waiting=draw(st.sampled_from([None, 0, 2])),
        enable_chunked_prefill=chunked,
        enable_prefix_caching=draw(st.booleans()),
        mixed_batches=mixed_batches,
        speculative_config=draw(st.sampled_from([None, _DRAFTS])) if can_draft else None,
        prefill_steps_per_decode_step=draw(st.integers(1, 3)),
        kv_load_failure_policy=draw(st.sampled_from(["recompute", "fail"])),
        long_prefill_token_threshold=draw(st.integers(0, 3)) if chunked else 0,
        max_num_partial_prefills=num_partial,
        max_long_partial_prefills=draw(st.integers(1, num_partial)),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
    )
    return World(config, kv_groups, max_model_len, chunk_alignment, tokens_per_pass, extent)


class SchedulerMachine(RuleBasedStateMachine):
    """Clients, peers and the clock in any order, one step of the engine at a time."""

    @initialize(world=worlds())
    def start(self, world):
        self.world = world
        self.scheduler = world.scheduler
        self.count = 0
        self.epoch = 0

    def _new(self, data, mode):
        self.count += 1
        world = self.world
        prompt = data.draw(prompts(world.longest), label="prompt")
        can_score = world.config.mixed_batches and world.tokens_per_pass == 1
        if data.draw(st.booleans(), label="whole blocks"):
            prompt = prompt[: -(len(prompt) % world.config.block_size) or None] or prompt
        return make_sequence(
            f"{mode}-{self.count}",
            prompt,
            mode=mode,
            dp_group=data.draw(st.integers(-1, world.config.tt_data_parallel - 1), label="group"),
            client=data.draw(CLIENTS, label="client"),
            priority=data.draw(st.sampled_from([0, 0, -1, 1]), label="priority"),
            max_tokens=data.draw(st.integers(1, 20), label="max_tokens"),
            ignore_eos=data.draw(st.booleans(), label="ignore_eos"),
            structured_outputs=data.draw(st.sampled_from([None] * 5 + GRAMMARS), label="grammar"),
            prompt_logprobs=data.draw(
                st.sampled_from([None, None, 0] if can_score else [None]), label="prompt_logprobs"
            ),
            n=1 if mode == "prefill" else data.draw(st.sampled_from([1, 1, 1, 2, 3]), label="n"),
        )

    def _pick(self, data, *phases):
        found = [s for s in self.scheduler.table if s.phase in phases]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(data=st.data(), remote=st.booleans(), count=st.integers(1, 4))
    def add(self, data, remote, count):
        for _ in range(count):
            self._add_one(data, remote)

    def _add_one(self, data, remote):
        seq = self._new(data, "prefill" if remote else "local")
        pool = self.world.connector.pool
        if remote is False:
            whole = seq.num_prompt_tokens
            known = st.none() | st.just(whole) | st.integers(0, whole)
            pool[seq.request_id] = data.draw(known, label="tokens in the store")
        siblings = make_siblings(seq)
        refusal = self.scheduler.add(seq, self.world.now_s, siblings)
        if refusal is None:
            self.world.accept(seq, siblings)
        else:
            pool.pop(seq.request_id, None)
            assert refusal == "queue_full"
            assert seq.request_id not in self.world.connector.transfers

    @rule(data=st.data(), is_stream=st.booleans())
    def reserve(self, data, is_stream):
        seq = self._new(data, "decode")
        if is_stream:
            # Another engine has begun to decode it.
            longest = self.scheduler._end_rules.longest(seq) - 1
            room = min(longest, self.world.longest) - seq.num_tokens
            seq.token_ids += data.draw(st.lists(st.integers(EOS + 1, 3), max_size=max(room, 0)))
        before = self.scheduler.group_snapshots()
        siblings = make_siblings(seq)
        refusal = self.scheduler.reserve(seq, self.world.now_s, siblings)
        if refusal is None:
            self.world.accept(seq, siblings)
            assert seq.place.slot >= 0
            assert seq.place.dp_group == seq.place.slot // self.world.config.slots_per_group
        else:
            assert self.scheduler.group_snapshots() == before

    @rule(data=st.data())
    def load(self, data):
        seq = self._pick(data, Phase.RESERVED)
        if seq is not None:
            if data.draw(st.booleans(), label="a store is asked first"):
                self.world.connector.pool.setdefault(seq.request_id, None)
            self.epoch += 1
            num_tokens = seq.num_prompt_tokens
            if seq.num_output_tokens and seq.request_id in self.scheduler.loads.not_activated:
                num_tokens = data.draw(st.integers(1, seq.num_tokens), label="tokens lent")
            ticket = make_ticket(seq.request_id, num_tokens, self.epoch)
            self.scheduler.loads.load(seq.request_id, ticket, self.epoch, self.world.now_s)

    @rule(data=st.data())
    def lend(self, data):
        seq = self._pick(data, Phase.PREFILL, Phase.DECODE)
        if seq is not None and seq.request_id not in self.world.connector.transfers:
            num_tokens = data.draw(st.integers(1, seq.num_tokens), label="tokens lent")
            ticket = make_ticket(seq.request_id, num_tokens, producer="here")
            self.scheduler.lend(seq.request_id, ticket, self.world.now_s)

    @precondition(lambda self: None in self.world.connector.pool.values())
    @rule(data=st.data())
    def lookup_ends(self, data):
        pool = self.world.connector.pool
        request_id = data.draw(st.sampled_from(sorted(r for r, n in pool.items() if n is None)))
        seq = self.scheduler.table.get(request_id)
        pool[request_id] = data.draw(st.integers(0, seq.num_prompt_tokens), label="tokens found")

    @rule(data=st.data(), error=st.sampled_from([None, None, "bad"]))
    def grammar_ends(self, data, error):
        self.world.prepare()
        if self.world.compiling:
            found = data.draw(st.sampled_from(list(self.world.compiling)), label="compiled")
            self.world.prepare([Prepared(found, error)])

    @precondition(lambda self: self.scheduler.loads.not_activated)
    @rule(data=st.data(), with_tokens=st.booleans())
    def activate(self, data, with_tokens):
        request_id = data.draw(st.sampled_from(sorted(self.scheduler.loads.not_activated)))
        # Choice 0 may have been dropped.
        seq = self.scheduler.table.choices(request_id)[0]
        # A client activates with tokens only if the request continues after them.
        most = seq.request.sampling.max_tokens - seq.num_output_tokens - 1
        room = min(self.world.longest - seq.num_tokens, most)
        tokens = data.draw(st.lists(st.integers(EOS + 1, 3), min_size=1, max_size=3))
        tokens = tokens[: max(room, 0)] if with_tokens else []
        self.world.activate(request_id, tokens)

    @precondition(lambda self: self.world.connector.transfers)
    @rule(data=st.data(), ok=st.booleans())
    def end_transfer(self, data, ok):
        transfers = self.world.connector.transfers
        request_id = data.draw(st.sampled_from(sorted(transfers)))
        transfer = transfers[request_id]
        if not transfer.is_load and transfer.num_saved_tokens < transfer.num_tokens:
            ok = False
        num_verified = 0
        if transfer.block_ids and not ok:
            some = st.integers(transfer.start, transfer.num_tokens)
            num_verified = data.draw(st.just(0) | some, label="verified")
        self.world.end_transfer(request_id, ok=ok, num_verified=num_verified)

    @rule(data=st.data())
    def abort(self, data):
        if self.world.outputs:
            key = data.draw(st.sampled_from(sorted(self.world.outputs)))
            if data.draw(st.booleans(), label="one choice"):
                self.world.abort_choice(key)
            else:
                self.world.abort(key[0])

    @precondition(lambda self: self.scheduler.loads.not_activated)
    @rule(data=st.data())
    def choice_had_ended_elsewhere(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.scheduler.loads.not_activated)))
        self.world.abort_choice(key_of(self.scheduler.table.choices(request_id)[0]))

    @precondition(lambda self: self.count > 6)
    @rule(client=CLIENTS)
    def client_vanishes(self, client):
        for seq in self.scheduler.table:
            self.world.ended[key_of(seq)] += seq.client == client
        self.world.ended = +self.world.ended
        self.scheduler.abort_client(client)
        assert all(s.client != client for s in self.scheduler.table)

    @rule(data=st.data(), count=st.integers(1, 12))
    def step(self, data, count):
        for _ in range(count):
            if not self.world.step(lambda: data.draw(OUTPUTS)):
                break
            self.world.check()

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def time_passes(self, seconds):
        self.world.expire(self.world.now_s + seconds)
        self.world.prepare()
        deadline_s = self.scheduler.next_deadline_s()
        assert deadline_s is None or deadline_s > self.world.now_s

    @rule(preempt_running=st.booleans())
    def prefixes_are_forgotten(self, preempt_running):
        done = self.scheduler.reset_prefix_cache(preempt_running=preempt_running)
        if preempt_running:
            assert not self.scheduler.table.rows
            holders = [s for s in self.scheduler.table if s.place.block_ids]
            assert done == (not holders and not self.scheduler.table.leaving())

    def check_invariants(self, *_args, **_kwargs):
        super().check_invariants(*_args, **_kwargs)
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish_everything(lambda: 1)


class TwoKVGroupsMachine(SchedulerMachine):
    """The same for a model with two kinds of layers, with different numbers of tokens a block."""

    @initialize(world=worlds(num_kv_groups=2))
    def start(self, world):
        super().start(world)


class WindowsMachine(SchedulerMachine):
    """The same for layers that see windows, alone and beside others.

    Rows of one token: of a load only the last window comes, to the token.
    """

    def __init__(self):
        super().__init__()
        self.rows = mock.patch("replicas.kv_groups.ROW_TOKENS", 1)
        self.rows.start()

    def teardown(self):
        try:
            super().teardown()
        finally:
            self.rows.stop()

    @initialize(data=st.data())
    def start(self, data):
        # One token, and about one block, are the edges of what a window may be.
        windows = st.sampled_from([None, 1, 2, 3, 4, 5, 8])
        super().start(data.draw(worlds(data.draw(st.integers(1, 3)), windows=windows)))


class StatesMachine(SchedulerMachine):
    """The same for recurrent layers beside others, without transfers.

    A state is that of all tokens before.
    """

    reserve = load = lend = None

    @initialize(data=st.data())
    def start(self, data):
        windows = st.sampled_from([None, None, 3])
        world = data.draw(worlds(data.draw(st.integers(1, 2)), windows=windows, has_states=True))
        super().start(world)
        kv = self.scheduler._kv
        kv._checkpoint_tokens = kv.block_multiple * data.draw(st.integers(1, 4))

    @rule(data=st.data(), count=st.integers(1, 4))
    def add(self, data, count):
        for _ in range(count):
            self._add_one(data, remote=None)


class BlocksMachine(SchedulerMachine):
    """The same for a device that gives a row one or several tokens a pass, as it likes."""

    @initialize(world=worlds(most_tokens=4))
    def start(self, world):
        super().start(world)


SETTINGS = settings(
    stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow], deadline=None
)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = SETTINGS
TestTwoKVGroups = TwoKVGroupsMachine.TestCase
TestTwoKVGroups.settings = SETTINGS
TestWindows = WindowsMachine.TestCase
TestWindows.settings = SETTINGS
TestStates = StatesMachine.TestCase
TestStates.settings = SETTINGS
TestBlocks = BlocksMachine.TestCase
TestBlocks.settings = SETTINGS
