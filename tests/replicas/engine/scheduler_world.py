"""A scheduler's surroundings, simulated by the test: device, peers and clients.

The device records for every position of every KV block the token prefix that it was computed from,
so that a step which attends to anything but its own sequence's prefix fails at once.
"""

from __future__ import annotations

import random
from collections import Counter
from math import lcm
from typing import TYPE_CHECKING
from unittest import mock

import msgspec
import numpy as np

from kv_transfer.connector import Failure
from kv_transfer.errors import FailureReason
from replicas.engine.input_batch import PersistentBatch
from replicas.engine.scheduler import Scheduler
from replicas.engine.sequence import Phase
from replicas.engine.step import RowLogprobs
from replicas.messages import TokenLogprob
from replicas.sampling.preparation import Prepared
from tests.replicas.engine.fakes import EOS, PREFIX_CACHE_KEY, FakeConnector, result_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from collections.abc import Sequence as SequenceOf

    import numpy.typing as npt

    from replicas.config import EngineConfig
    from replicas.engine.sequence import Sequence
    from replicas.engine.step import ScheduledBatch, StepResult
    from replicas.kv_groups import KVGroup
    from replicas.sampling_params import StructuredOutputs
    from tests.replicas.engine.fakes import FakeTransfer

    Tables = SequenceOf[SequenceOf[int]]
    """For each KV group a sequence's block table."""

Prefix = tuple[int, ...]


def key_of(seq: Sequence) -> tuple[str, int]:
    """Return the name of a sequence: its request and choice."""
    return seq.request_id, seq.choice


def prompt_logprobs(prompt: SequenceOf[int]) -> list[list[TokenLogprob]]:
    """Return what the device reports of a prompt."""
    return [[], *([TokenLogprob(token_id, -1.0, 1)] for token_id in prompt[1:])]


class World:
    """One scheduler with its fake device and connector; accounts for every request."""

    def __init__(
        self,
        config: EngineConfig,
        kv_groups: tuple[KVGroup, ...],
        max_model_len: int,
        chunk_alignment: int = 1,
        tokens_per_pass: int = 1,
        kv_tokens_per_pass: int = 1,
    ) -> None:
        self.config = config
        self.tokens_per_pass = tokens_per_pass
        self.kv_tokens_per_pass = kv_tokens_per_pass
        # A sequence of this length still gets tokens.
        self.longest = max_model_len - tokens_per_pass
        self.chunk_alignment = chunk_alignment
        self.kv_groups = kv_groups
        block_sizes = [kv_group.block_size for kv_group in kv_groups]
        self.connector = FakeConnector(*block_sizes, kv_groups=kv_groups)
        self.scheduler = Scheduler(
            config,
            kv_groups=kv_groups,
            prefix_cache_key=PREFIX_CACHE_KEY,
            max_model_len=max_model_len,
            eos_token_ids=frozenset({EOS}),
            connector=self.connector,
            chunk_alignment=chunk_alignment,
            tokens_per_pass=tokens_per_pass,
            kv_tokens_per_pass=kv_tokens_per_pass,
        )
        # What is kept longer than it must be would hide what is freed too early.
        self.scheduler._kv._num_kept_tokens = 0
        if config.speculative_config is not None:
            # Whatever drafts cost, steps with all numbers of them are planned.
            limits = mock.patch.object(self.scheduler._draft_control, "limit", self._draft_limit)
            limits.start()
        self.batch = PersistentBatch(config.max_batch_size, max_model_len, block_sizes)
        # By KV group, lane, block and position in it; a state has position 0.
        self.kv: dict[tuple[int, int, int, int], Prefix] = {}
        # Slots whose rows the device knows.
        self.known_slots: set[int] = set()
        # Of them: those whose prompt's log probabilities are reported.
        self.asked_slots: set[int] = set()
        # By slot: drafts that the device holds.
        self.num_drafts: dict[int, int] = {}
        self.dice = random.Random(0)
        self.now_s = 0.0
        # Grammars that the worker compiles.
        self.compiling: dict[StructuredOutputs, None] = {}
        self.num_accepted = 0
        self.ended: Counter[tuple[str, int]] = Counter()
        self.outputs: dict[tuple[str, int], list[int]] = {}

    # --- the device ----------------------------------------------------------------------------

    def places(
        self, lane: int, tables: Tables, positions: Iterable[int], seen_from: int = 0
    ) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
        """Yield the places of these positions' KV, in every KV group with a window that has them.

        The window is that of the token at `seen_from`. Of a state it is the token before.
        """
        windows = [2 if g.spec.kind == "state" else g.spec.window for g in self.kv_groups]
        firsts = [max(seen_from + 1 - (window or seen_from + 1), 0) for window in windows]
        for position in positions:
            for i, (kv_group, table) in enumerate(zip(self.kv_groups, tables, strict=True)):
                if position < firsts[i]:
                    continue
                number, offset = divmod(position, kv_group.block_size)
                offset = 0 if kv_group.spec.kind == "state" else offset
                yield position, (i, lane, table[number], offset)

    def write(
        self, lane: int, tables: Tables, tokens: Prefix, start: int, firsts: Iterable[int] = ()
    ) -> None:
        """Write the KV of tokens `start` and later of a sequence.

        Of each KV group at most those from its entry of `firsts` on.
        """
        firsts = list(firsts)
        for position, place in self.places(lane, tables, range(start, len(tokens))):
            kv_group, _, block, _ = place
            if firsts and position < firsts[kv_group]:
                continue
            pool = self.scheduler._kv._pools[lane][kv_group]
            holders, is_indexed = pool._ref_counts[block], pool._hashes[block] is not None
            assert (holders, is_indexed) == (1, False), f"a write to block {block} of others"
            self.kv[place] = tokens[: position + 1]

    def assert_holds(self, lane: int, tables: Tables, tokens: Prefix) -> None:
        """The KV of the tokens that the next one sees is where the block tables say."""
        for position, place in self.places(lane, tables, range(len(tokens)), len(tokens)):
            assert self.kv.get(place) == tokens[: position + 1], f"wrong KV at {place}"

    def run(self, batch: ScheduledBatch, sample: Callable[[], int]) -> StepResult:
        """Run a step as the model runner does, with the recorded KV."""
        assert sum(batch.num_scheduled_tokens) <= self.config.max_num_batched_tokens
        assert len(set(batch.slots)) == len(batch.slots) > 0
        assert all(count > 0 for count in batch.num_scheduled_tokens)
        assert {s.slot for s in batch.new} <= set(batch.slots)
        if batch.kind == "decode":
            assert set(batch.num_scheduled_tokens) == {1}
        self.batch.apply(batch)
        self.known_slots -= set(batch.gone)
        new_slots = {row.slot for row in batch.new}
        assert not new_slots & self.known_slots, "a row is replaced before it has left"
        self.known_slots |= new_slots
        asked = {row.slot for row in batch.new if row.sampling.prompt_logprobs is not None}
        self.asked_slots = (self.asked_slots - new_slots) | asked
        assert self.known_slots >= set(batch.slots), "a row that has left runs"
        by_slot = {s.place.slot: s for s in self.scheduler.table.rows}
        runs, of_prompts = [], []
        for row, (slot, count) in enumerate(
            zip(batch.slots, batch.num_scheduled_tokens, strict=True)
        ):
            seq, start = by_slot[slot], int(self.batch.num_computed_tokens[slot])
            end = start + count
            # The device may write this far, whatever it gives.
            most = end - 1 + self.kv_tokens_per_pass
            most = max(end, min(most, self.longest + self.tokens_per_pass))
            tables = [
                self.batch.block_table[i, slot, : kv_group.table_length(most)].tolist()
                for i, kv_group in enumerate(self.kv_groups)
            ]
            tokens = tuple(self.batch.token_ids[slot, :end].tolist())
            drafts = list(tokens[seq.num_tokens :])
            assert tokens == (*seq.token_ids[:end], *drafts)
            if drafts:
                assert seq in self.scheduler.table.decode_rows.sequences
                assert len(drafts) <= self.num_drafts.get(slot, 0)
                assert end < self.scheduler._end_rules.longest(seq)
                assert not batch.new
            for kv_group, table, block_ids in zip(
                self.kv_groups, tables, seq.place.block_ids, strict=True
            ):
                # The device may know blocks behind the window that are not the sequence's any more.
                first = kv_group.first_block_seen(start)
                assert table[first:] == block_ids[first : len(table)]
                assert 0 not in table[first:]
                transfer = self.connector.transfers.get(seq.request_id)
                if transfer is None or not transfer.lent:
                    behind = block_ids[: max(first - 1, 0)]
                    assert not any(behind), "a block behind the window is held"
            # Decoding rows that are planned together may get so many tokens more.
            assert seq.num_computed_tokens - end in {0, self.tokens_per_pass - 1}
            assert slot // self.config.slots_per_group == seq.place.dp_group
            self.assert_holds(seq.place.dp_group, tables, tokens[:start])
            self.write(seq.place.dp_group, tables, tokens, start)
            samples = end >= seq.num_tokens
            assert samples or end % self.chunk_alignment == 0, "a chunk ends inside a block"
            num_logits = self.batch.num_logits(np.array([slot]), np.array([count]))[0]
            assert num_logits == (len(drafts) + 1 if samples else 0)
            run = list(self._draw(drafts, sample)) if samples else []
            self.write(seq.place.dp_group, tables, (*tokens, *run[len(drafts) : -1]), end)
            assert end + len(run) - len(drafts) <= self.longest + self.tokens_per_pass
            runs.append(run)
            if slot in self.asked_slots and start < seq.num_prompt_tokens:
                found = prompt_logprobs(seq.request.prompt_token_ids)
                of_prompts.append(RowLogprobs(row, found[start + (start > 0) : end + 1]))
        self._record(np.array(batch.slots), np.array(batch.num_scheduled_tokens), runs)
        result = result_of(runs, self._propose(batch, runs))
        return msgspec.structs.replace(result, prompt_logprobs=of_prompts)

    def _draft_limit(self, num_rows: int, *, has_drafts: bool) -> int:
        return self.dice.choice([0, 1, 4, 4])

    def _draw(self, drafts: list[int], sample: Callable[[], int]) -> Iterator[int]:
        """Yield a token for each right draft, and one or as many as a pass may give."""
        for draft in [*drafts, None]:
            token_id = sample()
            yield token_id
            if token_id != draft:
                break
        for _ in range(self.dice.randint(0, self.tokens_per_pass - 1)):
            yield sample()

    def _record(self, slots: npt.NDArray, counts: npt.NDArray, runs: list[list[int]]) -> None:
        places = self.batch.num_tokens[slots]
        num_logits = self.batch.num_logits(slots, counts)
        self.batch.advance(slots, counts, num_logits)
        lengths = np.array([len(run) for run in runs])
        other = lengths != num_logits
        self.batch.give_back(slots[other], (num_logits - lengths)[other])
        for place, slot, run in zip(places, slots, runs, strict=True):
            at = np.arange(place, place + len(run))
            self.batch.record(np.full(len(run), slot), at, np.array(run, np.int64))

    def _propose(self, batch: ScheduledBatch, runs: list[list[int]]) -> list[int]:
        """Return how many drafts the device holds for each row."""
        self.num_drafts = {}
        for slot, run in zip(batch.slots, runs, strict=True):
            start = int(self.batch.num_tokens[slot])
            most = min(batch.max_drafts, self.batch.max_model_len - 1 - start)
            drafts = self.dice.choices([1, 2, 3], [4, 2, 1], k=self.dice.randint(0, max(most, 0)))
            if run and drafts:
                self.num_drafts[slot] = len(drafts)
                self.batch.put_drafts(slot, start, drafts)
        return [self.num_drafts.get(slot, 0) for slot in batch.slots] if self.num_drafts else []

    # --- the engine core -----------------------------------------------------------------------

    def step(self, sample: Callable[[], int]) -> bool:
        """Schedule, run, update; returns whether anything ran."""
        # A peer's chunks may land until the transfer has ended, wanted or not.
        for transfer in self.connector.transfers.values():
            if transfer.block_ids and transfer.is_load:
                self._receive(transfer)
        before = {seq: seq.num_preemptions for seq in self.scheduler.table}
        queued = list(self.scheduler.table.queue)
        batch = self.scheduler.schedule()
        self._check_priorities(before, queued)
        self._check_partial_prefills(batch)
        if batch is None:
            assert self.scheduler.schedule() is None, "a step that was possible was put off"
            if self._is_undisturbed():
                stuck = "nothing runs, and nothing would change that"
                assert len(self.scheduler.table.queue) == 0, stuck
                assert not any(g.num_running for g in self.scheduler.group_snapshots()), stuck
            return False
        for seq, num_tokens in self.scheduler.progress(batch):
            transfer = self.connector.transfers.get(seq.request_id)
            if transfer is not None and not transfer.lent:
                transfer.num_saved_tokens = num_tokens
        outputs = self.scheduler.update(batch, self.run(batch, sample))
        for row, (seq, run) in enumerate(zip(outputs.sequences, outputs.runs(), strict=True)):
            known = self.outputs[key_of(seq)]
            assert key_of(seq) not in self.ended
            assert seq.num_output_tokens - len(run) == len(known)
            known.extend(run)
            is_asked = seq.sampling.prompt_logprobs is not None and seq.num_output_tokens == len(
                run
            )
            wanted = prompt_logprobs(seq.request.prompt_token_ids) if is_asked else None
            assert outputs.prompt_logprobs.get(seq) == wanted
            end = outputs.ends.get(row)
            if end is not None or seq.mode == "prefill":
                self.ended[key_of(seq)] += 1
            assert (self.scheduler.table.get(*key_of(seq)) is None) == (key_of(seq) in self.ended)
            limit = seq.request.sampling.max_tokens
            assert len(known) <= limit
            assert end is not None or len(known) < limit
        return True

    def _check_priorities(self, before: dict[Sequence, int], queued: SequenceOf[Sequence]) -> None:
        """No row that a step has let in, or kept, is worse than one that lacks its place.

        Args:
            before: The sequences before the step was planned, with their preemptions.
            queued: Those of them that were queued, in order.
        """
        if self.config.scheduling_policy != "priority":
            return
        table = self.scheduler.table
        assert queued == sorted(queued, key=lambda s: s.rank)
        admitted = [s for s in queued if s.phase is not Phase.WAITING]
        for seq in queued:
            limits = self.scheduler._partial_limits
            may_wait = limits is not None and seq.num_tokens > limits.threshold
            is_left = seq.phase is Phase.WAITING and not may_wait
            if is_left and not self.scheduler._is_undecided(seq):
                worse = [s for s in admitted if s.rank > seq.rank]
                assert not worse or seq.place.dp_group >= 0
                assert all(s.place.dp_group != seq.place.dp_group for s in worse)
        for seq in table:
            if seq.num_preemptions > before[seq]:
                rows = [s for s in table.rows if s.place.dp_group == seq.place.dp_group]
                assert all(s.rank <= seq.rank for s in rows), "another row was the worst"

    def _check_partial_prefills(self, batch: ScheduledBatch | None) -> None:
        """Few prompts of a step are computed in part, and long ones leave room for others."""
        limits = self.scheduler._partial_limits
        if batch is None or limits is None:
            return
        by_slot = {s.place.slot: s for s in self.scheduler.table.rows}
        shares = []
        for slot, count in zip(batch.slots, batch.num_scheduled_tokens, strict=True):
            seq = by_slot[slot]
            # Drafts and tokens that are not known yet are progress, too.
            left = count + max(seq.num_tokens - seq.num_computed_tokens, 0)
            shares.append((left, count))
        parts = [left for left, count in shares if count < left]
        assert len(parts) <= limits.max_num
        assert sum(left > limits.threshold for left in parts) <= limits.max_num_long
        if len(shares) > 1 and max(batch.num_scheduled_tokens) > 1 and not self.num_drafts:
            assert max(batch.num_scheduled_tokens) <= limits.max_chunk

    def end_transfer(self, request_id: str, *, ok: bool, num_verified: int = 0) -> None:
        """End a request's transfer as the core does.

        Args:
            request_id: The request.
            ok: Whether its KV was delivered.
            num_verified: Of a load that failed: leading tokens that are here all the same.
        """
        transfer = self.connector.transfers.pop(request_id)
        cancelled = request_id in self.connector.cancelled
        self.connector.cancelled.discard(request_id)
        if transfer.is_load:
            # A load from the store has no blocks until the store has answered.
            if ok and transfer.block_ids:
                self._receive(transfer)
                self._count_ended(self.scheduler.kv_ended(request_id, None, 0.0))
            else:
                self._spoil(transfer, num_verified)
                self._fail(request_id, num_verified)
            return
        held = self.scheduler.table.held.get(request_id)
        if ok and held is not None and not cancelled and not transfer.lent:
            # The consumer was promised the prompt's KV: it must still have been there.
            prompt = tuple(held.request.prompt_token_ids)
            self.assert_holds(held.place.dp_group, held.place.block_ids, prompt)
        if ok:
            self.scheduler.release_held(request_id)
        else:
            self._fail(request_id, 0)

    def _fail(self, request_id: str, num_tokens: int) -> None:
        self.connector.pool.pop(request_id, None)
        failure = Failure(FailureReason.STALLED, num_tokens)
        self._count_ended(self.scheduler.kv_ended(request_id, failure, self.now_s))

    def activate(self, request_id: str, token_ids: list[int]) -> None:
        """Activate a request as the core does for a client, with some more tokens than before."""
        choices = self.scheduler.table.choices(request_id)
        lists = [[] for _ in range(choices[0].request.sampling.n)]
        for seq in choices:
            lists[seq.choice] = [*seq.token_ids[seq.num_prompt_tokens :], *token_ids]
            self.outputs[key_of(seq)] = list(lists[seq.choice])
        self._count_ended(self.scheduler.activate(request_id, lists, self.now_s))

    def _count_ended(self, seq: Sequence | None) -> None:
        """Take note of a request that a failure ended, if it did."""
        if seq is not None and seq.is_over:
            assert self.config.kv_load_failure_policy == "fail"
            assert seq.num_output_tokens
            self._end_all(seq.request_id)

    def accept(self, seq: Sequence, siblings: SequenceOf[Sequence]) -> None:
        """Take note of a new request."""
        for each in (seq, *siblings):
            self.num_accepted += 1
            self.outputs[key_of(each)] = each.token_ids[each.num_prompt_tokens :]

    def _end_all(self, request_id: str) -> None:
        """Take note of a request all of whose choices have ended."""
        assert not self.scheduler.table.choices(request_id)
        for key in self.outputs:
            if key[0] == request_id:
                self.ended[key] = 1

    def expire(self, now_s: float) -> None:
        """Let time pass."""
        self.now_s = now_s
        for seq in self.scheduler.expire(now_s):
            self._end_all(seq.request_id)

    def prepare(self, results: Iterable[Prepared] = ()) -> None:
        """Order grammars and apply the worker's results, as the core does before a step."""
        for order in self.scheduler.preparations.take_orders(self.now_s):
            if order.is_wanted:
                self.compiling[order.grammar] = None
        results = list(results)
        for result in results:
            del self.compiling[result.grammar]
        for seq, _ in self.scheduler.end_preparations(results, self.now_s):
            self._end_all(seq.request_id)

    def abort(self, request_id: str) -> None:
        """Drop a request, wherever it is."""
        for seq in self.scheduler.table.choices(request_id):
            self.ended[key_of(seq)] += 1
        self.scheduler.abort(request_id)

    def abort_choice(self, key: tuple[str, int]) -> None:
        """Drop one choice of a request, wherever it is."""
        self.ended[key] += self.scheduler.table.get(*key) is not None
        self.ended = +self.ended
        self.scheduler.abort_choice(*key, "stop")

    def finish_everything(self, sample: Callable[[], int]) -> None:
        """No new work: peers answer, clients activate, and a bounded number of steps ends it."""
        live = list(self.scheduler.table)
        for request_id, found in self.connector.pool.items():
            self.connector.pool[request_id] = found or 0
        for request_id in list(self.scheduler.loads.not_activated):
            self.activate(request_id, [])
        # Each preemption lets another sequence run, which then never waits for the preempted one.
        steps = sum(s.num_tokens + s.request.sampling.max_tokens for s in live)
        for _ in range(10 + steps * (len(live) + 1)):
            for request_id in list(self.connector.transfers):
                self.end_transfer(request_id, ok=request_id not in self.connector.cancelled)
            self.prepare()
            self.prepare([Prepared(grammar) for grammar in self.compiling])
            self.check()
            ran = self.step(sample)
            # More grammars than there are threads are compiled one after the other.
            if not (ran or self.connector.transfers or self.scheduler.preparations.waiting):
                break
        assert self.scheduler.table.num_live == 0, f"not finished: {self.scheduler!r}"
        self.check()
        empty = self.config.slots_per_group
        free = [kv_group.num_usable_blocks for kv_group in self.kv_groups]
        for group in self.scheduler.group_snapshots():
            assert (group.num_empty_slots, group.num_free_blocks) == (empty, free)
            assert (group.num_running, group.num_reserved) == (0, 0)
        assert (len(self.scheduler.table.queue), self.scheduler.table.queue.num_tokens) == (0, 0)
        assert set(self.ended.values()) <= {1}, self.ended
        assert len(self.ended) == self.num_accepted
        counted = sum(sum(g.requests_finished.values()) for g in self.scheduler.group_counters())
        assert counted == self.num_accepted

    def check(self) -> None:
        """The scheduler's own invariants, and reference counts against the holders."""
        self.scheduler.check_invariants()
        holders = [*self.scheduler.table, *self.scheduler.table.held.values()]
        for group, pools in enumerate(self.scheduler._kv._pools):
            tables = [
                s.place.block_ids
                for s in holders
                if s.place.dp_group == group and s.place.block_ids
            ]
            for i, (kv_group, pool) in enumerate(zip(self.kv_groups, pools, strict=True)):
                # A state is in several entries of a table.
                ids = ({*t[i]} if kv_group.spec.kind == "state" else t[i] for t in tables)
                counts = Counter(b for table in ids for b in table if b)
                assert pool._ref_counts == [counts[b] for b in range(kv_group.num_blocks)]
        self._check_loads()
        for transfer in self.connector.transfers.values():
            if transfer.lent and transfer.request_id not in self.connector.cancelled:
                # Whether it runs or has ended: the consumer may read it at any time.
                self.assert_holds(transfer.lane, transfer.block_ids, transfer.lent)

    def _first_new(self, seq: Sequence) -> int:
        """The first token that a sequence will compute; queued choices share full blocks."""
        if seq.phase is not Phase.WAITING or seq.parent is None:
            return seq.num_computed_tokens
        multiple = lcm(*(kv_group.block_size for kv_group in self.kv_groups))
        return min(seq.num_prompt_tokens, seq.num_tokens - 1) // multiple * multiple

    def _check_loads(self) -> None:
        """Check that each group's work in snapshots is what its sequences lack."""
        live = list(self.scheduler.table)
        unplaced = [s for s in live if s.place.slot < 0 and s.place.dp_group < 0]
        groups = self.scheduler.group_snapshots()
        for group, told in enumerate(groups):
            own = [s for s in live if s.place.dp_group == group]
            contexts = [len(s.token_ids) for s in own if s.place.slot >= 0]
            longest = max(contexts, default=0)
            assert (told.num_context_tokens, told.max_context_tokens) == (sum(contexts), longest)
            prompts = [
                (self._first_new(s), s.num_tokens)
                for s in own
                if s.phase in (Phase.WAITING, Phase.PREFILL)
            ]
            shared = [(self._first_new(s), s.num_tokens) for s in unplaced]
            pairs, tokens = (
                (
                    sum(sum(range(start, end)) + (end - start) // 2 for start, end in spans)
                    for spans in (prompts, shared)
                ),
                (sum(end - start for start, end in spans) for spans in (prompts, shared)),
            )
            own_pairs, shared_pairs = pairs
            own_tokens, shared_tokens = tokens
            assert told.num_prompts == len(prompts) + -(-len(shared) // len(groups))
            assert told.num_prompt_tokens == own_tokens + -(-shared_tokens // len(groups))
            # Each token counts itself by half, which is rounded for each sequence.
            most = own_pairs + shared_pairs / len(groups) + len(live) + 1
            assert own_pairs <= told.num_prompt_pairs <= most

    def _is_undisturbed(self) -> bool:
        """Whether only waiting and running sequences hold anything, and the store has answered."""
        reserved = any(g.num_reserved for g in self.scheduler.group_snapshots())
        reserved |= bool(self.scheduler.loads.not_activated)
        awaits = self.scheduler.awaits_connector or self.scheduler.preparations.waiting
        return not (reserved or awaits or self.connector.transfers)

    def _receive(self, transfer: FakeTransfer) -> None:
        tokens = self._known[transfer.request_id][: transfer.num_tokens]
        firsts = [g.first_position_moved(transfer.num_tokens) for g in self.kv_groups]
        self.write(transfer.lane, transfer.block_ids, tokens, transfer.start, firsts)

    def _spoil(self, transfer: FakeTransfer, num_verified: int) -> None:
        """Write the verified tokens of a failed load, and garbage after them."""
        if num_verified:
            self._receive(transfer)
        start = max(transfer.start, num_verified)
        for i, (kv_group, table) in enumerate(
            zip(self.kv_groups, transfer.block_ids, strict=False)
        ):
            size = kv_group.block_size
            for position in range(start, len(table) * size):
                self.kv[i, transfer.lane, table[position // size], position % size] = ()

    @property
    def _known(self) -> dict[str, Prefix]:
        """Tokens of the sequences that the connector knows: a stream's KV is that of its output."""
        live = [*self.scheduler.table, *self.scheduler.table.held.values()]
        return {s.request_id: tuple(s.token_ids) for s in live if not s.choice}
