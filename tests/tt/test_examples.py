"""`examples/offline_inference.py` on the mock device: every step is real but the numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples import offline_inference
from tests.tt.mock.boards import environment

pytestmark = pytest.mark.process


def example(board, tmp_path, *arguments):
    """The last line, as an object. Traces cannot be captured here."""
    done = subprocess.run(
        [
            sys.executable,
            offline_inference.__file__,
            "--mesh",
            board,
            "--trace",
            "none",
            *arguments,
        ],
        # ttnn writes reports to where it runs.
        cwd=tmp_path,
        env={
            **os.environ,
            **environment(board),
            "HOME": str(tmp_path),
            "TMPDIR": str(tmp_path),
            "PYTHONPATH": str(Path(offline_inference.__file__).parents[1]),
        },
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_continuous_batching_in_two_lanes_with_tokens_drawn_on_the_device(tmp_path):
    figures = example(
        "N300", tmp_path, "--lanes", "2", "--max-batch-size", "4", "--max-model-len", "256",
        "--measure-perf", "--prompt-len", "100", "--num-prompts", "6", "--requests-per-step", "1",
        "--max-tokens", "4", "--sample-on-device", "all",
    )  # fmt: skip
    assert (figures["num_requests"], figures["output_tokens"]) == (6, 24)


def test_prompts_of_increasing_length_up_to_the_longest(tmp_path):
    lengths = example(
        "N150", tmp_path, "--max-batch-size", "8", "--test_increasing_seq_lens", "--max-tokens", "2"
    )
    assert lengths["lengths"] == [32, 64, 128, 256, 512, 1024, 2046]
