"""`ttserve bench latency` and `throughput` on engines of the bundled model."""

import json
import shlex

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster import cli
from cluster.bench.arguments import engine_options
from cluster.bench.errors import BenchError

pytestmark = pytest.mark.process


@pytest.fixture
def run(tmp_path):
    """Runs a command line of the shell; returns its result and the saved figures."""

    def on(line):
        path = tmp_path / "figures.json"
        words = [*shlex.split(line), "--output-json", str(path)]
        result = CliRunner().invoke(cli.app, ["bench", *words])
        return result, json.loads(path.read_text()) if path.exists() else None

    return on


def test_latencies_are_printed_and_saved_as_by_vllm(run):
    line = "latency --input-len 6 --output-len 3 --batch-size 2 --num-iters-warmup 1 --num-iters 3"
    result, figures = run(f"{line} --kv-cache-memory-bytes 16777216")
    assert result.exit_code == 0, result.output
    assert figures.keys() == {"model_id", "avg_latency", "latencies", "percentiles"}
    assert len(figures["latencies"]) == 3
    assert figures["avg_latency"] == pytest.approx(np.mean(figures["latencies"]))
    assert list(figures["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert figures["percentiles"]["50"] == pytest.approx(np.median(figures["latencies"]))
    lines = result.output.splitlines()
    assert f"Avg latency: {figures['avg_latency']} seconds" in lines
    assert f"99% percentile latency: {figures['percentiles']['99']} seconds" in lines


# The command lines of vLLM's users, but for the size of the run, the model and files.
SEEDS = [
    "latency --model demo -tp 1 --dtype float16 --load-format dummy --input_len 49 --output_len 1 "
    "--batch_size 2 --num-iters 1 --num-iters-warmup 0 --disable-async-output-proc --enforce-eager",
    "latency --model demo --load-format dummy -tp 1 --input-len 10 --output-len 4 --batch-size 3 "
    """--num-iters 1 --num-iters-warmup 0 --compilation-config '{"use_inductor": "False", """
    """"custom_ops": ["all"], "cudagraph_capture_sizes": [128]}'""",
    "latency --n 2 --use-beam-search --input-len 4 --output-len 2 --batch-size 1 --num-iters 1 "
    "--num-iters-warmup 0",
]


@pytest.mark.parametrize("line", SEEDS, ids=["prefill", "compilation", "beams"])
def test_command_lines_of_vllm_measure_latencies(run, line):
    result, figures = run(line)
    assert result.exit_code == 0, result.output
    assert len(figures["latencies"]) == 1


@pytest.fixture
def files(tmp_path):
    """A folder with a ShareGPT file, a poem, and a data set of Hugging Face."""
    turns = ["def add(first, second):", "return the sum of both of these numbers"]
    conversations = [{"conversations": [{"value": text} for text in turns]}]
    (tmp_path / "sharegpt.json").write_text(json.dumps(conversations))
    (tmp_path / "sonnet.txt").write_text("the day of the small and open file\n" * 3)
    folder = tmp_path / "likaixin" / "InstructCoder"
    folder.mkdir(parents=True)
    rows = [{"input": "x = 1", "instruction": f"rename x to y{i}"} for i in range(3)]
    (folder / "train.json").write_text(json.dumps(rows))
    return tmp_path


@pytest.mark.parametrize(
    ("line", "num_output"),
    [
        ("--dataset-name sharegpt --dataset-path ./sharegpt.json --num-prompts 2", None),
        ("--dataset-name=sonnet --dataset-path=sonnet.txt --num-prompts=2 --sonnet-input-len 40 "
         "--sonnet-prefix-len 20 --sonnet-output-len 3", 6),
        ("--dataset-name=hf --dataset-path=likaixin/InstructCoder --input-len=1000 --output-len=5 "
         "--num-prompts=4 --async-engine --speculative-config $'{\"method\": \"ngram\", "
         "\"num_speculative_tokens\": 5, \"prompt_lookup_max\": 5, \"prompt_lookup_min\": 2}'", 20),
        ("--dataset-name prefix_repetition --num-prompts 4 --prefix-repetition-num-prefixes 2 "
         "--prefix-repetition-prefix-len 20 --prefix-repetition-suffix-len 5 --output-len 2", 8),
        ("--input-len 8 --output-len 2 --n 2 --num-prompts 3 --max-num-seqs 4 --num-warmups 1 "
         "--disable-detokenize", 12),
    ],
    ids=["sharegpt", "sonnet", "speculation", "prefixes", "random"],
)  # fmt: skip
def test_command_lines_of_vllm_measure_throughput(run, files, monkeypatch, line, num_output):
    monkeypatch.chdir(files)
    # The shell's $'...' is a plain quoted word here.
    result, figures = run(f"throughput --model=demo {line.replace('$', '')}")
    assert result.exit_code == 0, result.output
    assert figures.keys() == {
        "model_id", "elapsed_time", "num_requests", "total_num_tokens", "requests_per_second",
        "tokens_per_second",
    }  # fmt: skip
    prompt, output = (
        int(text.split()[-1]) for text in result.output.splitlines() if text.startswith("Total num")
    )
    assert num_output in {None, output}
    assert figures["total_num_tokens"] == prompt + output
    total = figures["tokens_per_second"] * figures["elapsed_time"]
    assert total == pytest.approx(prompt + output)
    assert f"{figures['requests_per_second']:.2f} requests/s" in result.output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("latency -tp 2", "tensor_parallel_size must be 1"),
        ("latency --such-option", "such_option"),
        ("latency stray", "'stray' belongs to no option"),
        ("latency --num-iters 0", "--num-iters is 0; give 1 or more"),
        ("latency --model /nowhere", "/nowhere"),
        ("latency --input-len 100000 --num-iters-warmup 0", "prompt 1 of 8"),
        ("throughput --quantization awq --num-prompts 1 --input-len 4", "quantization"),
        ("throughput --dataset-name hf", "needs a --dataset-path"),
        ("throughput --backend hf", "invalid choice"),
    ],
)
def test_bad_options_end_with_a_line_that_says_what_to_do(run, line, message):
    result, figures = run(line)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert result.output.strip().splitlines()[-1].startswith("ttserve: ")
    assert figures is None


def test_engine_options_are_keywords():
    line = "--dtype float16 --max-model-len=128 --enforce-eager --no-enable-prefix-caching -tp 1"
    more = """--trust-remote-code --speculative-config '{"method": "ngram"}'"""
    assert engine_options(shlex.split(f"{line} {more}")) == {
        "dtype": "float16",
        "max_model_len": 128,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "speculative_config": {"method": "ngram"},
    }


def test_a_word_without_an_option_is_refused():
    with pytest.raises(BenchError, match="'1' belongs to no option"):
        engine_options(["--a", "2", "1"])
