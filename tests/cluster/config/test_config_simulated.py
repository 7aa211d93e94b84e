"""Configurations of simulated clusters: the shipped ones work, mistakes are named with numbers."""

from pathlib import Path

import pytest

import configs
from cluster.config.resolve import resolve
from cluster.config.serve_file import read_serve_file
from cluster.errors import ClusterConfigError
from replicas.generators.model_config import load_hf_config
from replicas.generators.simulated.profiles import engine_profile
from replicas.kv_sizing import longest_sequence, num_blocks_per_lane

FOLDER = Path(configs.__file__).parent


def args(**engine):
    """Args of one simulated n150."""
    mesh = {"model": "Llama-3.1-8B", "board": "n150"}
    fields = {"block_size": 64, "max_model_len": 8192, "simulated_mesh": mesh, **engine}
    return {"model": "demo", "engine": fields, "pools": {"both": {}}}


@pytest.mark.parametrize(
    ("name", "pools"),
    [
        ("sim-n150x4", {"both": (4, "n150", 1, 32)}),
        ("sim-t3k-2p2d", {"prefill": (2, "T3K", 1, 16), "decode": (2, "T3K", 8, 64)}),
        ("sim-t3k-long", {"prefill": (2, "T3K", 1, 4), "decode": (1, "T3K", 1, 16)}),
        ("sim-galaxy", {"both": (1, "Galaxy", 4, 128)}),
    ],
)
def test_shipped_simulated_clusters_match_their_file_names(name, pools):
    config = resolve(read_serve_file(FOLDER / f"{name}.yaml").args)
    found = {}
    for role, pool in config.pools.items():
        engine = config.engines[role]
        lanes, slots = engine.tt_data_parallel, engine.max_batch_size
        found[role] = (pool.replicas, engine.simulated_mesh.board, lanes, slots)
        assert engine.simulated_mesh.compile_s == 0.0, "make serve would keep its user waiting"
    assert found == pools


def test_the_text_comes_from_the_served_model_and_the_limits_from_the_simulated_one():
    config = resolve(args())
    engine, model = config.engines["both"], load_hf_config(config.model_folder)
    assert longest_sequence(engine, model) == 8192 > model.max_position_embeddings
    profile = engine_profile(engine, engine.simulated_mesh)
    assert num_blocks_per_lane(engine, model) == 1 + profile.max_tokens_per_lane // 64


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"simulated_mesh": {"model": "Llama-3.1-8B", "board": "n151"}},
         r"^args: simulated_mesh.board 'n151' is not known; known: n150, n300, T3K"),
        ({"simulated_mesh": {"model": "Llama", "board": "n150"}},
         r"^args: simulated_mesh.model 'Llama' is not known; known: Llama-3.2-1B"),
        ({"simulated_mesh": {"model": "Llama-3.1-8B"}}, "args.engine.simulated_mesh: .*`board`"),
        ({"simulated_mesh": {"model": "Llama-3.1-8B", "board": "n150", "jiter": 1}},
         "args.engine.simulated_mesh: .*`jiter`"),
        ({"simulated_mesh": {"model": "Llama-3.1-8B", "board": "n150", "compile_s": -1}},
         "simulated_mesh.compile_s must not be negative, got -1"),
        ({"simulated_mesh": {"model": "Llama-3.1-8B", "board": "n150", "link_bytes_per_s": 0}},
         "simulated_mesh.link_bytes_per_s must be positive, got 0"),
        ({"max_model_len": 65536},
         "max_model_len 65536 does not fit .* 45440 tokens .* more of n150's chips"),
        ({"max_model_len": 131073, "simulated_mesh": {"model": "Llama-3.2-1B", "board": "n150"}},
         "max_model_len 131073 exceeds the model's limit of 131072"),
        ({"max_batch_size": 33}, "33 slots a lane, and a mesh decodes at most 32"),
        ({"tt_data_parallel": 2, "max_batch_size": 32}, "does not divide the 1 chips of n150"),
        ({"generator": "a:B"}, "generator 'a:B' and simulated_mesh exclude each other"),
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_work_is_refused(engine, message):
    with pytest.raises(ClusterConfigError, match=message):
        resolve(args(**engine))


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        ({"simulated_mesh": {"model": "Mistral-7B", "board": "T3K"}},
         "simulated_mesh.model is Llama-3.1-8B in the prefill pool and Mistral-7B in the decode"),
        ({"simulated_mesh": None, "max_model_len": 1024, "kv_cache_memory_bytes": 2**28},
         "simulated_mesh.model is Llama-3.1-8B in the prefill pool and None in the decode pool"),
    ],
)  # fmt: skip
def test_pools_of_other_models_are_refused(decode, message):
    pools = {"prefill": {}, "decode": {"engine": decode}}
    with pytest.raises(ClusterConfigError, match=message):
        resolve({**args(), "pools": pools})


def test_pools_on_other_boards_work_together():
    mesh = {"model": "Llama-3.1-8B", "board": "T3K"}
    decode = {"engine": {"simulated_mesh": mesh, "tt_data_parallel": 4}}
    resolve({**args(), "pools": {"prefill": {}, "decode": decode}})
