"""A configuration is resolved once per process, after every override, into a value that stays."""

import dataclasses
import sys
import threading
import warnings
from collections import Counter
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from cluster import cli
from cluster.config import resolve as resolve_module
from cluster.config import serve_file
from cluster.config.resolve import resolve
from cluster.config.serve_file import read_serve_file
from cluster.errors import ClusterConfigError
from cluster.lab.simulation.command import SimulateError, load_cluster
from cluster.lifecycle import supervisor
from kv_transfer.keys import KeyRing

KEYS = KeyRing((bytes(16),))

with warnings.catch_warnings():
    # Serve declares its own fields in a way that its pydantic no longer likes.
    warnings.simplefilter("ignore")
    from cluster.lifecycle import deployments, driver

MESH = {"model": "Llama-3.1-8B", "board": "n150"}
KILL = {"at_s": 1.0, "target": "decode/1", "kind": "kill"}


@pytest.fixture
def raw():
    """A file of simulated pools, as YAML would hold it."""
    args = {
        "engine": {"block_size": 64, "max_model_len": 2048, "simulated_mesh": dict(MESH)},
        "pools": {"prefill": {"resources": {"ours": 1}}, "decode": {"replicas": 2}},
        "ingress": {"resources": {"ours": 0.001}},
    }
    application = {"name": "ttserve", "import_path": "cluster.app:build", "args": args}
    return {"http_options": {"host": "127.0.0.1"}, "applications": [application]}


@pytest.fixture
def write(tmp_path):
    def write(raw, name="serve.yaml"):
        path = tmp_path / name
        path.write_text(yaml.safe_dump(raw))
        return path

    return write


# --- open requests of an ingress -----------------------------------------------------------------


def ongoing(raw, slots_per_replica, **ingress):
    """Resolved limit of open requests where two decode replicas have so many slots each."""
    args = raw["applications"][0]["args"]
    args["pools"]["decode"]["engine"] = {"max_batch_size": slots_per_replica}
    return resolve({**args, "ingress": ingress}).ingress.max_ongoing_requests


def test_an_ingress_holds_at_least_a_thousand_requests_open(raw):
    assert ongoing(raw, 16) == 1024


def test_an_ingress_holds_enough_requests_open_for_its_share_of_the_slots(raw):
    raw["applications"][0]["args"]["pools"]["decode"]["max_replicas"] = 200
    share = 200 * 16 / 2
    assert ongoing(raw, 16, replicas=2) >= 2 * share


def test_as_many_open_requests_as_slots_will_do(raw):
    assert ongoing(raw, 16, max_ongoing_requests=16, replicas=2) == 16


def test_slots_that_no_open_request_could_fill_are_refused_with_both_numbers(raw):
    with pytest.raises(ClusterConfigError, match=r"15 x 2 ingress replicas .* the 32 decode slots"):
        ongoing(raw, 16, max_ongoing_requests=15, replicas=2)


@pytest.mark.parametrize("host", ["llm.example:8000", "https://llm.example", "LLM.example", ""])
def test_an_allowed_host_is_a_name_without_port(raw, host):
    with pytest.raises(ClusterConfigError, match=r"^args\.ingress\.allowed_hosts"):
        ongoing(raw, 16, allowed_hosts=[host])


@pytest.mark.parametrize("key", ["max_ongoing_requests", "max_queued_requests"])
def test_request_limits_of_serve_are_refused(raw, write, key):
    application = raw["applications"][0]
    application["deployments"] = [{"name": "ingress", key: 5}]
    with pytest.raises(ClusterConfigError, match=key):
        read_serve_file(write(raw))
    # As Serve writes a file.
    application["deployments"] = [{"name": "ingress", key: None}]
    read_serve_file(write(raw))


# --- overrides -----------------------------------------------------------------------------------


OVERRIDES = [
    ({"args": {"model": "models/tiny"}}, "^args.model 'models/tiny' is a relative path"),
    ({"args": {"model": "/no/such/model"}}, "^args: cannot read /no/such/model/config.json"),
    ({"args": {"model": 3}}, "^args.model: Expected `str`"),
    ({"http_options": {"host": ""}}, "^http_options.host: Expected `str` of length >= 1"),
    ({"http_options": {"host": 3}}, "^http_options.host: Expected `str`"),
    ({"http_options": {"port": 0}}, "^http_options.port: Expected `int` >= 1"),
    ({"http_options": {"port": 65535}}, "^http_options.port: Expected `int` <= 65534"),
    ({"http_options": {"port": "8000"}}, "^http_options.port: Expected `int`"),
    ({"args": {"faults": [{**KILL, "kind": "boom"}]}}, r"^args.faults: \[0\].kind: .*'boom'"),
    ({"args": {"faults": [{**KILL, "target": "decode/2"}]}}, r"^args.faults: \[0\].target: "),
    ({"args": {"faults": 3}}, "^args.faults: Expected `array`"),
    ({"args": {"router": {"policy": "best"}}}, "^args.router.policy: Invalid enum value 'best'"),
    ({"args": {"pools": {"decode": {"replicas": 0}}}}, "^args.pools.decode.replicas must be at le"),
    ({"args": {"pools": {"decode": {"replicas": "2"}}}}, r"^args.pools.*replicas: Expected `int`"),
    ({"args": {"pools": {"decoed": {"replicas": 2}}}}, "^args.pools: .*'decoed'"),
]


def merged(read, changes):
    for key, value in changes.items():
        read[key] = merged(read.setdefault(key, {}), value) if isinstance(value, dict) else value
    return read


@pytest.mark.parametrize(("changes", "reason"), OVERRIDES, ids=[str(c) for c, _ in OVERRIDES])
def test_an_override_is_refused_as_the_same_file_is(raw, write, changes, reason):
    file = read_serve_file(write(raw))
    with pytest.raises(ClusterConfigError, match=reason) as overridden:
        resolve(file.override(**changes).args)
    merged(raw["http_options"], changes.get("http_options", {}))
    merged(raw["applications"][0]["args"], changes.get("args", {}))
    with pytest.raises(ClusterConfigError) as written:
        resolve(read_serve_file(write(raw)).args)
    assert str(overridden.value) == str(written.value)


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--model", "models/tiny", "args.model 'models/tiny' is a relative path"),
        ("--host", "", "http_options.host: Expected `str` of length >= 1"),
        ("--port", "65535", "http_options.port: Expected `int` <= 65534"),
        ("--faults", [{**KILL, "target": "decode/2"}], "args.faults: [0].target: 'decode/2'"),
        ("--faults", [{**KILL, "kind": "boom"}], "plan.yaml: [0].kind: unknown kind 'boom'"),
    ],
)
def test_serve_refuses_each_override_that_cannot_work(raw, write, option, value, reason):
    value = value if isinstance(value, str) else str(write(value, "plan.yaml"))
    result = CliRunner().invoke(cli.app, ["serve", "--config", str(write(raw)), option, value])
    assert result.exit_code == 2
    assert reason in result.output


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("router",), {"policy": "best"}, "args.router.policy: Invalid enum value 'best'"),
        (("pools", "decode", "replicas"), 0, "args.pools.decode.replicas must be at least 1"),
        (("pools",), 3, "args.pools: Expected `object`"),
        (("pools",), {"decode": {}}, "args.pools must hold"),
        (("router",), 3, "args.router: Expected `object`"),
    ],
)
def test_simulate_scales_and_changes_no_file_that_is_wrong_itself(raw, write, path, value, reason):
    *parents, last = path
    at = raw["applications"][0]["args"]
    for key in parents:
        at = at[key]
    at[last] = value
    for options in ({}, {"replicas": 6}):
        with pytest.raises(SimulateError, match=f"serve.yaml: {reason}"):
            load_cluster(write(raw), **options)


def test_a_bad_value_that_is_overridden_is_not_refused(raw, write):
    raw["applications"][0]["args"] |= {"model": "/no/such/model", "router": {"policy": "best"}}
    changes = {"model": "demo", "router": {"policy": "round_robin"}}
    config = resolve(read_serve_file(write(raw)).override(args=changes).args)
    assert (config.served_model_name, config.router.policy) == ("demo", "round_robin")
    assert config.router.max_attempts == 3


def test_a_block_size_that_no_unit_of_a_store_can_be_is_named(raw):
    store = {"backend": "shm", "capacity_bytes": 2**20}
    args = {"engine": {"block_size": 0}, "pools": {"both": {}}}
    with pytest.raises(ClusterConfigError, match=r"^args: block_size must be at least 1, got 0"):
        resolve({**args, "kv_connector": "pooled", "kv_store": store})


# --- once ----------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch):
    """Counts what a process reads and resolves."""
    counts = Counter()

    def counting(name, function):
        def count(*arguments, **named):
            counts[name] += 1
            return function(*arguments, **named)

        return count

    monkeypatch.setattr(serve_file, "_read_yaml", counting("files", serve_file._read_yaml))
    for name, key in (("ClusterConfig", "configs"), ("load_engine_model", "models")):
        monkeypatch.setattr(resolve_module, name, counting(key, getattr(resolve_module, name)))
    return counts


def test_the_command_line_resolves_once(raw, write, made, monkeypatch):
    monkeypatch.setattr(supervisor, "serve", lambda *_: 0)
    arguments = ["--config", str(write(raw)), "--model", "demo", "--port", "8123"]
    assert CliRunner().invoke(cli.app, ["serve", *arguments]).exit_code == 0
    assert made == {"files": 1, "configs": 1, "models": 2}


def test_the_driver_resolves_once(raw, write, made, monkeypatch, tmp_path, capsys):
    stop = threading.Event()
    stop.set()
    monkeypatch.setattr(driver, "_stop_event", lambda: stop)
    monkeypatch.setattr(driver.ray, "cluster_resources", lambda: {"CPU": 8.0, "ours": 2.0})
    monkeypatch.setattr(driver, "_wait_until_running", lambda *_: True)
    monkeypatch.setattr(driver.ray, "shutdown", lambda: None)
    deployed = []
    monkeypatch.setattr(driver, "_deploy", lambda _, application: deployed.append(application))
    for name in ("_start_ray", "_stop_serve"):
        monkeypatch.setattr(driver, name, lambda *_: None)
    options = supervisor.ServeOptions(
        config=str(write(raw)), port=8123, folder=str(tmp_path / "private")
    )
    monkeypatch.setattr(sys, "argv", ["server", msgspec.json.encode(options).decode()])
    assert driver.main() == 0
    assert made == {"files": 1, "configs": 1, "models": 2}
    assert "127.0.0.1:8123/v1 serves the model 'demo'" in capsys.readouterr().out
    [application] = deployed
    assert application._bound_deployment.init_args[0] == raw["applications"][0]["args"]


@pytest.fixture
def started(monkeypatch, as_replica):
    """What replicas would have started, and where."""
    as_replica(KEYS)
    engines = []

    class Engine:
        description = SimpleNamespace(incarnation="0")

        def call_at_exit(self, callback):
            pass

    def start_engine(engine, *, host, **_):
        engines.append((host, engine))
        return Engine()

    monkeypatch.setattr(deployments, "start_engine", start_engine)
    monkeypatch.delattr(deployments.PoolReplica, "__del__")  # nothing was started
    return engines


@pytest.mark.parametrize(
    ("data_host", "address"), [("node", "10.0.0.7"), ("10.0.0.8", "10.0.0.8"), (None, "127.0.0.1")]
)
def test_an_engine_listens_where_its_replica_is(raw, started, monkeypatch, data_host, address):
    monkeypatch.setattr(deployments.ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    args = raw["applications"][0]["args"]
    if data_host is not None:
        args["data_host"] = data_host
    deployments.PoolReplica(args, "decode")
    [(host, engine)] = started
    assert (host, engine.kv_endpoint) == (address, f"tcp://{address}:*")


@pytest.mark.usefixtures("started")
def test_a_replica_resolves_once(raw, made):
    args = raw["applications"][0]["args"]
    deployments.PoolReplica(args, "decode")
    assert made == {"configs": 1, "models": 2}
    deployments.IngressReplica(args)
    assert made == {"configs": 2, "models": 4}


# --- frozen --------------------------------------------------------------------------------------


def parts(value):
    """A value and everything that can be reached from it."""
    yield value
    if isinstance(value, msgspec.Struct):
        below = list(msgspec.structs.asdict(value).values())
    elif dataclasses.is_dataclass(value):
        below = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, MappingProxyType):
        below = [*value.keys(), *value.values()]
    else:
        below = list(value) if isinstance(value, tuple) else []
    for one in below:
        yield from parts(one)


@pytest.fixture
def config(raw):
    return resolve({**raw["applications"][0]["args"], "faults": [KILL]})


def test_the_configuration_is_deeply_immutable(config):
    plain = (str, int, float, bool, type(None), Path, tuple, MappingProxyType)
    values = list(parts(config))
    assert len(values) > 100
    for value in values:
        if isinstance(value, plain):
            continue
        names = (
            value.__struct_fields__
            if isinstance(value, msgspec.Struct)
            else [field.name for field in dataclasses.fields(value)]
        )
        for name in names:
            with pytest.raises(AttributeError):
                setattr(value, name, None)


def test_mappings_are_immutable_too(config):
    resources = (config.pools["prefill"].resources, config.ingress.resources)
    for mapping in (config.pools, config.engines, *resources):
        with pytest.raises(TypeError):
            mapping["decode"] = None
        with pytest.raises(AttributeError):
            mapping.clear()


def test_later_changes_of_the_args_do_not_change_the_configuration(raw):
    args = raw["applications"][0]["args"]
    config, again = resolve(args), resolve(args)
    args["pools"]["prefill"]["resources"]["ours"] = 2
    args["engine"]["simulated_mesh"]["board"] = "T3K"
    del args["pools"]["decode"]
    assert config == again
    assert config.pools["prefill"].resources == {"ours": 1}


def test_the_longest_sequence_is_that_of_the_shortest_pool(raw):
    args = raw["applications"][0]["args"]
    args["pools"]["decode"]["engine"] = {"max_model_len": 1024}
    assert resolve(args).max_model_len == 1024
