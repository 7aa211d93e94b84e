"""The phases of a sequence's life: a table, which every change of phase is checked against."""

import itertools

import pytest

from replicas.engine.sequence import TRANSITIONS, Phase, transition
from tests.replicas.engine.fakes import make_sequence


@pytest.mark.parametrize(("phase", "following"), [*itertools.product(Phase, Phase)])
def test_a_phase_is_followed_by_those_of_the_table_alone(phase, following):
    seq = make_sequence("a", [1])
    seq.phase = phase
    if following in TRANSITIONS[phase]:
        transition(seq, following)
        assert seq.phase is following
    else:
        with pytest.raises(AssertionError, match=f"a: from {phase} to {following}"):
            transition(seq, following)
        assert seq.phase is phase


@pytest.mark.parametrize(
    ("mode", "first"),
    [("local", Phase.WAITING), ("prefill", Phase.WAITING), ("decode", Phase.RESERVED)],
)
def test_every_phase_leads_to_the_end_from_the_first_of_a_mode(mode, first):
    assert make_sequence("a", [1], mode=mode).phase is first
    ends = {Phase.ENDED}
    for _ in Phase:
        ends |= {phase for phase, following in TRANSITIONS.items() if following & ends}
    assert ends == set(Phase)
    assert not TRANSITIONS[Phase.ENDED]
    assert all(phase not in following for phase, following in TRANSITIONS.items())


def test_running_and_over_are_two_phases_each():
    running, over = {Phase.PREFILL, Phase.DECODE}, {Phase.LEAVING, Phase.ENDED}
    seq = make_sequence("a", [1])
    for phase in Phase:
        seq.phase = phase
        assert seq.is_running == (phase in running)
        assert seq.is_over == (phase in over)


def test_a_sequence_shows_counts_and_no_tokens():
    seq = make_sequence("r", [4711] * 3, output=[4712])
    assert repr(seq) == "Sequence('r', choice=0, waiting, prompt=3, tokens=4, computed=0)"
