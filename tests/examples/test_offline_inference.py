"""`examples/offline_inference.py`: its text, its last line; once as a process, as users run it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.config.resolve import demo_model_folder
from examples import offline_inference
from examples.offline_inference import unlike_prompt
from replicas import LLM, SamplingParams
from replicas.errors import EngineError

pytestmark = pytest.mark.process

SCRIPT = Path(offline_inference.__file__)


def example_process(*arguments):
    """Exit code, lines and errors of the script."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.fixture
def example(capsys):
    """The same from its `main`; the engine is a process all the same."""

    def run(*arguments):
        code = offline_inference.main(arguments)
        said = capsys.readouterr()
        return code, said.out.splitlines(), said.err

    return run


@pytest.fixture
def exact_model(tmp_path):
    """The demo model in float32: in bfloat16 who is beside a request may change its tokens."""
    for path in demo_model_folder().iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((tmp_path / "config.json").read_bytes()) | {"dtype": "float32"}
    config.pop("torch_dtype", None)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_more_requests_than_slots_that_join_while_others_run(example, exact_model):
    code, lines, errors = example_process(
        "--model", exact_model, "--num-prompts", "6", "--max-batch-size", "2",
        "--requests-per-step", "1", "--max-tokens", "6",
    )  # fmt: skip
    assert code == 0, errors
    texts = [line for line in lines if " -> " in line]
    assert len(texts) == 6
    assert texts[0].startswith("'Return a copy of the' -> ' ")
    assert json.loads(lines[-1])["output_tokens"] == 36
    alone = example(
        "--model", exact_model, "--num-prompts", "1", "--max-batch-size", "1", "--max-tokens", "6"
    )
    assert [line for line in alone[1] if " -> " in line] == texts[:1]


def test_figures_of_equal_prompts_on_a_simulated_mesh(example):
    code, lines, errors = example(
        "--simulate", "Llama-3.1-8B@n150", "--measure-perf", "--max-batch-size", "4",
        "--max-tokens", "4", "--max-model-len", "2048",
    )  # fmt: skip
    assert code == 0, errors
    figures = json.loads(lines[-1])
    assert figures["num_requests"] == 4
    assert figures["prompt_tokens"] == 4 * 128
    assert figures["output_tokens"] == 16
    # The device's own time: a decode step of this board takes 38 ms, whatever the host does.
    assert figures["tpot_ms"] >= 30


def test_prompts_of_increasing_length_up_to_the_longest(example):
    code, lines, errors = example(
        "--test_increasing_seq_lens", "--max-model-len", "256", "--max-tokens", "4"
    )
    assert code == 0, errors
    assert json.loads(lines[-1])["lengths"] == [32, 64, 128, 252]


def test_prompts_to_measure_with_have_no_common_prefix():
    """Otherwise the prefix cache would answer, and nothing be measured."""
    assert len({tuple(unlike_prompt(n, 128)[:3]) for n in range(1000)}) == 1000
    with LLM(str(demo_model_folder()), multiprocess=False, max_model_len=512, block_size=32) as llm:
        outputs = [
            llm.generate(unlike_prompt(n, n), SamplingParams(max_tokens=1))[0]
            for n in (32, 64, 128, 256, 510)
        ]
    assert [output.num_cached_tokens for output in outputs] == [0] * 5


def test_an_async_engine_gives_the_same_texts(example, tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(["Return a copy of the", "Raise an exception if"]))
    arguments = ("--prompts_json", str(path), "--num_repeat_prompts", "2", "--max-tokens", "6")
    code, lines, errors = example(*arguments, "--async_engine", "--max-batch-size", "3")
    assert code == 0, errors
    texts = [line for line in lines if " -> " in line]
    assert len(texts) == 4
    assert texts[:2] == texts[2:]
    assert texts[0] != texts[1]
    assert texts == [line for line in example(*arguments)[1] if " -> " in line]
    figures = json.loads(lines[-1])
    assert (figures["num_requests"], figures["output_tokens"]) == (4, 24)
    assert 0 < figures["ttft_ms"] < 1000 * figures["seconds"]


@pytest.mark.parametrize(
    "arguments", [["--multi_modal"], ["--multi_image"], ["--mm_processor_kwargs", "{}"]]
)
def test_flags_that_need_images_say_that_there_are_none(arguments, capsys):
    assert offline_inference.main(arguments) == 1
    assert capsys.readouterr().err.startswith(f"{arguments[0]}: images are not supported yet")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num_repeat_prompts", "0"], "must be at least 1, got 0"),
        (["--num_repeat_prompts", "2", "--num-prompts", "2"], "not allowed with argument"),
        (["--async_engine", "--test_increasing_seq_lens"], "takes no --test_increasing_seq_lens"),
        (["--async_engine", "--requests-per-step", "2"], "no --requests-per-step"),
        (["--requests-per-step", "-1"], "must be at least 0, got -1"),
        (["--num-prompts", "0"], "must be at least 1, got 0"),
    ],
)
def test_absurd_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        offline_inference.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "{", "[]", "[1]"])
def test_prompts_that_are_none_are_refused_before_the_engine_starts(content, tmp_path, capsys):
    path = tmp_path / "prompts.json"
    if content is not None:
        path.write_text(content)
    assert offline_inference.main(["--prompts_json", str(path)]) == 1
    assert "prompts.json" in capsys.readouterr().err


def test_no_room_for_a_prompt():
    with (
        LLM(str(demo_model_folder()), multiprocess=False, max_model_len=256) as llm,
        pytest.raises(EngineError, match="leave no room for a prompt in max_model_len 256"),
    ):
        offline_inference.increasing_lengths(llm.llm_engine, 300)


def test_what_cannot_work_says_why(example):
    code, lines, errors = example("--simulate", "Llama-3.1-8B@no-such-board")
    assert (code, "".join(lines)) == (1, "")
    assert "no-such-board" in errors
    assert "Traceback" not in errors
