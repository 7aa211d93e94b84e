"""A gang behind Ray Serve: answers of the whole model, and one restart for all of its ranks."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import harness
import pytest
import torch
import transformers
import yaml

from cluster.lifecycle import supervisor
from tests.models import MARGIN, references
from tests.replicas.test_tokenizer import make_folder

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROMPTS = [[2 + (n + 7 * i) % 250 for i in range(5 + 3 * n)] for n in range(6)]
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with experts, and a tokenizer."""
    folder = tmp_path_factory.mktemp("experts")
    make_folder(folder, {})
    config = transformers.Qwen3MoeConfig(
        vocab_size=384, hidden_size=64, intermediate_size=96, moe_intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=256,
        initializer_range=0.2, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    """One gang of two replicas."""
    port = supervisor.free_port()
    engine = {"dtype": "float32", "num_threads": 1, "num_blocks": 64, "max_batch_size": 4}
    args = {
        "model": str(folder),
        "model_name": "experts",
        "pools": {"both": {"replicas": 2, "gang_size": 2, "engine": engine}},
    }
    application = {"name": "ttserve", "import_path": "cluster.app:build", "args": args}
    path = tmp_path_factory.mktemp("gang") / "serve.yaml"
    path.write_text(
        yaml.safe_dump(
            {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
        )
    )
    server = harness.LocalServer(["--config", str(path)], port)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


def engines(server):
    """Process ids of the gang's engines."""
    table = harness.process_table()
    # One may have started or ended between the two looks.
    found = server.footprint.look() & table.keys()
    return {pid for pid in found if "replicas.engine" in table[pid].command}


def answers(server):
    """Tokens of every prompt, all asked for at once."""

    def ask(prompt):
        body = {
            "model": "experts", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        return harness.post_json(f"{server.url}/v1/completions", body)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(ask, PROMPTS))


def check(server, folder):
    for (status, body), wanted in zip(
        answers(server), references(str(folder), PROMPTS, NUM_TOKENS), strict=True
    ):
        assert status == 200, body
        found = body["choices"][0]["token_ids"]
        # After a tie of the best two tokens the texts may differ.
        near = [i for i, margin in enumerate(wanted.margins) if margin < MARGIN]
        end = near[0] if near else NUM_TOKENS
        assert found[:end] == wanted.token_ids[:end]


def test_a_gang_serves_the_whole_model_and_starts_again_as_one(server, folder):
    check(server, folder)
    before = engines(server)
    assert len(before) == 2
    os.kill(min(before), signal.SIGKILL)
    harness.wait_for(lambda: not before & engines(server), 180, "both ranks have ended")
    harness.wait_for(lambda: answers(server)[0][0] == 200, 180, "the gang serves again")
    assert len(engines(server)) == 2
    check(server, folder)
