"""An engine without the kernel library computes the same, and says that it is slow."""

import os
import subprocess
import sys

import msgspec

from replicas.sampling_params import SamplingParams
from tests.engines import engine_core, generate, make_config
from tests.models import model_folder

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, seed=0, ignore_eos=True)
PROMPTS = [[7 * i % 149 for i in range(1, 22)], [5, 9, 3]]
SCRIPT = """
import pathlib, sys
from replicas.generators.torch import native
from tests.replicas.generators import test_torch_without_kernels as case

native.LIBRARY = pathlib.Path("/no/such/_kernels.so")
for dtype in ("float32", "bfloat16"):
    print("engine", file=sys.stderr)
    print(case.tokens(sys.argv[1], dtype).decode())
"""


def tokens(folder, dtype):
    with engine_core(make_config(folder, dtype=dtype)) as core:
        return msgspec.json.encode(generate(core, PROMPTS, GREEDY))


def test_an_engine_starts_without_the_library_and_says_once_what_to_do():
    folder = str(model_folder("llama-gqa"))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    float32, bfloat16 = map(msgspec.json.decode, done.stdout.splitlines())
    assert float32 == msgspec.json.decode(tokens(folder, "float32"))
    assert [len(row) for row in bfloat16] == [GREEDY.max_tokens] * len(PROMPTS)
    for said in done.stderr.split("engine\n")[1:]:
        assert said.count("/no/such/_kernels.so was not built") == 1
        assert said.count("build_kernels`, which needs a C compiler") == 1
