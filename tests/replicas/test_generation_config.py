"""Sampling defaults come from the model folder as vLLM takes them."""

import json
import shutil

import pytest

from replicas import LLM, SamplingParams
from replicas.errors import ConfigError
from replicas.generation_config import read_sampling_defaults
from replicas.sampling_params import SamplingDefaults
from tests.models import chat_folder

RECOMMENDED = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "eos_token_id": 1}


def write(folder, content):
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    return folder


def test_values_of_the_file_are_the_defaults(tmp_path):
    more = {"min_p": 0.1, "repetition_penalty": 1.05}
    write(tmp_path, {**RECOMMENDED, **more, "max_new_tokens": 2048})
    expected = SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, max_tokens=2048, **more)
    assert read_sampling_defaults(tmp_path) == expected
    assert read_sampling_defaults(tmp_path, "vllm") == SamplingDefaults()


@pytest.mark.parametrize("content", [None, {}, {"eos_token_id": 1}, {"temperature": None}])
def test_folder_that_recommends_nothing_leaves_the_neutral_values(tmp_path, content):
    if content is not None:
        write(tmp_path, content)
    assert read_sampling_defaults(tmp_path) == SamplingDefaults()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"temperature": 5}, r"temperature must be in \[0, 2\], got 5"),
        ({"temperature": "hot"}, "got `str` - at `$.temperature`"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_k": -2}, "top_k must be -1, 0 or at least 1, got -2"),
        ({"top_k": 10**30}, "top_k must be at most 2147483647"),
        ({"top_k": 2.5}, "got `float` - at `$.top_k`"),
        ({"max_new_tokens": 0}, "max_new_tokens must be 1 to 2147483647, got 0"),
        ([], "Expected `object`, got `array`"),
        ("{", "truncated"),
    ],
)
def test_absurd_value_is_refused_with_file_and_field(tmp_path, content, complaint):
    complaint = complaint.replace("$", r"\$")
    write(tmp_path, content)
    with pytest.raises(ConfigError, match=f"generation_config.json: .*{complaint}"):
        read_sampling_defaults(tmp_path)
    assert read_sampling_defaults(tmp_path, "vllm") == SamplingDefaults()


def test_offline_requests_without_parameters_take_the_defaults(tmp_path):
    folder = shutil.copytree(chat_folder(), tmp_path / "chat")
    write(folder, {"temperature": 0.0, "max_new_tokens": 5, "eos_token_id": 399})
    settings = {"dtype": "float32", "max_model_len": 64, "num_blocks": 9, "num_threads": 1}
    prompt = [5, 6, 7]
    with LLM(str(folder), multiprocess=False, **settings) as llm:
        greedy = SamplingParams(max_tokens=5, temperature=0.0)
        assert llm.get_default_sampling_params() == greedy
        by_default, explicit = (
            llm.generate(prompt, params, use_tqdm=False)[0].outputs[0] for params in (None, greedy)
        )
        assert by_default.token_ids == explicit.token_ids
        [plain] = llm.generate(prompt, SamplingParams(), use_tqdm=False)
        assert len(plain.outputs[0].token_ids) == 16, "explicit parameters are complete"
    with LLM(str(folder), multiprocess=False, generation_config="vllm", **settings) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
