"""An engine without the kernel library, or without AVX-512, computes the same."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest
import torch

from replicas.errors import ConfigError
from replicas.generators.torch import native
from replicas.generators.torch.attention import BatchedAttention
from replicas.generators.torch.backends import make_attention
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


def of_a_lesser_compiler(monkeypatch):
    """Let the library have the portable kernels alone."""
    features = native.load().features
    if not features:
        pytest.skip("this processor needs none but the portable kernels")
    portable = replace(native.kernel_set(native.ALL_FEATURES), features=features, lacks=features)
    monkeypatch.setattr(native, "kernel_set", lambda _without=None: portable)
    return r"no kernels for AVX2\b.* of this processor.* run `python -m .*build_kernels`"


def without_threads(monkeypatch):
    monkeypatch.setattr(native, "in_team", lambda: None)
    return "on one thread, as PyTorch's libraries have no GOMP_parallel"


def without_the_library(monkeypatch):
    monkeypatch.setattr(native, "LIBRARY", native.LIBRARY / "no such file")
    native.load.cache_clear()
    native.kernel_set.cache_clear()
    return "was not built when ttserve was installed; run `python -m .*build_kernels`"


@pytest.mark.parametrize("taken", [of_a_lesser_compiler, without_threads, without_the_library])
def test_an_engine_that_requires_the_kernels_names_the_part_that_lacks(monkeypatch, caplog, taken):
    monkeypatch.setenv("TTSERVE_REQUIRE_KERNELS", "1")
    assert isinstance(make_attention("fast", torch.float32), FastAttention)
    caches = kernels_for, native.load, native.kernel_set
    try:
        kernels_for.cache_clear()
        message = taken(monkeypatch)
        with pytest.raises(ConfigError, match=f"TTSERVE_REQUIRE_KERNELS is set, but .*{message}"):
            make_attention("fast", torch.float32)
        assert isinstance(make_attention("batched", torch.float32), BatchedAttention)
        monkeypatch.delenv("TTSERVE_REQUIRE_KERNELS")
        make_attention("fast", torch.float32)
        [warning] = caplog.records
        assert re.search(message, warning.getMessage())
    finally:
        for each in caches:
            each.cache_clear()


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
