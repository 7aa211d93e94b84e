"""An engine without the kernel library, or without AVX-512, computes the same."""

import os
import subprocess
import sys

import msgspec
import pytest
import torch

from replicas.generators.torch import native
from replicas.generators.torch.attention import BatchedAttention
from replicas.generators.torch.fast_attention import FastAttention
from replicas.generators.torch.kernels import kernels_for
from replicas.generators.torch.native import Feature, NativeError
from replicas.sampling_params import SamplingParams
from tests.engines import engine_core, generate, make_config
from tests.models import model_folder
from tests.replicas.generators.conftest import make_generator
from tests.replicas.generators.test_torch_stack import batch_of, cache_for, fill

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


@pytest.fixture(params=["no AVX-512", "no library"])
def lesser_host(request, monkeypatch):
    """Return a function that takes the processor's AVX-512, or the library, away."""
    kernel_set = native.kernel_set

    def take_away():
        kernels_for.cache_clear()

        def found(_without=None):
            if request.param == "no library":
                raise NativeError("it was not built")
            return kernel_set(Feature.AVX512 | Feature.AMX)

        monkeypatch.setattr(native, "kernel_set", found)
        return BatchedAttention if request.param == "no library" else FastAttention

    yield take_away
    kernels_for.cache_clear()


def test_a_lesser_host_generates_the_same_tokens_in_float32(lesser_host):
    folder = str(model_folder("llama-gqa"))
    wanted = tokens(folder, "float32")
    lesser_host()
    assert tokens(folder, "float32") == wanted


@pytest.mark.parametrize("case", ["llama-gqa", "qwen3"])
def test_a_lesser_host_gives_logits_within_rounding_in_bfloat16(lesser_host, tiny, case):
    def logits():
        found = make_generator(tiny(case).config, torch.bfloat16, max_batch_size=8, max_seq_len=192)
        cache = cache_for(found)
        fill(cache, 0)
        batch = batch_of([(0, 70), (40, 1), (90, 20)], range, 5)
        return found._forward(batch, cache).float(), type(found._model._attention)

    wanted, _ = logits()
    expected = lesser_host()
    found, attention = logits()
    assert attention is expected
    assert (found - wanted).abs().max() < 2**-5 * wanted.abs().max()
