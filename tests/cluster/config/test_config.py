"""A configuration that cannot work is refused before anything starts, with the path of the key."""

import copy
import json
from enum import Enum
from pathlib import Path

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

import configs
from cluster.cli import app as cli
from cluster.config.resolve import demo_model_folder, replica_engine, resolve
from cluster.config.serve_file import HttpOptions, ServeFile, read_serve_file
from cluster.errors import ClusterConfigError
from kv_transfer.keys import KeyRing
from replicas.config import GangConfig

CONFIGS = sorted(
    path
    for path in Path(configs.__file__).parent.glob("*.yaml")
    if not path.stem.startswith("faults")
)
ANY_MODEL = [path for path in CONFIGS if "  mesh:" not in path.read_text()]
"""A mesh takes only models whose sizes its tiles divide."""
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


class _Missing(Enum):
    """A value that stands for none; its name is the same in every test process."""

    MISSING = "missing"


MISSING = _Missing.MISSING
STORE = {"backend": "shm", "capacity_bytes": 2**20}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


@pytest.fixture
def good(model):
    """A whole file that works, as YAML would hold it."""
    return {
        "http_options": {"host": "127.0.0.1", "port": 8123},
        "applications": [
            {
                "name": "ttserve",
                "route_prefix": "/",
                "import_path": "cluster.app:build",
                "args": {
                    "model": str(model),
                    "engine": {"block_size": 32},
                    "router": {"max_queued_requests": 4},
                    "ingress": {"replicas": 1},
                    "pools": {
                        "prefill": {"replicas": 1, "engine": {"max_batch_size": 4}},
                        "decode": {"replicas": 2, "engine": {"tt_data_parallel": 2}},
                    },
                },
            }
        ],
    }


def changed(raw, path, value):
    """A copy in which the key at a path like `a.b[0].c` is another value, or gone."""
    raw = copy.deepcopy(raw)
    *parents, last = path.replace("[", ".[").split(".")
    at = raw
    for part in parents:
        at = at[int(part[1:-1])] if part.startswith("[") else at.setdefault(part, {})
    key = int(last[1:-1]) if last.startswith("[") else last
    if value is MISSING:
        del at[key]
    else:
        at[key] = value
    return raw


def write(folder, raw):
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def args_of(raw):
    return raw["applications"][0]["args"]


def load(path):
    return resolve(read_serve_file(path).args)


@pytest.mark.parametrize(
    ("pools", "policy"),
    [((), "fcfs"), (("decode",), "fcfs"), (("decode", "prefill"), "priority")],
)
def test_requests_have_a_priority_where_every_pool_schedules_by_it(good, pools, policy):
    args = args_of(good)
    for role in pools:
        args["pools"][role].setdefault("engine", {})["scheduling_policy"] = "priority"
    assert resolve(args).scheduling_policy == policy


def test_logits_of_one_pool_are_no_log_probabilities(good):
    args = args_of(good)
    assert resolve(args).logprobs_mode == "raw_logprobs"
    args["pools"]["decode"].setdefault("engine", {})["logprobs_mode"] = "raw_logits"
    assert resolve(args).logprobs_mode == "raw_logits"


def test_a_good_file_is_read(good, tmp_path, model):
    file = read_serve_file(write(tmp_path, good))
    http = file.http_options
    assert (file.name, http.host, http.port, file.url) == (
        "ttserve",
        "127.0.0.1",
        8123,
        "http://127.0.0.1:8123",
    )
    config = resolve(file.args)
    assert config.served_model_name == "tiny-llama"
    assert config.is_disaggregated
    assert {role: pool.replicas for role, pool in config.pools.items()} == {
        "prefill": 1,
        "decode": 2,
    }
    decode, prefill = config.engines["decode"], config.engines["prefill"]
    assert (decode.model, decode.tt_data_parallel, decode.kv_connector) == (str(model), 2, "p2p")
    assert (prefill.max_batch_size, prefill.tt_data_parallel) == (4, 1)
    assert decode.max_num_waiting == 0, "the queue is the router's"


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}
FILE_MISTAKES = [
    # a wrong key at every level
    ("htp_options", {}, "htp_options"),
    ("http_options.hots", "x", "http_options: .*`hots`"),
    ("applications[0].nmae", "x", r"applications\[0\]: .*`nmae`"),
    ("args.modle", "x", "args: .*`modle`"),
    ("args.router.max_queue", 1, "args.router: .*`max_queue`"),
    ("args.ingress.replica", 1, "args.ingress: .*`replica`"),
    ("args.pools.decode.replica", 1, "args.pools.* .*`replica`"),
    ("args.engine.blocksize", 32, "args.engine: .*`blocksize`"),
    ("args.pools.decode.engine.lanes", 2, "args.pools.decode.engine: .*`lanes`"),
    ("args.pools.extra", {}, "^args.pools: .*'extra'"),
    ("applications[0].deployments", [{"name": "x", "replicas": 2}], r"deployments\[0\].*`repl"),
    # a wrong type
    ("http_options.port", "8000", "http_options.port: Expected `int`"),
    ("http_options.port", 8000.5, "http_options.port: Expected `int`"),
    ("http_options.request_timeout_s", 30, "http_options: .*args.ingress.request_timeout_s"),
    ("http_options.host", 0, "http_options.host: Expected `str`"),
    ("applications", {}, "applications: Expected `array`"),
    ("args.model", 3, "args.model: Expected `str`"),
    ("args.pools", [], "args.pools: Expected `object`"),
    ("args.pools.decode.replicas", "two", "args.pools.*int"),
    ("args.pools.decode.replicas", True, "args.pools.*int"),
    ("args.router.queue_timeout_s", "1m", "args.router.queue_timeout_s: Exp"),
    ("args.engine.block_size", "32", "args.engine.block_size: Expected"),
    ("args.engine.dtype", "float8", "args.engine.dtype: Invalid enum"),
    ("args.pools.decode.engine.max_batch_size", None, "pools.decode.engine.max_b"),
    # missing, or one too many
    ("http_options", MISSING, "missing required field `http_options`"),
    ("http_options.host", MISSING, "http_options: .*missing required field `host`"),
    ("applications[0].name", MISSING, r"applications\[0\]: .*missing required field `name`"),
    ("args.pools", MISSING, "args: .*missing required field `pools`"),
    ("applications", [], "one ttserve application, got 0"),
    ("applications[0].import_path", "cluster.app:biuld", "import_path must be cluster.app:build"),
    # pools
    ("args.pools.decode", MISSING, "args.pools must hold .* got .'prefill'.$"),
    ("args.pools.both", {}, "args.pools must hold"),
    ("args.pools", {}, r"args.pools must hold .* got \[\]"),
    # values that cannot work
    ("args.pools.decode.replicas", 0, "args.pools.decode.replicas must be at le"),
    ("args.ingress.replicas", 0, "args.ingress.replicas must be at least 1"),
    ("args.ingress.resources", {"edge": "x"}, r"args.ingress.resources\[...\]"),
    ("args.ingress.resources", {"edge": -1}, "edge must be 0 or at least 0.0001"),
    ("args.ingress.resources", {"edge": 1e-5}, "args.ingress.resources.edge must"),
    ("args.ingress.resources", {"CPU": 1}, "set args.ingress.num_cpus"),
    ("args.pools.decode.resources", {"x": -1}, "args.pools.decode.resources.x mu"),
    ("args.ingress.max_body_bytes", 0, "args.ingress.max_body_bytes must be at"),
    ("args.ingress.max_body_bytes", 2**26 + 1, "max_body_bytes must be at most 67"),
    ("args.ingress.request_timeout_s", 0, "args.ingress.request_timeout_s must be"),
    ("args.ingress.response_store_bytes", -1, "args.ingress.response_store_bytes must not be"),
    ("args.ingress.response_store_age_s", 0, "args.ingress.response_store_age_s must be"),
    ("args.ingress.api_keys", "keys.yaml", "args.ingress.api_keys"),
    ("args.ingress.cors_origins", ["https://a/b"], "cors_origins: 'https://a/b' must be an origin"),
    ("args.ingress.cors_origins", ["*"], "set args.ingress.api_keys"),
    ("args.router.admission", {"tenant_header": "x-t", "tenants": {"a": {"max_requests": 0}}},
     "`max_requests` must be at least 1"),
    ("args.router.max_attempts", 0, "args.router.max_attempts must be at least 1"),
    ("args.router.max_queued_requests", -1, "args.router.max_queued_requests must"),
    ("args.router.queue_timeout_s", 0, "args.router.queue_timeout_s must be pos"),
    ("args.router.admission", {"ttft_s": 0}, "args.router.admission.ttft_s must be more than 0"),
    ("args.router.admission", {"tenants": {"a": {}}},
     "args.router.admission.tenants has no effect without"),
    ("args.router.admission", {"tenant_header": "x-t", "tenants": {"a": {"weight": 0}}},
     "args.router.admission.tenants.a.weight must be more than 0"),
    ("args.router.admission", {"tenant_header": "x-t", "tenants": {"a": {"weight": 1e-320}}},
     "args.router.admission.tenants.a.weight must be at least 0.001"),
    ("args.router.admission", {"tenant_header": "x-t", "tenants": {"m\u00fcller": {}}},
     "args.router.admission.tenants.'m\u00fcller' cannot be the value of a header"),
    ("args.router.admission", {"tenant_header": "x-t", "tenants": {"a" * 129: {}}},
     "up to 128 visible ASCII characters"),
    ("args.router.admission", {"tenant_header": "x: t"},
     "args.router.admission.tenant_header 'x: t' is not a valid header name"),
    ("args.model", "models/tiny", "args.model 'models/tiny' is a relative path"),
    ("args.model", "Demo", "args.model 'Demo' is a relative path"),
    ("args.model", "/no/such/model", "/no/such/model"),
    ("args.engine.model", "/x", "engine.model is set by the cluster"),
    ("args.pools.decode.engine.kv_connector", "p2p", "kv_connector is set by the"),
    ("args.engine.max_batch_size", 0, "max_batch_size must be at least 1, got 0"),
    ("args.pools.decode.engine.tt_data_parallel", 3, "32 .*multiple.* 3"),
    ("args.pools.decode.engine.max_num_batched_tokens", 8, "8 is less than .* 32"),
    ("args.pools.decode.engine.dtype", "bfloat16", "dtype is float32 .* bfloat16"),
    ("args.engine.speculative_config", {"method": "eagle", "num_speculative_tokens": 1},
     r"speculative_config.*method.*: Invalid enum value 'eagle'"),
    ("args.engine.speculative_config", DRAFTS | {"num_speculative_tokens": 129},
     "num_speculative_tokens must be at most 128, got 129"),
    ("args.engine.speculative_config", DRAFTS | {"prompt_lookup_min": 0},
     "prompt_lookup_min must be at least 1, got 0"),
    ("args.engine.speculative_config", DRAFTS | {"prompt_lookup_min": 4, "prompt_lookup_max": 3},
     "prompt_lookup_min 4 is more than speculative_config.prompt_lookup_max 3"),
    ("args.engine", {"speculative_config": DRAFTS, "mixed_batches": False},
     "speculative_config and mixed_batches: false exclude each other"),
    ("args.engine.block_size", 48, "block_size 48 .* is not a multiple of 32"),
    ("args.router.order", "decode", "args.router.order: Invalid enum value"),
    # KV transfer
    ("args.kv_connector", "pushed", "kv_connector must be .* multi.* 'pushed'"),
    ("args.kv_connector", None, "args.kv_connector: Expected `str`"),
    ("args.kv_connector", "pooled", "pooled does not move KV .* use multi"),
    ("args.kv_connector", "multi", "multi needs args.kv_store, such as .*backend"),
    ("args.kv_store", STORE, "kv_store is for kv_connector pooled and multi"),
    ("args.kv_store", {"backend": "shm"}, "args.kv_store: .*`capacity_bytes`"),
    ("args.kv_store", STORE | {"capcity": 1}, "args.kv_store: .*`capcity`"),
    ("args.kv_store", STORE | {"unit_tokens": 48}, "multiple of 32, got 48"),
    ("args.kv_store", STORE | {"timeout_s": 0}, "timeout_s must be positive"),
    ("args.key_file", "keys", "args.key_file 'keys' is a relative path"),
    ("args.router.route_log", "routes", "args.router.route_log 'routes' is a relative path"),
    ("args.engine.keys", ["x" * 16], "engine.keys is set by the cluster"),
    ("args.pools.decode.engine.kv_store", STORE, "kv_store is set by the cluster"),
    ("args.engine.gang", {"rank": 0}, "engine.gang is set by the cluster"),
    ("args.pools.decode.gang_size", 0, "2 is not a multiple of gang_size 0"),
    ("args.pools.prefill.gang_size", 2, "1 is not a multiple of gang_size 2"),
    ("args.pools.decode.gang_size", 2, "the model has no experts"),
    ("args.engine.num_blocks", 1, "num_blocks must be at least 2"),
    ("args.engine.num_blocks", 5, "max_model_len 256 .* holds 128 tokens"),
    ("args.engine.kv_cache_memory_bytes", 1000, "1000 is too small .* 16384 b"),
    ("args.engine.kv_cache_memory_bytes", 65536, "256 does not fit .* tokens"),
    ("args.engine.max_model_len", 257, "max_model_len 257 exceeds .* 256"),
    ("args.engine.swap_space", 4, "args.engine.swap_space of vLLM is refused: preempted"),
    ("args.pools.decode.engine.enforce_eager", 1, "decode.engine.enforce_eager must be true or"),
]  # fmt: skip


def test_options_of_vllm_reach_the_engines_of_every_pool():
    pools = {"prefill": {"engine": {"enforce_eager": True}}, "decode": {}}
    engine = {"load_format": "dummy", "dtype": "float16", "compilation_config": "{}"}
    engines = resolve({"pools": pools, "engine": engine}).engines
    assert {e.load_format for e in engines.values()} == {"random"}
    assert {e.dtype for e in engines.values()} == {"float32"}


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    FILE_MISTAKES,
    ids=[f"{path.rpartition('args.')[2]}={value}" for path, value, _ in FILE_MISTAKES],
)
def test_mistake_is_refused_with_its_path_by_validate_and_by_the_loader(
    good, tmp_path, path, value, reason
):
    in_file = f"applications[0].{path}" if path.startswith("args.") else path
    file = write(tmp_path, changed(good, in_file, value))
    with pytest.raises(ClusterConfigError, match=reason):
        load(file)
    result = CliRunner().invoke(cli, ["validate", str(file)])
    assert result.exit_code == 2
    assert str(file) in result.output


def test_two_applications_are_refused(good, tmp_path):
    good["applications"] *= 2
    with pytest.raises(ClusterConfigError, match="got 2"):
        load(write(tmp_path, good))


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("fd00::7", "http://[fd00::7]:8000"),
        ("llm.example", "http://llm.example:8000"),
    ],
)
def test_the_url_of_a_file_is_one_that_a_client_on_the_host_can_ask(good, host, url):
    good["http_options"] = {"host": host, "port": 8000}
    assert msgspec.convert(good, ServeFile).url == url


@pytest.mark.parametrize("content", ["a: [", "", "- 1", "\x00", None])
def test_file_that_holds_no_config_is_refused(tmp_path, content):
    path = tmp_path / "serve.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ClusterConfigError):
        load(path)
    assert CliRunner().invoke(cli, ["validate", str(path)]).exit_code == 2


def test_model_folder_that_is_no_model_is_refused(good, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    raw = changed(good, "applications[0].args.model", str(empty))
    with pytest.raises(ClusterConfigError, match="empty"):
        load(write(tmp_path, raw))


def test_validate_accepts_a_good_file_and_names_each_bad_one(good, tmp_path):
    path = write(tmp_path, good)
    result = CliRunner().invoke(cli, ["validate", str(path)])
    # 2 layers, 2 planes, 2 heads of 16 elements of 4 bytes. A null block in each of two lanes.
    kv = (
        "512 bytes of KV per token in 2 layers of float32; room for 2047.{} sequences of 256 tokens"
    )
    expected = f"{path}: ok\n  decode: {kv.format(75)}\n  prefill: {kv.format(88)}\n"
    assert (result.exit_code, result.output) == (0, expected)
    result = CliRunner().invoke(cli, ["validate", str(path), str(tmp_path / "none.yaml")])
    assert result.exit_code == 2
    assert f"{path}: ok" in result.output
    assert "none.yaml" in result.output


def test_combined_pool_needs_no_connector(good):
    args = {**args_of(good), "pools": {"both": {"engine": {"block_size": 16}}}}
    config = resolve(args)
    assert not config.is_disaggregated
    assert config.engines["both"].kv_connector is None, "any block size will do"
    assert config.engines["both"].block_size == 16


@pytest.mark.parametrize("pools", [{"both": {}}, {"prefill": {}, "decode": {}}], ids=len)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", "", "localhost"])
def test_a_bad_data_host_is_refused_for_any_pools(host, pools):
    with pytest.raises(ClusterConfigError, match=r"args\.data_host: cannot listen on"):
        resolve({"pools": pools, "data_host": host})


def test_pools_may_have_blocks_of_two_sizes(good):
    config = resolve(changed(args_of(good), "pools.decode.engine.block_size", 64))
    assert [config.engines[role].block_size for role in ("prefill", "decode")] == [32, 64]


def test_decode_pool_may_convert_another_dtype(good):
    args = changed(args_of(good), "pools.decode.engine.dtype", "bfloat16")
    with pytest.raises(ClusterConfigError, match=r"kv_accept_dtypes: \[float32\]"):
        resolve(args)
    resolve(changed(args, "pools.decode.engine.kv_accept_dtypes", ["float32"]))


@pytest.mark.parametrize(
    ("pools", "name", "role"), [({"both": {}}, "pooled", "both"), (None, "multi", "decode")]
)
def test_converted_kv_must_not_get_into_a_store(good, pools, name, role):
    args = {**args_of(good), "kv_connector": name, "kv_store": STORE}
    args["pools"] = pools or args["pools"]
    resolve(args)
    accepting = changed(args, f"pools.{role}.engine.kv_accept_dtypes", ["bfloat16"])
    with pytest.raises(
        ClusterConfigError, match=r"kv_accept_dtypes and .* converted KV from the store"
    ):
        resolve(accepting)


def test_no_conversion_is_recommended_where_none_is_allowed(good):
    args = changed(args_of(good), "pools.decode.engine.dtype", "bfloat16")
    with pytest.raises(ClusterConfigError, match=r"make them equal$"):
        resolve({**args, "kv_connector": "multi", "kv_store": STORE})


@pytest.mark.parametrize(
    ("pools", "name"), [({"both": {}}, "pooled"), (None, "multi"), ({"both": {}}, "a.b:C")]
)
def test_store_reaches_every_engine(good, pools, name):
    args = {**args_of(good), "kv_connector": name, "kv_store": STORE}
    args["pools"] = pools or args["pools"]
    config = resolve(args)
    for role in config.pools:
        engine = config.engines[role]
        assert engine.kv_connector == name
        assert (engine.kv_store.backend, engine.kv_store.capacity_bytes) == ("shm", 2**20)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_connector": "multi", "kv_store": STORE}, "multi is for prefill and decode pools"),
        ({"kv_connector": "pooled"}, "pooled needs args.kv_store"),
        (
            {"kv_connector": "pooled", "kv_store": STORE | {"unit_tokens": 96}},
            "unit_tokens 96 is not a multiple of block_size 64 of pool both",
        ),
        (
            {"kv_connector": "pooled", "kv_store": STORE | {"backend": "redis"}},
            "args.kv_store.backend must be one of .*shm.* got 'redis'",
        ),
        (
            {"kv_connector": "pooled", "kv_store": STORE | {"unit_tokens": 480},
             "engine": {"block_size": 48}},
            "block_size 48 of pool both is not a multiple of 32",
        ),
    ],
)  # fmt: skip
def test_mistake_about_the_store_of_a_combined_pool_is_refused(good, change, reason):
    pools = {"both": {"engine": {}}}
    args = {**args_of(good), "engine": {"block_size": 64}, "pools": pools, **change}
    with pytest.raises(ClusterConfigError, match=reason):
        resolve(args)


def test_a_model_may_have_several_names(good):
    config = resolve({**args_of(good), "model_name": ["first", "second"]})
    assert config.served_model_names == ("first", "second")
    assert config.served_model_name == "first"


@pytest.mark.parametrize("names", [[], [""], ["a", "a"]], ids=["none", "empty", "repeated"])
def test_names_that_name_nothing_are_refused(good, names):
    with pytest.raises(ClusterConfigError, match="model_name"):
        resolve({**args_of(good), "model_name": names})


@pytest.mark.parametrize("path", ["llm", "/", "/llm/", "/a b", "//llm"])
def test_a_root_path_that_no_path_begins_with_is_refused(good, path):
    with pytest.raises(ClusterConfigError, match=r"args\.ingress\.root_path"):
        resolve({**args_of(good), "ingress": {"root_path": path}})


def test_override_changes_model_host_and_port_and_nothing_else(good, tmp_path):
    good["applications"][0]["args"]["model_name"] = "named"
    file = read_serve_file(write(tmp_path, good))
    assert resolve(file.args).served_model_name == "named"
    assert file.override() == file
    other = file.override(
        args={"model": args_of(good)["model"]}, http_options={"host": "0.0.0.0", "port": 1}
    )
    http = other.http_options
    assert (http.host, http.port, other.url) == ("0.0.0.0", 1, "http://127.0.0.1:1")
    assert resolve(other.args).served_model_name == "tiny-llama", "another model has another name"
    assert other.args["pools"] == file.args["pools"]
    assert file.args["model_name"] == "named", "the file itself stays as it is"


@pytest.mark.parametrize("path", ANY_MODEL, ids=[path.stem for path in ANY_MODEL])
def test_shipped_config_works_with_any_model(path, model, tmp_path):
    raw = yaml.safe_load(path.read_text())
    file = ServeFile(
        http_options=HttpOptions(**raw["http_options"]),
        applications=read_serve_file(
            write(tmp_path, changed(raw, "applications[0].args.model", str(model)))
        ).applications,
    )
    config = resolve(file.args)
    assert file.http_options.host == "127.0.0.1", "loopback unless told otherwise"
    assert args_of(raw)["model"] == "demo"
    for role in config.pools:
        assert config.engines[role].model == str(model)


@pytest.mark.skipif(
    not (demo_model_folder() / "config.json").is_file(), reason="the demo model is not built"
)
@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_each_shipped_config_loads(path):
    assert load(path).served_model_name == "demo"
    assert CliRunner().invoke(cli, ["validate", str(path)]).exit_code == 0


def test_shipped_configs_are_the_four_shapes():
    shapes = {
        path.stem: {
            role: (pool.get("replicas", 1), pool["engine"].get("tt_data_parallel", 1))
            for role, pool in args_of(yaml.safe_load(path.read_text()))["pools"].items()
        }
        for path in CONFIGS
    }
    assert shapes["demo"] == {"prefill": (1, 1), "decode": (1, 2)}
    assert shapes["single"] == {"both": (1, 1)}
    assert shapes["pooled"] == {"both": (2, 1)}
    assert {role: n for role, (n, _) in shapes["2p2d"].items()} == {"prefill": 2, "decode": 2}


def test_configs_for_several_hosts_survive_the_death_of_an_ingress():
    several = [path for path in CONFIGS if read_serve_file(path).args.get("data_host") == "node"]
    assert several
    for path in several:
        assert resolve(read_serve_file(path).args).ingress.replicas >= 2, path


def test_demo_model_is_found_wherever_the_process_runs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = resolve({"pools": {"both": {}}})
    assert config.model_folder == Path(configs.__file__).resolve().parent / "demo-model"
    assert config.served_model_name == "demo"


def test_a_gang_needs_experts_that_divide_and_a_network_of_its_own(tmp_path):
    folder = tmp_path / "experts"
    folder.mkdir()
    settings = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = {**MODEL, "architectures": ["MixtralForCausalLM"], **settings}
    (folder / "config.json").write_text(json.dumps(model))

    def resolved(size, max_replicas=None, **changes):
        pool = {"replicas": size, "gang_size": size, "max_replicas": max_replicas}
        pools = {"both": pool}
        return resolve({"model": str(folder), "pools": pools, **changes})

    assert resolved(2).pools["both"].gang_size == 2
    with pytest.raises(ClusterConfigError, match="4 experts do not divide by gang_size 3"):
        resolved(3)
    hot = [[0, 1, 2], [0], [1], [2]]
    assert resolved(3, engine={"expert_placement": hot}).pools["both"].gang_size == 3
    with pytest.raises(ClusterConfigError, match=r"expert_placement\[0\].*for gang_size 2"):
        resolved(2, engine={"expert_placement": hot})
    with pytest.raises(ClusterConfigError, match="gang_size is 1, so remove expert_placement"):
        resolved(1, engine={"expert_placement": hot})
    with pytest.raises(ClusterConfigError, match="kv_network: plain"):
        resolved(2, data_host="node")
    with pytest.raises(ClusterConfigError, match="max_replicas and gang_size exclude each other"):
        resolved(2, max_replicas=4)
    assert resolved(2, data_host="node", kv_network="plain").data_host == "node"
    place = GangConfig(name="g", rank=1, size=2, hub="127.0.0.1:1")
    engine = replica_engine(
        resolved(2), "both", 1, host="127.0.0.1", keys=KeyRing(), gang=place
    )  # fmt: skip
    assert engine.gang == place
