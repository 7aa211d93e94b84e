"""canitoolcall's live probe against a served model that answers as each scenario wants.

The whole path is under test but the model: the request's fields, the template, the parsers, whole
answers and streams, and that the two agree.
"""

import os

import pytest

from tests.clients.scripted_model import ScriptedModel, call, scripted_server

if not os.environ.get("CI"):  # where a missing package would hide the score
    pytest.importorskip("canitoolcall", reason="part of the dev extra")

from canitoolcall import probe

SCORE = {"pass": 27, "fail": 0, "error": 0, "skip": 0}
PEOPLE = [
    {"name": "Ana", "email": "ana@example.com"},
    {"name": "Bo", "email": "bo@example.com"},
]
ANSWERS = (
    ('"temp_c": 18', "It is clear, 18 degrees."),
    ("Tokyo", call("get_weather", city="Paris") + "\n" + call("get_weather", city="Tokyo")),
    ("Paris", call("get_weather", city="Paris")),
    ("17 + 25", "42"),
    (
        "Design review",
        call(
            "create_event",
            title="Design review",
            start="2026-10-01T15:00:00Z",
            attendees=PEOPLE,
            location={"city": "Berlin", "room": "4.12"},
        ),
    ),
    (
        "Zürich",
        call("save_note", title="Grüße aus Zürich", body="Café ☕ in 東京 — naïve résumé 🚀"),
    ),
    ("on the server", call("get_server_time")),
    ("Lisbon", call("get_weather", city="Lisbon")),
    ("9.11", "<think>\n9.9 is 9.90.\n</think>\n\n" + call("record_answer", answer="9.9")),
)


class ReasoningModel(ScriptedModel):
    """A model that may reason before its answer."""

    reasoning_parser = "qwen3"


def test_the_score_never_falls(record_property):
    with scripted_server(ReasoningModel(ANSWERS)) as port:
        report = probe.probe(f"http://127.0.0.1:{port}/v1", "demo")
    problems = [
        (each.scenario_id, each.check, each.stream, each.detail, each.warnings)
        for each in report.outcomes
        if each.status != "pass" or each.warnings
    ]
    record_property("summary", f"canitoolcall probe: {report.summary()}")
    assert (report.summary(), problems) == (SCORE, [])
