"""Tokens that a client has, from any engines, repeated and in any pieces."""

import hypothesis.strategies as st
from hypothesis import given

from cluster.routing.progress import Progress
from replicas.messages import TokenOutput


@st.composite
def scripts(draw):
    """(tokens of each choice, outputs of engines one after the other).

    Each engine starts at some token that the client has by then, and sends pieces of any size; the
    last one sends everything to the end.
    """
    tokens = draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), min_size=1))
    had = [0] * len(tokens)
    outputs = []
    num_engines = draw(st.integers(1, 4))
    for engine in range(num_engines):
        for choice, answer in enumerate(tokens):
            is_last = engine == num_engines - 1
            at = draw(st.integers(0, had[choice]))
            stop = len(answer) if is_last else draw(st.integers(at, len(answer)))
            while at < stop or (is_last and at == stop == 0):
                count = draw(st.integers(1, stop - at))
                reason = "length" if at + count == len(answer) else None
                outputs.append(TokenOutput("r", at, answer[at : at + count], reason, choice=choice))
                at += count
            if is_last and had[choice] == len(answer):
                outputs.append(TokenOutput("r", len(answer), [], "length", choice=choice))
            had[choice] = max(had[choice], at)
    return tokens, outputs


@given(scripts())
def test_every_token_counts_once_and_each_choice_ends_once(script):
    tokens, outputs = script
    progress = Progress(len(tokens))
    ended = set()
    for output in outputs:
        assert progress.is_finished == (len(ended) == len(tokens))
        progress.note(output)
        if output.finish_reason is not None:
            ended.add(output.choice)
        assert all(
            had == answer[: len(had)] for had, answer in zip(progress.tokens, tokens, strict=True)
        )
    assert progress.tokens == tokens
    assert progress.is_finished
    assert len(progress.longest) == max(map(len, tokens))


def test_a_seam_lasts_from_the_last_old_token_to_the_first_new_one():
    progress = Progress(1)
    assert progress.heard(1.0) is None
    assert progress.heard(2.0) is None
    progress.break_off("lost", "its connection broke", "recomputed")
    progress.break_off("stalled", "the next one hangs, before it gave any", "moved")
    assert progress.heard(7.0) == ("lost", "its connection broke", 2.0, "recomputed")
    assert progress.seam is None
    assert progress.heard(8.0) is None


def test_an_end_that_crosses_the_end_of_its_choice_changes_nothing():
    """The tokens between both are not delivered: the client wants no more of them."""
    progress = Progress(2)
    progress.note(TokenOutput("r", 0, [5, 6]))
    assert progress.end(0)
    progress.note(TokenOutput("r", 4, [9], "length"))
    assert progress.tokens == [[5, 6], []]
    assert not progress.is_finished
