"""Who may take another role, over every cluster of a few engines."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scaling.flip import (
    BusyReplicaError,
    FixedRoleError,
    FlipError,
    LastOfRoleError,
    RoleStatus,
    UnknownReplicaError,
    check_drain,
    check_flip,
    other_role,
)


def role_status(replica, role, next_role=None, **changes):
    return RoleStatus(replica=replica, role=role, next_role=next_role or role, **changes)


CLUSTER = [role_status("p0", "prefill"), role_status("p1", "prefill"), role_status("d0", "decode")]


def test_one_of_two_engines_of_a_role_may_change():
    check_flip(CLUSTER, "p0", "decode")


@pytest.mark.parametrize(
    "others",
    [[], [role_status("d1", "decode", "prefill")], [role_status("p2", "prefill", "decode")]],
    ids=["no other", "one that leaves the role", "one that will have the role"],
)
def test_the_last_engine_of_a_role_may_not_change_and_the_error_says_what_to_do(others):
    with pytest.raises(LastOfRoleError, match="start another replica of pool decode"):
        check_flip([*CLUSTER, *others], "d0", "prefill")


def test_a_change_may_be_reverted():
    check_flip([role_status("d0", "decode", "prefill")], "d0", "decode")


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"has_connector": False}, "set kv_connector"),
        ({"in_gang": True}, "change the `replicas` of the pools"),
        ({"is_scaled": True}, "remove max_replicas"),
        ({"role": "both", "next_role": "both"}, "between prefill and decode"),
    ],
)
def test_an_engine_with_a_fixed_role_may_not_change(changes, advice):
    engines = [msgspec.structs.replace(CLUSTER[0], **changes), *CLUSTER[1:]]
    with pytest.raises(FixedRoleError, match=re.escape(advice)):
        check_flip(engines, "p0", "decode")


def test_an_unknown_name_is_refused_with_the_known_names():
    with pytest.raises(UnknownReplicaError, match="d0, p0, p1"):
        check_flip(CLUSTER, "p9", "decode")


@pytest.mark.parametrize(
    ("drained", "others", "error", "advice"),
    [
        (role_status("p0", "prefill"), CLUSTER[1:], None, ""),
        (role_status("p0", "prefill", is_draining=True), CLUSTER[2:], None, ""),
        (role_status("p0", "prefill"), CLUSTER[2:], LastOfRoleError, "one that has role decode"),
        (
            role_status("p0", "prefill"),
            [role_status("p1", "prefill", is_draining=True)],
            LastOfRoleError,
            "start another replica of pool prefill",
        ),
        (
            role_status("p0", "both"),
            [],
            LastOfRoleError,
            "start another replica of pool both, then",
        ),
        (role_status("p0", "prefill", "decode"), CLUSTER[1:], BusyReplicaError, "wait for the end"),
        (
            role_status("p0", "prefill", in_gang=True),
            CLUSTER[1:],
            FixedRoleError,
            "a rank of a gang",
        ),
        (role_status("p9", "prefill"), CLUSTER[1:], UnknownReplicaError, "d0, p1, p9"),
    ],
)
def test_an_engine_may_be_drained_while_another_one_keeps_its_role(drained, others, error, advice):
    def check():
        check_drain([drained, *others], "p0")

    if error is None:
        check()
    else:
        with pytest.raises(error, match=re.escape(advice)):
            check()


def test_a_drained_engine_does_not_change_its_role():
    engines = [*CLUSTER, role_status("p2", "prefill", is_draining=True)]
    with pytest.raises(BusyReplicaError, match="undrain it first"):
        check_flip(engines, "p2", "decode")
    with pytest.raises(LastOfRoleError):
        check_flip([engines[0], *engines[2:]], "p0", "decode")


roles = st.sampled_from(["prefill", "decode"])


@given(
    st.lists(roles, min_size=2, max_size=5), st.lists(st.tuples(st.integers(0, 4), st.booleans()))
)
def test_no_order_of_changes_leaves_a_role_without_an_engine(first, orders):
    engines = [role_status(f"e{i}", role) for i, role in enumerate(first)]
    had = {role for role in ("prefill", "decode") if any(e.keeps == role for e in engines)}
    for which, settles in orders:
        engine = engines[which % len(engines)]
        if settles:
            changed = msgspec.structs.replace(engine, role=engine.next_role)
        else:
            role = other_role(engine.next_role)
            try:
                check_flip(engines, engine.replica, role)
            except FlipError:
                continue
            changed = msgspec.structs.replace(engine, next_role=role)
        engines[which % len(engines)] = changed
        assert {e.keeps for e in engines} >= had
