"""The harness of the fuzz targets; `make fuzz` runs the targets themselves."""

import json
import random
import subprocess
import sys
import tracemalloc

import pytest

from tests.fuzz.mutation import JSON, MAX_BYTES, PLAIN, SAFETENSORS, Mutator, Parts


@pytest.mark.process
def test_planted_defects_are_found_and_their_inputs_shown():
    # The harness forks, so it needs a process without threads.
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.planted"], capture_output=True, check=True, text=True
    )
    found = json.loads(done.stdout)
    num_inputs, failure, _ = found.pop("sound")
    assert not failure
    assert num_inputs > 100
    words = {
        "untyped": "KeyError: 'planted'",
        "endless": "processor time\n",
        "huge": "MemoryError",
        "crash": "with code -6",
        "bad-seed": "JSONDecodeError",
    }
    for name, (_, failure, data) in found.items():
        assert words[name] in failure
        assert data == "{" if name == "bad-seed" else isinstance(json.loads(data)["a"], list)
    assert set(found) == set(words)


@pytest.mark.parametrize("format_", [JSON, SAFETENSORS])
def test_changed_inputs_differ_stay_small_and_depend_on_the_seed_alone(format_):
    data = format_.join(Parts(b"", json.dumps({"a": [1, {"b": "c"}]}).encode(), b"tail"))

    def changed(seed):
        mutator = Mutator(format_, (b"word",), random.Random(seed))
        return [mutator.mutate(data, data) for _ in range(300)]

    first = changed(1)
    assert first == changed(1)
    assert first != changed(2)
    assert len(set(first)) > 200
    assert max(map(len, first)) <= MAX_BYTES
    structured = [each for each in first if b'"b"' in each and each != data]
    assert len(structured) > 50


class _MostRepetitions(random.Random):
    """Repeats the whole input as often as it may, as many times as it may."""

    def choice(self, options):
        return max(options)

    def randint(self, a, _b):
        return a

    def randrange(self, *_limits):
        return 2


def test_repetitions_of_repetitions_fit_into_memory():
    tracemalloc.start()
    try:
        changed = Mutator(PLAIN, (), _MostRepetitions()).mutate(b"x" * MAX_BYTES, b"")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(changed) == MAX_BYTES
    assert peak < 2000 * MAX_BYTES
