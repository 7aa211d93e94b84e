"""KV that sequences load from elsewhere.

`KVLoads` owns the set of sequences that wait for KV, and every sequence's `KVLoad`, on the engine's
core thread. A state machine without clock or bytes: it gets events from clients and connector, and
returns how a sequence continues (`Verdict`). The scheduler allocates and frees slots and blocks,
counts progress, and changes phases.

A sequence gets here in one of two ways:

- RESERVED: a client has reserved a place, names tickets of the engine that computes the prompt, and
activates the request. The sequence starts once that is done and no transfer is under way.
- LOADING: it came from the queue, and the connector can load KV for it. It starts when that
transfer has ended, successfully or not.

Choice 0 of a request has the reserved place, but the activation is that of the request: it brings
the client's tokens of every choice. Until then no choice may run, even if choice 0 is dropped. A
request that is not activated in time lapses with all of its choices.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from kv_transfer.errors import TransferError
from replicas.engine.sequence import KVLoad, Phase

if TYPE_CHECKING:
    from kv_transfer.connector import Failure, KVConnectorScheduler
    from replicas.config import EngineConfig
    from replicas.engine.kv_cache import KVCacheManager
    from replicas.engine.sequence import Sequence

_NO_TICKET = "no_ticket"
"""Failure of a request that was activated as if its KV had come, but had no usable ticket."""


def failure_word(error: TransferError) -> str:
    """Return a word for the reason why the connector cannot use a ticket.

    Not the error's text, because the word becomes a metric's label.
    """
    return error.reason.value if error.reason is not None else "bad_ticket"


class Verdict(Enum):
    """Decision on a sequence that has waited for KV."""

    WAIT = "wait"
    RUN = "run"
    FAIL = "fail"
    """Its KV did not come and must not be computed here."""


class KVLoads:
    """The sequences that wait for KV, and the state of their loads.

    Args:
        config: The engine's configuration.
        kv: The KV cache that is loaded into.
        connector: Scheduler side of the KV connector, if the engine has one.
        resumes_prefill: Whether a prompt can be computed from its middle on.

    Attributes:
        reserved: By request id: the sequences that have reserved a place.
        asking: By request id: the queued or reserved sequences for which the connector has no
            answer yet.
        not_activated: By request id: when a reserved request lapses that is neither activated nor
            over. None of its choices may run.
        num_recompute_tokens: Prompt tokens that are computed here because their KV did not come.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheManager,
        connector: KVConnectorScheduler | None,
        *,
        resumes_prefill: bool,
    ) -> None:
        self._config = config
        self._kv = kv
        self._connector = connector
        self._resumes_prefill = resumes_prefill
        self.reserved: dict[str, Sequence] = {}
        self.asking: dict[str, Sequence] = {}
        self._loading: dict[str, Sequence] = {}
        self.not_activated: dict[str, float] = {}
        self.num_recompute_tokens = 0

    def __repr__(self) -> str:
        return f"KVLoads(loading={len(self._loading)}, reserved={len(self.reserved)})"

    # --- reservations --------------------------------------------------------------------------

    def reserve(self, seq: Sequence, now_s: float) -> None:
        """Add a sequence with slot and blocks whose prompt is computed elsewhere."""
        assert seq.phase is Phase.RESERVED, f"{seq.request_id} is {seq.phase}"
        seq.load = KVLoad()
        self.reserved[seq.request_id] = seq
        self.not_activated[seq.request_id] = now_s + self._config.reservation_timeout_s

    def load(self, request_id: str, ticket: bytes, epoch: int, now_s: float) -> None:
        """Start fetching a reserved sequence's KV, or cancel the transfer under way first.

        Unknown ids, and sequences that no longer wait for KV, are ignored.

        Args:
            request_id: The reserved sequence.
            ticket: A sealed ticket.
            epoch: The client's number for it.
            now_s: Monotonic clock.

        Raises:
            TransferError: The connector cannot use the ticket; the reservation stands.
        """
        seq = self.reserved.get(request_id)
        if seq is None or seq.transfer is None or self._connector is None:
            return
        load = _load_of(seq)
        if load.is_under_way:
            load.next = (ticket, epoch)
            self._connector.cancel(request_id)
            return
        load.epoch = epoch
        try:
            self._connector.on_new_request(seq.transfer_with(ticket), now_s)
        except TransferError as error:
            load.failure = failure_word(error)
            raise
        load.failure = None
        load.is_under_way = load.is_announced = True
        self._ask(self._connector, seq)

    def activate(self, request_id: str, now_s: float, *, has_tokens: bool) -> Sequence | None:
        """Let the choices of a request start, and return choice 0 unless it was dropped.

        A sequence that was reserved with tokens has been decoded elsewhere meanwhile. If its KV is
        still under way, the transfer is cancelled, and the sequence continues with the KV that has
        arrived.

        Args:
            request_id: A request that awaits its activation; its choices do not have the client's
                new tokens yet.
            now_s: Monotonic clock.
            has_tokens: Whether the client has output tokens of choice 0.
        """
        del self.not_activated[request_id]
        seq = self.reserved.get(request_id)
        if seq is None:
            return None
        load = _load_of(seq)
        had_tokens = seq.num_output_tokens > 0
        if self._connector is not None and seq.transfer is not None:
            if load.is_under_way and (had_tokens or not has_tokens):
                self._connector.cancel(request_id)
            elif not load.is_announced:
                # No KV comes, but the connector may store the KV that is computed here.
                self._connector.on_new_request(seq.transfer, now_s)
        return seq

    def try_next_ticket(self, seq: Sequence, now_s: float) -> bool:
        """Load with the ticket that replaces a failed one; return False if that is not possible."""
        load = _load_of(seq)
        next_load, load.next = load.next, None
        if next_load is None or seq.request_id not in self.not_activated:
            return False
        try:
            self.load(seq.request_id, *next_load, now_s)
        except TransferError:
            return False
        return True

    def lapsed(self, now_s: float) -> list[str]:
        """Return the ids of the requests that were not activated in time."""
        return [i for i, lapses_s in self.not_activated.items() if now_s >= lapses_s]

    def next_deadline_s(self) -> float | None:
        """Return when the next reservation lapses; None if there is none."""
        return min(self.not_activated.values(), default=None)

    # --- sequences from the queue ---------------------------------------------------------------

    def is_asking(self, seq: Sequence) -> bool:
        """Return whether the connector had no answer yet when last asked about a sequence."""
        return self.asking.get(seq.request_id) is seq

    def num_external(self, seq: Sequence, num_local: int) -> int | None:
        """Return the tokens that the connector can load after `num_local`; None: not known yet."""
        if self._connector is None or seq.transfer is None or not self._resumes_prefill:
            return 0
        if not seq.request.sampling.reads_prefix_cache:
            return 0
        num_external, _ = self._connector.get_num_new_matched_tokens(seq.request_id, num_local)
        if num_external is None:
            self.asking[seq.request_id] = seq
        else:
            self.asking.pop(seq.request_id, None)
        return num_external

    def start(self, seq: Sequence, num_external: int) -> None:
        """Let the connector fill the first blocks of a sequence that has entered LOADING."""
        assert self._connector is not None
        end = seq.num_computed_tokens + num_external
        # A sequence that was handed over with tokens may load more than its prompt.
        assert end <= seq.num_tokens, f"{num_external=} of {seq.request_id}"
        seq.load = KVLoad(is_under_way=True, end=end)
        self._loading[seq.request_id] = seq
        self._connector.update_state_after_alloc(
            seq.request_id, seq.place.dp_group, seq.place.block_ids, num_external
        )

    # --- ends of loads --------------------------------------------------------------------------

    def ask_again(self) -> None:
        """Ask the connector again about reserved sequences for which it had no answer."""
        if self._connector is not None:
            for seq in list(self.asking.values()):
                if seq.phase is Phase.RESERVED:
                    self._ask(self._connector, seq)

    def end_load(self, seq: Sequence, failure: Failure | None) -> int:
        """End a load, and return the tokens whose KV is new here: the caller counts them.

        Args:
            seq: A sequence with a load under way.
            failure: Why the load is incomplete, with the number of tokens that did arrive; None if
                it is complete.
        """
        load = _load_of(seq)
        load.is_under_way = False
        self.asking.pop(seq.request_id, None)
        end = load.end
        if failure is None:
            load.next = None
        else:
            load.failure = failure.reason.value
            # Tokens beyond the requested ones do not count.
            end = min(failure.num_tokens, load.end)
        if failure is not None or end < seq.num_tokens - 1:
            # After a partial load, computation must start at a block boundary, as after a prefix
            # hit.
            end -= end % self._kv.block_multiple if self._resumes_prefill else end
        num_local = seq.num_computed_tokens
        if end <= num_local or not self._kv.is_served_by(num_local, load.end, end):
            return 0
        return end - num_local

    def verdict(self, seq: Sequence) -> Verdict:
        """Decide whether a sequence that waits for KV runs; if so, remove it here.

        A reserved sequence runs once it is activated and no transfer is under way. It fails if KV
        is missing and `kv_load_failure_policy` forbids to compute it here. KV is missing if the
        transfer failed, or if there was none although the client has tokens from another engine.
        A client without tokens has asked for the prompt to be computed here.
        """
        load = _load_of(seq)
        if load.is_under_way:
            return Verdict.WAIT
        if seq.phase is Phase.LOADING:
            self.num_recompute_tokens += load.end - seq.num_computed_tokens
            self.remove(seq)
            return Verdict.RUN
        if seq.request_id in self.not_activated:
            return Verdict.WAIT
        # After a successful load the tokens behind its end were never expected.
        is_whole = load.failure is None and load.end > 0
        num_missing = 0 if is_whole else seq.num_prompt_tokens - seq.num_computed_tokens
        if num_missing > 0 and seq.num_output_tokens and load.failure is None:
            load.failure = _NO_TICKET
        if num_missing > 0 and load.failure is not None:
            if self._config.kv_load_failure_policy == "fail" and seq.num_output_tokens:
                return Verdict.FAIL
            self.num_recompute_tokens += num_missing
        self.remove(seq)
        return Verdict.RUN

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence. Choices other than 0 are not known here."""
        if seq.parent is not None:
            return
        self.asking.pop(seq.request_id, None)
        self.reserved.pop(seq.request_id, None)
        self._loading.pop(seq.request_id, None)

    def end_request(self, request_id: str) -> None:
        """Remove a request of which no choice is left."""
        self.not_activated.pop(request_id, None)

    # --- views ---------------------------------------------------------------------------------

    @property
    def awaiting(self) -> list[Sequence]:
        """Return the sequences that hold slot and blocks and wait for KV."""
        return [*self.reserved.values(), *self._loading.values()]

    @property
    def awaits_connector(self) -> bool:
        """Return whether a sequence needs news from the connector to continue."""
        return bool(self._loading or self.asking)

    def check_invariants(self) -> None:
        """Assert that every sequence here has the state of its place."""
        for seq in self.awaiting:
            # Arriving KV must find its blocks, whatever else has been allocated meanwhile.
            assert seq.place.capacity >= seq.num_prompt_tokens
            expected = self.reserved if seq.phase is Phase.RESERVED else self._loading
            assert expected[seq.request_id] is seq
        for seq in self._loading.values():
            assert seq.phase is Phase.LOADING
            assert is_loading(seq)
            assert seq.num_computed_tokens < _load_of(seq).end <= seq.num_tokens
        for seq in self.asking.values():
            assert is_loading(seq) == (seq.phase is Phase.RESERVED)
            assert is_loading(seq) or seq.phase is Phase.WAITING

    def _ask(self, connector: KVConnectorScheduler, seq: Sequence) -> None:
        """Let the connector load for a reserved sequence; ask again later if it has no answer."""
        num_external, _ = connector.get_num_new_matched_tokens(
            seq.request_id, seq.num_computed_tokens
        )
        if num_external is None:
            self.asking[seq.request_id] = seq
            return
        self.asking.pop(seq.request_id, None)
        load = _load_of(seq)
        load.end = seq.num_computed_tokens
        if load.end + num_external > seq.num_tokens:
            # The KV of a longer, other prompt: the connector reports the load as cancelled.
            connector.cancel(seq.request_id)
            return
        load.end += num_external
        connector.update_state_after_alloc(
            seq.request_id, seq.place.dp_group, seq.place.block_ids, num_external
        )


def is_loading(seq: Sequence) -> bool:
    """Return whether a load of the sequence is under way."""
    return seq.load is not None and seq.load.is_under_way


def _load_of(seq: Sequence) -> KVLoad:
    assert seq.load is not None, f"{seq.request_id} waits for no KV"
    return seq.load
