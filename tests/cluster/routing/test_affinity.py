"""A session has the same home on every ingress, and keeps it when other places change."""

import subprocess
import sys
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.affinity import affinities, place_keys
from cluster.routing.placement import Placement

PLACES = [Placement(f"e{i}", group) for i in range(8) for group in range(2)]
SESSIONS = [f"session {i}" for i in range(4000)]


def home(session, places):
    return places[int(np.argmax(affinities(session, place_keys(places))))]


@given(st.text(), st.permutations(PLACES), st.integers(0, len(PLACES) - 1))
def test_a_session_moves_only_when_its_own_place_goes(session, places, gone):
    old = home(session, PLACES)
    assert home(session, places) == old, "whatever their order"
    left = places[:gone] + places[gone + 1 :]
    assert (home(session, left) == old) == (places[gone] != old)


def test_sessions_are_spread_evenly():
    homes = Counter(home(session, PLACES) for session in SESSIONS)
    mean = len(SESSIONS) / len(PLACES)
    # Four standard deviations of a fair draw.
    assert all(abs(count - mean) < 4 * mean**0.5 for count in homes.values())
    assert len(homes) == len(PLACES)


def test_the_sessions_of_a_place_that_goes_are_spread_over_all_others():
    moved = [s for s in SESSIONS if home(s, PLACES) == PLACES[0]]
    homes = Counter(home(session, PLACES[1:]) for session in moved)
    assert len(homes) == len(PLACES) - 1
    assert max(homes.values()) < 0.2 * len(moved)


def test_every_process_finds_the_same_home():
    code = (
        "from tests.cluster.routing.test_affinity import PLACES, SESSIONS, home\n"
        "print([PLACES.index(home(s, PLACES)) for s in SESSIONS[:20]])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([PLACES.index(home(s, PLACES)) for s in SESSIONS[:20]])
