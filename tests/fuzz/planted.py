"""Targets with planted defects, which the harness must find."""

from __future__ import annotations

import json
import os
import sys

from tests.fuzz.mutation import JSON, PLAIN
from tests.fuzz.runner import Target, run_targets


def _reads(defect, is_hit):
    """Return a target that has a defect behind inputs which only changes reach."""

    def read(data):
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ValueError("no JSON") from error
        if is_hit(value):
            defect()
        return type(value).__name__

    return Target(lambda: read, lambda: [b'{"a": {"b": 1}}'], (ValueError,), JSON)


def _has_list(value):
    return isinstance(value, dict) and isinstance(value.get("a"), list)


def _loops():
    while True:
        pass


def _raises():
    raise KeyError("planted")


PLANTED = {
    "sound": _reads(lambda: None, _has_list),
    "untyped": _reads(_raises, _has_list),
    "endless": _reads(_loops, _has_list),
    "huge": _reads(lambda: bytearray(2**33), _has_list),
    "crash": _reads(os.abort, _has_list),
    "bad-seed": Target(lambda: json.loads, lambda: [b"{"], (), PLAIN),
}

if __name__ == "__main__":
    found = run_targets(PLANTED, seconds=0.5, jobs=2, max_input_s=0.5)
    print(json.dumps({name: [r.num_inputs, r.failure, r.data.decode()] for name, r in found}))
    sys.exit(0)
