"""Front ends check grammars in a child that may be lost, and refuse what it is lost to."""

import sys

import pytest

from replicas.errors import EngineStartError, InvalidRequestError
from replicas.grammar_checks import GrammarChecker
from replicas.sampling_params import StructuredOutputs

GOOD = StructuredOutputs(regex="[ab]+")
ENDLESS = StructuredOutputs(
    json={"type": "string", "allOf": [{"pattern": f".*a.{{{i + 5}}}b.*"} for i in range(300)]}
)
"""Takes minutes, and no limit of llguidance stops it."""
HUGE_NUMBERS = StructuredOutputs(
    json={
        "allOf": [
            {"type": "integer", "minimum": -(10**17), "maximum": 10**17 + 7},
            {"multipleOf": 12345},
            {"multipleOf": 777},
        ]
    }
)

pytestmark = pytest.mark.process


@pytest.fixture
def checker():
    made = GrammarChecker(["<|tool|>"])
    yield made
    made.close()


def test_grammars_are_checked_and_their_verdicts_remembered(checker):
    assert not checker.recall(GOOD)
    checker.check(GOOD)
    assert checker.recall(GOOD)
    bad = StructuredOutputs(regex="(?=a)")
    assert not checker.recall(bad)
    for again in (checker.check, checker.recall, checker.check):
        with pytest.raises(InvalidRequestError, match="look-around") as caught:
            again(bad)
        assert caught.value.param == "structured_outputs.regex"
    checker.check(StructuredOutputs(grammar='start: <|tool|> "a"'))
    with pytest.raises(InvalidRequestError, match="special token"):
        checker.check(StructuredOutputs(grammar='start: <|other|> "a"'))


DEEP = StructuredOutputs(grammar='start: %json {"const": -9223372036854775808}')
"""Overflows the stack."""


@pytest.mark.parametrize(
    "spec", [ENDLESS, HUGE_NUMBERS, DEEP], ids=["patterns", "multiples", "stack"]
)
def test_a_grammar_that_does_not_end_is_refused_and_others_work_afterwards(checker, spec):
    with pytest.raises(InvalidRequestError, match="too long") as caught:
        checker.check(spec)
    assert caught.value.param == f"structured_outputs.{spec.kind}"
    with pytest.raises(InvalidRequestError, match="too long"):
        checker.recall(spec)
    checker.check(GOOD)


def test_a_grammar_whose_child_something_else_has_ended_is_not_remembered(checker):
    checker.check(GOOD)
    checker._child.kill()
    other = StructuredOutputs(regex="d")
    with pytest.raises(InvalidRequestError, match="too long"):
        checker.check(other)
    checker.check(other)


def test_a_child_that_does_not_start_is_no_fault_of_the_grammar(checker, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineStartError):
        checker.check(GOOD)
    monkeypatch.undo()
    checker.check(GOOD)


def test_a_child_that_is_gone_is_replaced(checker):
    checker.check(GOOD)
    checker.close()
    checker.check(StructuredOutputs(regex="c"))
