"""An engine whose numba cannot be loaded computes the same, and says that it is slow."""

import os
import subprocess
import sys

import msgspec
import pytest

from replicas.sampling_params import SamplingParams
from tests.engines import engine_core, generate, make_config
from tests.models import model_folder

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, seed=0, ignore_eos=True)
PROMPTS = [[7 * i % 149 for i in range(1, 22)], [5, 9, 3]]
SCRIPT = """
import sys

class Refuses:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("numba", "llvmlite"):
            raise ImportError("Numba needs NumPy 2.3 or less")

sys.meta_path.insert(0, Refuses())
from tests.replicas.generators import test_torch_without_numba as case

print(case.tokens(sys.argv[1], sys.argv[2]).decode())
"""


def tokens(folder, dtype):
    with engine_core(make_config(folder, dtype=dtype)) as core:
        return msgspec.json.encode(generate(core, PROMPTS, GREEDY))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_starts_without_numba_and_says_once_what_to_do(dtype):
    folder = str(model_folder("llama-gqa"))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder, dtype], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = msgspec.json.decode(done.stdout)
    assert [len(row) for row in found] == [GREEDY.max_tokens] * len(PROMPTS)
    if dtype == "float32":
        assert found == msgspec.json.decode(tokens(folder, dtype))
    assert done.stderr.count("Numba needs NumPy 2.3 or less") == 1
    assert done.stderr.count("Install the numba and llvmlite") == 1
