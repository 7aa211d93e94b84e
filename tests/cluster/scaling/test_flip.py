"""Who may take another role, over every cluster of a few engines."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scaling.flip import (
    FixedRoleError,
    FlipError,
    LastOfRoleError,
    RoleStatus,
    UnknownReplicaError,
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
