"""The log of a warm-up: each pass by its name, with its duration."""

import re

import pytest

from replicas.warm_up import timed_pass
from tests.engines import engine_core, make_config
from tests.models import model_folder


def test_an_engine_logs_each_pass_of_its_warm_up(caplog):
    caplog.set_level("INFO")
    with engine_core(make_config(model_folder("llama-gqa"))):
        pass
    passes = re.findall(r"warm-up: (.*) took [0-9]+\.[0-9]{3} s", caplog.text)
    assert passes == [
        "compile prefill",
        "compile decode",
        "compile KV transfers",
        "sample on the host",
        "capture prefill",
        "capture decode",
        "all passes",
    ]


def test_a_pass_that_fails_is_not_logged(caplog):
    caplog.set_level("INFO")
    with pytest.raises(RuntimeError), timed_pass("compile"):
        raise RuntimeError("no core")
    assert "compile" not in caplog.text
