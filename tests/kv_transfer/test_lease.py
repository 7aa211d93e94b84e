"""Leases: every end is final, and no deadline is ever extended after it has passed."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_transfer.config import TransferConfig
from kv_transfer.lease import LeaseState, LeaseTable

CONFIG = TransferConfig(lease_s=30, renew_s=5, rendezvous_s=120)
ids = st.integers(0, 4).map(lambda n: bytes([n]) * 16)
ENDS = [LeaseState.DONE, LeaseState.EXPIRED, LeaseState.CANCELLED]


class LeaseMachine(RuleBasedStateMachine):
    """Drive a table beside a model: id -> (state, deadline)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(CONFIG)
        self.now_s = 0.0
        self.model: dict[bytes, tuple[LeaseState, float]] = {}

    def live(self, transfer_id: bytes) -> bool:
        state, deadline_s = self.model.get(transfer_id, (LeaseState.DONE, 0.0))
        return state not in ENDS and self.now_s < deadline_s

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.9, 29.9, 30.0, 119.9, 120.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(transfer_id=ids)
    def grant(self, transfer_id: bytes) -> None:
        is_new = transfer_id not in self.model
        assert self.table.grant(transfer_id, self.now_s) == is_new
        if is_new:
            self.model[transfer_id] = (LeaseState.WAITING, self.now_s + 120)

    @rule(transfer_id=ids)
    def attach(self, transfer_id: bytes) -> None:
        was_live = self.live(transfer_id)
        assert self.table.attach(transfer_id, self.now_s) == was_live
        if was_live:
            self.model[transfer_id] = (LeaseState.SERVING, self.now_s + 30)

    @rule(transfer_id=ids)
    def renew(self, transfer_id: bytes) -> None:
        was_live = self.live(transfer_id)
        assert self.table.renew(transfer_id, self.now_s) == was_live
        if was_live and self.model[transfer_id][0] is LeaseState.SERVING:
            self.model[transfer_id] = (LeaseState.SERVING, self.now_s + 30)

    @rule(transfer_id=ids, state=st.sampled_from(ENDS))
    def end(self, transfer_id: bytes, state: LeaseState) -> None:
        had_ended = self.model.get(transfer_id, (LeaseState.WAITING, 0))[0] in ENDS
        assert self.table.end_lease(transfer_id, state) != had_ended
        if not had_ended:
            self.model[transfer_id] = (state, 0.0)

    @rule()
    def expire(self) -> None:
        due = {
            tid
            for tid, (state, deadline_s) in self.model.items()
            if state not in ENDS and deadline_s <= self.now_s
        }
        assert set(self.table.expire(self.now_s)) == due
        self.model.update(dict.fromkeys(due, (LeaseState.EXPIRED, 0.0)))

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.table.check_invariants()
        for transfer_id, (state, deadline_s) in self.model.items():
            assert self.table.state(transfer_id) is state
            assert self.table.is_live(transfer_id, self.now_s) == self.live(transfer_id)
            left_s = max(0.0, deadline_s - self.now_s) if state not in ENDS else 0.0
            assert self.table.left_s(transfer_id, self.now_s) == left_s
        live = [deadline for state, deadline in self.model.values() if state not in ENDS]
        assert self.table.next_deadline_s() == min(live, default=None)


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(stateful_step_count=30)


def test_the_memory_of_ended_leases_is_bounded() -> None:
    table = LeaseTable(CONFIG)
    for n in range(10_000):
        table.end_lease(n.to_bytes(16, "big"), LeaseState.DONE)
    table.check_invariants()
