"""A fault plan on its way from a file to the one replica that it is about."""

import time
import warnings
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import configs
from cluster import cli
from cluster.config.resolve import replica_engine, resolve
from cluster.config.serve_file import read_faults, read_serve_file
from cluster.errors import ClusterConfigError
from cluster.lifecycle import supervisor
from kv_transfer.keys import KeyRing
from replicas.faults import KINDS, FaultPlan

with warnings.catch_warnings():
    # Serve declares its own fields in a way that its pydantic no longer likes.
    warnings.simplefilter("ignore")
    from cluster.app import build
    from cluster.lifecycle import deployments

FOLDER = Path(configs.__file__).parent
KILL = {"at_s": 30, "target": "decode/1", "kind": "kill"}
SLOW = {"at_s": 5.5, "target": "decode/1", "kind": "slow", "factor": 2.0}
MESH = {"model": "Llama-3.1-8B", "board": "n150"}

KEYS = KeyRing((bytes(16),))


@pytest.fixture
def args():
    return {
        "engine": {"block_size": 64, "max_model_len": 2048, "simulated_mesh": dict(MESH)},
        "pools": {"prefill": {}, "decode": {"replicas": 2}},
        "faults": [KILL, {**KILL, "target": "prefill/0"}, SLOW],
    }


@pytest.fixture
def write(tmp_path):
    def write(name, raw):
        path = tmp_path / name
        path.write_text(yaml.safe_dump(raw))
        return path

    return write


def serve_file(args):
    application = {"name": "ttserve", "import_path": "cluster.app:build", "args": args}
    return {"http_options": {"host": "127.0.0.1"}, "applications": [application]}


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ([{**KILL, "kind": "boom"}], r"args\.faults: \[0\]\.kind: unknown kind 'boom'"),
        ([KILL, {**KILL, "target": "decode/2"}], r"args\.faults: \[1\]\.target: .*decode/0 to"),
        ([{**KILL, "target": "both/0"}], r"args\.faults: \[0\]\.target: .*no pool 'both'"),
        ({}, "args.faults"),
    ],
)
def test_a_plan_that_cannot_work_is_refused_with_its_entry(args, faults, reason):
    with pytest.raises(ClusterConfigError, match=reason):
        build({**args, "faults": faults})


def test_a_plan_for_engines_on_a_real_device_is_refused(args):
    del args["engine"]["simulated_mesh"]
    args["engine"]["block_size"] = 32
    with pytest.raises(ClusterConfigError, match=r"\[0\]: only engines on a simulated mesh"):
        resolve(args)


@pytest.mark.parametrize("key", ["faults", "fault_epoch_unix_s"])
@pytest.mark.parametrize("where", ["args.engine", "args.pools.decode.engine"])
def test_faults_of_all_replicas_of_a_pool_are_refused(args, key, where):
    mesh = {**MESH, key: [] if key == "faults" else 1.0}
    if where == "args.engine":
        args["engine"]["simulated_mesh"] = mesh
    else:
        args["pools"]["decode"]["engine"] = {"simulated_mesh": mesh}
    with pytest.raises(ClusterConfigError, match=rf"{where}\.simulated_mesh\.{key} is set by"):
        resolve(args)


# --- from the file to the args -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["plan.yaml", "plan.json"])
def test_a_plan_is_read_from_a_file_and_goes_into_the_args(args, write, name):
    del args["faults"]
    file = read_serve_file(write("serve.yaml", serve_file(args)))
    plan = read_faults(write(name, [KILL, SLOW]))
    entries = resolve(file.override(args={"faults": plan}).args).fault_plan.faults
    assert [(f.at_s, f.target, f.kind, f.factor) for f in entries] == [
        (30.0, "decode/1", "kill", 1.0),
        (5.5, "decode/1", "slow", 2.0),
    ]
    assert "faults" not in file.args, "the file itself stays as it is"


def test_a_plan_file_overrides_the_args(args, write):
    path = str(write("serve.yaml", serve_file(args)))

    def faults(plan=None):
        options = supervisor.ServeOptions(config=path, faults=plan)
        return resolve(options.read().args).fault_plan.faults

    assert len(faults()) == 3
    assert faults(str(write("plan.yaml", []))) == ()


def test_a_plans_file_that_cannot_be_used_is_named(tmp_path, write):
    with pytest.raises(ClusterConfigError, match=r"plan\.yaml: \[0\]\.kind"):
        read_faults(write("plan.yaml", [{**KILL, "kind": "boom"}]))
    with pytest.raises(ClusterConfigError, match=r"cannot read .*none\.yaml"):
        read_faults(tmp_path / "none.yaml")


def test_serve_refuses_a_wrong_plan_and_passes_a_right_one_on(args, write, monkeypatch):
    config = write("serve.yaml", serve_file({**args, "faults": []}))
    seen = []
    monkeypatch.setattr(supervisor, "serve", lambda options, *_: seen.append(options) or 0)
    for plan, code in (
        (write("bad.yaml", [{**KILL, "target": "decode/7"}]), 2),
        (write("good.yaml", [KILL]), 0),
    ):
        arguments = ["serve", "--config", str(config), "--faults", str(plan)]
        result = CliRunner().invoke(cli.app, arguments)
        assert result.exit_code == code, result.output
    assert [options.faults for options in seen] == [str(plan)]


def test_the_example_has_every_kind_and_fits_its_config():
    entries = read_faults(FOLDER / "fault-plans" / "example.yaml")
    plan = FaultPlan.parse(entries)
    of_the_simulator_alone = {"replace", "flip"}
    assert {fault.kind for fault in plan.faults} == set(KINDS) - of_the_simulator_alone
    file = read_serve_file(FOLDER / "sim-t3k-2p2d.yaml").override(args={"faults": entries})
    assert resolve(file.args).fault_plan == plan


# --- from the args to the replica --------------------------------------------------------------


def test_a_replica_gets_its_own_faults_and_no_others(args):
    config = resolve({**args, "fault_epoch_unix_s": 1e9})

    def engine(role, rank):
        own = {"host": "127.0.0.1", "keys": KeyRing()}
        return replica_engine(config, role, rank, **own)

    mesh = engine("decode", 1).simulated_mesh
    assert [fault.kind for fault in mesh.faults] == ["kill", "slow"]
    assert mesh.fault_epoch_unix_s == 1e9
    assert engine("decode", 0) == config.engines["decode"]
    assert [f.kind for f in engine("prefill", 0).simulated_mesh.faults] == ["kill"]


def test_faults_count_from_the_build(args):
    before_s = time.time()
    ingress = build(args)._bound_deployment
    (of_ingress,) = ingress.init_args
    epoch_s = of_ingress["fault_epoch_unix_s"]
    assert before_s <= epoch_s <= time.time()
    for pool in ingress.init_kwargs.values():
        assert pool._bound_deployment.init_args[0]["fault_epoch_unix_s"] == epoch_s
    assert "fault_epoch_unix_s" not in args
    assert resolve(of_ingress).fault_plan == resolve(args).fault_plan


def test_without_faults_the_args_are_passed_on_as_they_are(args):
    del args["faults"]
    assert build(args)._bound_deployment.init_args[0] == args


@pytest.mark.parametrize(("rank", "kinds"), [(1, ["kill", "slow"]), (0, [])])
def test_a_pool_replica_finds_its_faults_by_serves_rank(args, started, as_replica, rank, kinds):
    as_replica(KEYS, rank)
    deployments.PoolReplica(args, "decode")
    assert [fault.kind for fault in started[0].simulated_mesh.faults] == kinds
    assert started[0].keys == KEYS
