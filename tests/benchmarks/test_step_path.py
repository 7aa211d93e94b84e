"""Limits of what a plain decode step calls: lower them with every step that calls less."""

from benchmarks.step_path import Call, count, decode_step

MAX_FUNCTIONS, MAX_CLASSES, MAX_MODULES = 45, 12, 12


def test_a_plain_decode_step_calls_no_more_of_the_engine():
    calls = decode_step()
    found = count(calls)
    path = "\n".join("  " * call.depth + ".".join(call[1:]) for call in calls)
    assert found.functions <= MAX_FUNCTIONS, path
    assert found.classes <= MAX_CLASSES, path
    assert found.modules <= MAX_MODULES, path


def test_the_path_has_all_three_parts_of_a_step():
    parts = [call for call in decode_step() if call.depth == 0]
    assert parts == [
        Call(0, "core", "EngineCore", name) for name in ("begin_step", "collect_step", "end_step")
    ]


def test_functions_are_told_apart_by_module_and_class():
    calls = [Call(0, "a", "A", "f"), Call(1, "a", "B", "f"), Call(1, "b", "", "f")]
    assert count([*calls, calls[0]]) == (4, 3, 2, 2)
