"""Configurations of Tenstorrent meshes: the shipped ones work, mistakes are named with numbers."""

import json
from pathlib import Path

import pytest
import yaml

import configs
from cluster.config.resolve import check_generators, resolve
from cluster.config.serve_file import read_serve_file
from cluster.errors import ClusterConfigError
from replicas.config import NATIVE_TT_GENERATOR
from replicas.generators.model_config import load_hf_config
from replicas.generators.ttnn.budget import native_token_budget
from replicas.kv_sizing import kv_groups, longest_sequence, num_blocks_per_lane

FOLDER = Path(configs.__file__).parent
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with the configuration of Llama-3.1-8B."""
    folder = tmp_path_factory.mktemp("Llama-3.1-8B")
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(folder)


def args(model="demo", pools=None, **engine):
    """Args of one n150."""
    fields = {"block_size": 64, "mesh": {"name": "N150"}, **engine}
    return {"model": model, "engine": fields, "pools": pools or {"both": {}}}


@pytest.mark.parametrize(
    ("name", "pools"),
    [
        ("n150", {"both": ("N150", 1, 32)}),
        ("n300", {"both": ("N300", 1, 32)}),
        ("t3k-pd", {"prefill": ("T3K", 4, 16), "decode": ("T3K", 8, 256)}),
        ("galaxy-lanes", {"both": ("Galaxy", 16, 128)}),
        ("galaxy-pd", {"prefill": ("Galaxy", 16, 16), "decode": ("Galaxy", 16, 128)}),
        ("p150x4", {"both": ("P150x4", 4, 128)}),
    ],
)
def test_shipped_meshes_match_their_file_names(name, pools):
    config = resolve(read_serve_file(FOLDER / f"{name}.yaml").args)
    found = {}
    for role in config.pools:
        engine = config.engines[role]
        found[role] = (engine.mesh.name, engine.tt_data_parallel, engine.max_batch_size)
    assert found == pools


@pytest.mark.parametrize(
    ("name", "lanes"),
    [
        ("n150", {"both": 1}),
        ("n300", {"both": 2}),
        ("t3k-pd", {"prefill": 1, "decode": 8}),
        ("galaxy-lanes", {"both": 4}),
        ("galaxy-pd", {"prefill": 4, "decode": 4}),
        ("p150x4", {"both": 4}),
    ],
)
def test_shipped_meshes_serve_a_real_model_as_their_comments_say(name, lanes, llama):
    raw = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["applications"][0]["args"]
    for role, count in lanes.items():
        raw["pools"][role]["engine"]["tt_data_parallel"] = count
    raw["model"] = llama
    resolve(raw)


def test_a_lane_holds_what_fits_beside_the_weights(llama):
    config = resolve(args(llama, max_model_len=32768))
    engine, model = config.engines["both"], load_hf_config(llama)
    sizes = {"block_size": 64, "num_slots": 32, "max_seq_len": 32768}
    budget = native_token_budget(model, engine.mesh.spec, engine.mesh, 1, **sizes)
    # Each of 32 slots may leave most of a block unused; the null block is one of them.
    assert num_blocks_per_lane(engine, model) == -(-(budget + 64 * 32) // 64)
    assert longest_sequence(engine, model) == 32768 <= budget
    assert kv_groups(engine, model)[0].bytes_per_block == 64 * 69632


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({}, r"max_model_len 131072 does not fit the KV cache, which holds \d+ tokens per lane "
             r"\(\d+ blocks of 64\); use a larger mesh than N150 or lower max_model_len"),
        ({"mesh": {"name": "N300", "optimizations": "accuracy"}, "max_model_len": 100000},
         "max_model_len 100000 .*mesh.optimizations to \"performance\", use a larger mesh than N"),
        ({"mesh": {"name": "T3K"}, "tt_data_parallel": 8},
         "fewer lanes than tt_data_parallel 8, use a larger mesh than T3K"),
        ({"num_blocks": 100}, "raise num_blocks or leave it out"),
        ({"num_blocks": 4, "block_size": 32, "max_model_len": 96},
         "KV cache of 4 blocks, a row's page table has 8"),
        ({"num_blocks": 10_000_000, "max_model_len": 1024},
         r"num_blocks 10000000 .* N150: .* at most 1\d{3} blocks of 64 tokens"),
        ({"num_blocks": 5000, "mesh": {"name": "T3K"}, "tt_data_parallel": 8},
         r"num_blocks 5000 .* T3K: .* at most \d{3} blocks of 64 tokens"),
        ({"mesh": {"name": "N150", "optimizations": "accuracy"}},
         "does not fit mesh N150 .*bfloat16 take 1[0-9.]+ GB of each chip"),
        ({"mesh": {"name": "Galaxy"}, "tt_data_parallel": 2, "max_model_len": 128},
         "8 KV heads do not divide by the 16 chips of a lane"),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_fit_is_refused_at_once(llama, engine, message):
    with pytest.raises(ClusterConfigError, match=message):
        resolve(args(llama, **engine))


def test_a_grid_has_the_memory_of_its_architecture(llama):
    accurate = {"name": "(1,1)", "optimizations": "accuracy"}
    with pytest.raises(ClusterConfigError, match="does not fit mesh"):
        resolve(args(llama, mesh=accurate, max_model_len=2048))
    blackhole = {**accurate, "arch": "blackhole"}
    config = resolve(args(llama, mesh=blackhole, max_model_len=2048))
    assert config.engines["both"].mesh.spec.arch == "blackhole"


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"mesh": {"name": "N151"}}, "mesh 'N151' is not known; use one of N150, "),
        ({"mesh": {}}, "args.engine.mesh: .*`name`"),
        ({"mesh": {"name": "N150", "tracing": "all"}}, "args.engine.mesh: .*`tracing`"),
        ({"mesh": {"name": "N150", "trace": "some"}}, "args.engine.mesh.trace: .*'some'"),
        ({"mesh": {"name": "N150", "trace_region_size": 0}},
         "mesh.trace 'all' needs memory for traces and mesh.trace_region_size is 0"),
        ({"mesh": {"name": "N150", "trace_region_size": -1}},
         "mesh.trace_region_size must not be negative, got -1"),
        ({"mesh": {"name": "N150", "worker_l1_size": -2}}, "worker_l1_size .* got -2"),
        ({"mesh": {"name": "N300", "visible_devices": [0, 1]}},
         "visible_devices names 2 devices, but mesh N300 has 1"),
        ({"mesh": {"name": "T3K", "visible_devices": [0, 1, 1, 2]}},
         r"visible_devices must be distinct .* \[0, 1, 1, 2\]"),
        ({"mesh": {"name": "T3K", "visible_devices": []}}, r"visible_devices must be .* got \[\]"),
        ({"mesh": {"name": "DualGalaxy"}}, "DualGalaxy spans 2 hosts, but an engine runs on one"),
        ({"simulated_mesh": {"model": "Llama-3.1-8B", "board": "T3K"}},
         "mesh N150 and simulated_mesh T3K exclude each other"),
        ({"mixed_batches": True}, "mixed_batches: a mesh cannot mix"),
        ({"mesh": {"name": "N150", "tt_metal_home": "/opt/tt-metal"}},
         "mesh.tt_metal_home '/opt/tt-metal' is for third-party classes.* or set generator"),
        ({"mesh": {"name": "N150", "extra_models_dir": "/m"}, "generator": NATIVE_TT_GENERATOR},
         "mesh.extra_models_dir '/m' is for third-party classes"),
        ({"kv_cache_memory_bytes": 2**30},
         "args.engine.kv_cache_memory_bytes is for engines on the CPU.*num_blocks"),
        ({"dtype": "bfloat16"}, "dtype 'bfloat16' and mesh exclude each other"),
        ({"attention": "batched"}, "attention 'batched' is for engines on the CPU"),
        ({"generator": "a:B", "load_format": "random"}, "'random' .* a:B loads its weights"),
        ({"generator": "llama3_70b_galaxy"}, "32 chips of a Galaxy, but mesh N150 has"),
        ({"generator": "qwen3_32b_galaxy", "mesh": {"name": "TG"}, "tt_data_parallel": 4},
         "'qwen3_32b_galaxy' has no class for 'LlamaForCausalLM'"),
        ({"mesh": {"name": "N150", "optimizations": "balanced"}, "generator": "a:B"},
         "'balanced' is for ttserve's own generators; a:B supports 'performance' and 'acc"),
        ({"generator": "tt-metal", "max_model_len": 1280},
         "max_model_len is 1280, .* powers of two: set max_model_len to 1024 or 2048"),
        ({"generator": "tt-metal", "max_batch_size": 12}, "12 slots a lane; .* support 1, 2, 4, 8"),
        ({"tt_data_parallel": 2}, "tt_data_parallel 2 does not divide the 1 chips of mesh N150"),
        ({"max_batch_size": 33}, "33 slots a lane; a mesh decodes at most 32"),
        ({"block_size": 48}, "block_size 48 is not a multiple of 32"),
        ({"block_size": 256}, "block_size 256 does not divide the smallest bucket, 128"),
        ({"max_num_batched_tokens": 63}, "max_num_batched_tokens 63 is less than block_size 64"),
        ({"step_timeout_s": 0}, "step_timeout_s must be positive, got 0"),
        ({"step_timeout_s": float("nan")}, "step_timeout_s must be positive, got nan"),
        ({"start_timeout_s": 0}, "start_timeout_s must be positive, got 0"),
        ({"mesh": {"name": "N150", "arch": "blackhole"}},
         "mesh N150 has wormhole chips, but arch is 'blackhole'"),
        ({"mesh": {"name": "(1,1)", "arch": "grayskull"}}, "args.engine.mesh.arch: .*'grayskull'"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 1024},
         "max_num_batched_tokens 1024 is less than max_model_len 2048"),
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_work_is_refused(engine, message):
    with pytest.raises(ClusterConfigError, match=message):
        resolve(args(**engine))


def test_a_count_of_blocks_may_be_all_that_fits(llama):
    config = resolve(args(llama, max_model_len=1024))
    fits = num_blocks_per_lane(config.engines["both"], load_hf_config(llama))
    resolve(args(llama, max_model_len=1024, num_blocks=fits))
    with pytest.raises(ClusterConfigError, match=f"num_blocks {fits + 1} .* at most {fits} blocks"):
        resolve(args(llama, max_model_len=1024, num_blocks=fits + 1))


def test_more_blocks_than_rows_can_fill_keep_prefixes():
    """The bundled model is small: its longest sequences in all slots do not fill the memory."""
    config = resolve(args())
    engine = config.engines["both"]
    usual = num_blocks_per_lane(engine, load_hf_config(str(config.model_folder)))
    resolve(args(num_blocks=usual * 4))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_pools_own_kv_memory_is_refused_on_a_mesh_alone(role):
    pools = {"prefill": {"engine": CPU}, "decode": {"engine": {"kv_accept_dtypes": ["bfloat16"]}}}
    pools[role]["engine"] = {**pools[role]["engine"], "kv_cache_memory_bytes": 2**28}
    if role == "prefill":
        resolve(args(pools=pools))
        # What both share is used by one of them.
        del pools[role]["engine"]["kv_cache_memory_bytes"]
        resolve(args(pools=pools, kv_cache_memory_bytes=2**28))
        return
    with pytest.raises(
        ClusterConfigError, match=r"args.pools.decode.engine.kv_cache_memory_bytes is for .* CPU"
    ):
        resolve(args(pools=pools))


def test_the_capacity_of_a_plugins_class_is_unknown_before_it_loads(llama):
    config = resolve(args(llama, generator="tt-metal"))
    assert longest_sequence(config.engines["both"], load_hf_config(llama)) == 131072
    with pytest.raises(ClusterConfigError, match="max_model_len 131072 does not fit"):
        resolve(args(llama, generator="tt-metal", num_blocks=100))


def test_a_missing_generator_class_is_refused_only_by_check_generators():
    config = resolve(args(generator="tt-mettal"))
    with pytest.raises(
        ClusterConfigError, match=r"^args\.pools\.both: no generator class for 'tt-m"
    ):
        check_generators(config, {})
    check_generators(resolve(args()), {})


CPU = {"mesh": None, "block_size": 32}
ACCURATE = {"mesh": {"name": "N150", "optimizations": "accuracy"}}
SIMULATED = {"mesh": None, "simulated_mesh": {"model": "Llama-3.1-8B", "board": "n150"}}


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({}, {"mesh": {"name": "T3K"}, "tt_data_parallel": 8}),
        ({}, {"block_size": 32}),
        (CPU, {"kv_accept_dtypes": ["bfloat16"]}),
        (ACCURATE, {"kv_accept_dtypes": ["bfloat16"]}),
        (CPU, ACCURATE),
        ({}, {**CPU, "kv_accept_dtypes": ["bfloat8_b"]}),
        ({"generator": "tt-metal"}, {"generator": "a.b:C"}),
    ],
)  # fmt: skip
def test_pools_that_understand_each_other(prefill, decode):
    pools = {"prefill": {"engine": prefill}, "decode": {"engine": decode}}
    resolve(args(pools=pools))


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        (CPU, {}, r"dtype is bfloat16 in the prefill pool and bfloat8_b in the decode pool "
         r"\(decode: mesh.optimizations performance\); make them equal, or let decode convert: "
         r".*\[bfloat16\]"),
        (ACCURATE, {},
         "prefill: mesh.optimizations accuracy, decode: mesh.optimizations performance"),
        ({}, {**CPU, "dtype": "float64", "kv_accept_dtypes": ["bfloat8_b"]},
         "kv_accept_dtypes: .*'bfloat8_b' cannot be converted to 'float64'"),
        ({"generator": "tt-metal"}, {},
         "pool .generator tt-metal. rotates keys in meta order and the decode pool .* in hf"),
        ({"max_model_len": 2048}, {**SIMULATED, "max_model_len": 2048},
         "simulated_mesh.model is None in the prefill pool and Llama-3.1-8B in the decode pool"),
    ],
)  # fmt: skip
def test_pools_with_incompatible_kv_are_refused(prefill, decode, message):
    pools = {"prefill": {"engine": prefill}, "decode": {"engine": decode}}
    with pytest.raises(ClusterConfigError, match=message):
        resolve(args(pools=pools))


def test_replicas_do_not_share_boards():
    mesh = {"name": "N150", "visible_devices": [0]}
    resolve(args(mesh=mesh))
    with pytest.raises(ClusterConfigError, match=r"2 replicas cannot share the boards.*\[0\]"):
        resolve(args(mesh=mesh, pools={"both": {"replicas": 2}}))


def test_a_model_that_only_third_party_classes_support(tmp_path):
    from transformers import Gemma3TextConfig

    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 4096}
    Gemma3TextConfig(**sizes, architectures=["Gemma3ForCausalLM"]).save_pretrained(tmp_path)
    resolve(args(str(tmp_path), generator="some.module:Gemma3"))
    with pytest.raises(ClusterConfigError, match="'tt-metal' has no class for 'Gemma3ForCausalLM'"):
        resolve(args(str(tmp_path), generator="tt-metal"))
    Gemma3TextConfig(**sizes, architectures=["Gemma4ForCausalLM"]).save_pretrained(tmp_path)
    resolve(args(str(tmp_path), generator="tt-metal"))
    with pytest.raises(ClusterConfigError, match="Gemma4ForCausalLM"):
        resolve(args(str(tmp_path)))


def test_a_model_whose_layers_differ(tmp_path):
    from transformers import Gemma4Config, Gemma4TextConfig

    text = Gemma4TextConfig(num_hidden_layers=6, vocab_size=2048)
    whole = Gemma4Config(text_config=text, architectures=["Gemma4ForConditionalGeneration"])
    whole.save_pretrained(tmp_path)
    resolve(args(str(tmp_path), generator="tt-metal", max_model_len=4096))


@pytest.mark.parametrize("sizes", ["MllamaConfig", None])
def test_a_model_with_an_encoder_is_refused_before_its_sizes_are_read(sizes, tmp_path):
    architectures = ["MllamaForConditionalGeneration"]
    if sizes is None:
        content = {"architectures": architectures, "model_type": "mllama", "text_config": 3}
        (tmp_path / "config.json").write_text(json.dumps(content))
    else:
        import transformers

        getattr(transformers, sizes)(architectures=architectures).save_pretrained(tmp_path)
    with pytest.raises(ClusterConfigError, match="encoder-decoder models are not supported yet"):
        resolve(args(str(tmp_path), generator="tt-metal"))


@pytest.mark.parametrize("generator", [None, "tt-metal", "some.module:Class"])
def test_a_missing_folder_is_named_for_own_and_foreign_models(generator, tmp_path):
    with pytest.raises(ClusterConfigError, match=r"cannot read .*absent/config\.json: No such f"):
        resolve(args(str(tmp_path / "absent"), generator=generator))


def test_a_snapshot_in_a_cache_is_served_by_its_models_name(tmp_path):
    folder = tmp_path / "models--some-org--Tiny-8B" / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    fields = args(str(folder), max_model_len=2048)
    assert resolve(fields).served_model_name == "Tiny-8B"
    assert resolve({**fields, "model_name": "mine"}).served_model_name == "mine"
