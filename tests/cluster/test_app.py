"""What `serve deploy` calls refuses what `ttserve validate` refuses, and binds the rest."""

import asyncio
import json
import warnings
from types import SimpleNamespace

import msgspec
import pytest

from cluster.config.resolve import resolve
from cluster.config.serve_file import DeploymentOverride
from cluster.errors import ClusterConfigError
from kv_transfer.keys import KeyRing
from replicas.errors import EngineDeadError
from replicas.launch import child_environment
from replicas.tt.meshes import mesh_spec
from tests.cluster.config.test_config import MODEL, changed

with warnings.catch_warnings():
    # Serve declares its own fields in a way that its pydantic no longer likes.
    warnings.simplefilter("ignore")
    from ray.serve.schema import DeploymentSchema

    from cluster.app import build
    from cluster.lifecycle import deployments as deployments_module

KEYS = KeyRing((bytes(16),))


@pytest.fixture
def args(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return {
        "model": str(tmp_path),
        "ingress": {"replicas": 3},
        "router": {"max_queued_requests": 5},
        "pools": {
            "prefill": {"replicas": 2, "resources": {"TTNPU": 1}, "num_cpus": 0.5},
            "decode": {"drain_timeout_s": 7},
        },
    }


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("modle", "x", "args: .*`modle`"),
        ("model", "relative/model", "args.model 'relative/model' is a relative path"),
        ("model", "/no/such/model", "/no/such/model"),
        ("pools.decode.replicas", "many", "args.pools"),
        ("pools.decode.engine", {"block_size": 33}, "block_size"),
        ("engine", {"kv_cache_memory_bytes": 1}, "too small for 2 KV blocks"),
    ],
)
def test_build_refuses_args_that_cannot_work(args, path, value, reason):
    with pytest.raises(ClusterConfigError, match=reason):
        build(changed(args, path, value))


def deployments(application):
    """Name -> deployment of an application and everything bound below it."""
    ingress = application._bound_deployment
    below = [v._bound_deployment for v in ingress.init_kwargs.values()]
    return {d.name: d for d in (ingress, *below)}


def test_build_binds_one_deployment_for_each_pool_behind_the_ingress(args):
    args["ingress"]["resources"] = {"edge": 0.5}
    bound = deployments(build(args))
    assert {name: d.num_replicas for name, d in bound.items()} == {
        "ingress": 3,
        "prefill": 2,
        "decode": 1,
    }
    assert bound["prefill"].ray_actor_options["resources"] == {"TTNPU": 1}
    assert bound["prefill"].ray_actor_options["num_cpus"] == 0.5
    assert bound["ingress"].ray_actor_options["resources"] == {"edge": 0.5}
    assert bound["prefill"].init_args[:2] == (args, "prefill")
    assert bound["ingress"].init_args[0] == args


def test_pools_are_scaled_within_their_bounds_and_ingresses_report_but_keep_their_number(args):
    args["pools"]["decode"] |= {"replicas": 2, "max_replicas": 4}
    bound = deployments(build(args))
    bounds = {
        name: (config.min_replicas, config.max_replicas)
        for name, deployment in bound.items()
        if (config := deployment._deployment_config.autoscaling_config) is not None
    }
    assert bounds == {"decode": (2, 4), "ingress": (3, 3)}


def test_the_bound_application_is_reproducible_and_has_no_secret(args):
    one, other = (deployments(build(args)) for _ in range(2))
    assert one["ingress"].init_args == other["ingress"].init_args == (args,)
    for pool in ("prefill", "decode"):
        assert one[pool].init_args == other[pool].init_args == (args, pool)


@pytest.mark.parametrize("store", [None, "shm"])
def test_replica_gives_its_engine_the_secrets_and_the_store(args, started, as_replica, store):
    args["pools"] = {"both": {}}
    if store is not None:
        args |= {"kv_connector": "pooled"}
        args["kv_store"] = {"backend": store, "capacity_bytes": 2**20}
    as_replica(KEYS)
    deployments_module.PoolReplica(args, "both")
    [engine] = started
    assert engine.keys == KEYS
    assert (engine.kv_store is not None) == (store is not None)


# --- meshes ------------------------------------------------------------------------------------


@pytest.fixture
def on_mesh(args):
    """Args with the demo model, which fits any chip, and one pool on a mesh."""

    def change(mesh, **fields):
        lanes = mesh_spec(mesh).num_chips
        engine = {"mesh": {"name": mesh}, "block_size": 64}
        engine |= {"max_batch_size": lanes, "tt_data_parallel": lanes}
        return {**args, "model": "demo", "pools": {"both": {"engine": engine, **fields}}}

    return change


def placement(deployment):
    config = deployment._replica_config
    return config.placement_group_bundles, config.placement_group_strategy


@pytest.mark.parametrize(
    ("mesh", "devices"),
    [("N150", 1), ("N300", 1), ("T3K", 4), ("p150x4", 4), ("P300", 2), ("Galaxy", 32)],
)
def test_a_pool_on_a_mesh_sets_its_boards_aside_on_one_host(on_mesh, mesh, devices):
    args = on_mesh(mesh, num_cpus=0.5, resources={"memory_of_ours": 2})
    pool = deployments(build(args))["both"]
    resources = {"TTNPU": devices, "memory_of_ours": 2}
    assert pool.ray_actor_options["resources"] == resources
    assert placement(pool) == ([{"CPU": 0.5, **resources}], "STRICT_PACK")


def test_a_pool_may_say_itself_how_many_boards_its_mesh_is(on_mesh):
    pool = deployments(build(on_mesh("TG", resources={"TTNPU": 4})))["both"]
    assert pool.ray_actor_options["resources"] == {"TTNPU": 4}
    assert placement(pool)[0] == [{"CPU": 0.1, "TTNPU": 4}]


def test_a_pool_on_a_mesh_that_ray_knows_nothing_of_sets_nothing_aside(on_mesh):
    pool = deployments(build(on_mesh("T3K", resources={"TTNPU": 0})))["both"]
    assert not pool.ray_actor_options.get("resources")
    assert placement(pool) == (None, None)


def test_a_pool_without_a_mesh_has_no_placement_of_its_own(args):
    assert placement(deployments(build(args))["prefill"]) == (None, None)


def test_an_engine_gets_the_boards_that_ray_bound_its_replica_to(on_mesh):
    args = on_mesh("N300")
    of_ray = {"TT_VISIBLE_DEVICES": "3", "OMP_NUM_THREADS": "1"}
    engine = resolve(args).engines["both"]
    environment = deployments_module.engine_environment
    given = environment(engine, of_ray)
    assert given == {"TT_VISIBLE_DEVICES": "3"}
    assert child_environment(engine, given)["TT_VISIBLE_DEVICES"] == "3"
    args["pools"]["both"]["engine"]["mesh"]["visible_devices"] = [0]
    engine = resolve(args).engines["both"]
    assert environment(engine, of_ray) == given, "the mesh's part is start_engine's"
    assert child_environment(engine, given)["TT_VISIBLE_DEVICES"] == "0"


def test_a_replica_on_a_mesh_has_time_to_close_it(args, on_mesh):
    stops = []
    without = {**args, "pools": {"both": {"drain_timeout_s": 7}}}
    for each in (without, on_mesh("N150", drain_timeout_s=7)):
        bound = deployments(build(each))
        stops.append([d._deployment_config.graceful_shutdown_timeout_s for d in bound.values()])
    assert stops == [[17, 17], [127, 127]]


def test_an_engine_uses_its_configured_number_of_threads(args):
    engine = msgspec.structs.replace(resolve(args).engines["decode"], num_threads=3)
    environment = deployments_module.engine_environment(engine, {"OMP_NUM_THREADS": "1"})
    assert environment["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("failure", [None, EngineDeadError("the engine hung")])
def test_a_replica_whose_engine_is_dead_or_hangs_is_not_healthy(
    args, monkeypatch, as_replica, failure
):
    class Engine:
        description = SimpleNamespace(incarnation="0")
        is_alive = True
        num_probes = 0

        def call_at_exit(self, callback):
            pass

        def probe(self):
            self.num_probes += 1

    Engine.failure = failure
    monkeypatch.setattr(deployments_module, "PROBE_S", 0.0)

    class Replica(deployments_module.PoolReplica):
        def __del__(self):
            """Nothing was started."""

    monkeypatch.setattr(deployments_module, "start_engine", lambda *_, **__: Engine())
    as_replica(KEYS)
    replica = Replica({**args, "pools": {"both": {}}}, "both")
    asyncio.run(replica.check_health())
    assert replica._engine.num_probes == 1
    Engine.is_alive = False
    with pytest.raises(RuntimeError, match=str(failure or "the engine process is gone")):
        asyncio.run(replica.check_health())


def test_pools_outlive_their_drain_and_the_ingress_outlives_the_pools(args):
    bound = deployments(build(args))
    stop = {name: d._deployment_config.graceful_shutdown_timeout_s for name, d in bound.items()}
    assert stop["decode"] > 7
    assert stop["ingress"] >= max(stop["prefill"], stop["decode"])


def test_combined_pool_is_bound_alone(args):
    bound = deployments(build({**args, "pools": {"both": {}}}))
    assert set(bound) == {"ingress", "both"}


def test_the_known_deployment_overrides_are_those_of_serve():
    assert set(DeploymentOverride.__struct_fields__) <= set(DeploymentSchema.model_fields)


def test_a_host_without_enough_boards_is_named_with_both_numbers(on_mesh):
    config = resolve(on_mesh("T3K", replicas=2))
    lacking = deployments_module.lacking_resources
    assert lacking(config, {"TTNPU": 8.0, "CPU": 1.0}) == ""
    assert lacking(config, {"TTNPU": 7.0}) == "8 TTNPU and there are 7"
    assert lacking(config, {"CPU": 64.0}) == "8 TTNPU and there are 0"


def test_a_host_without_the_ingresses_resources_is_named(args):
    args["pools"]["prefill"]["resources"] = {}
    args["ingress"]["resources"] = {"edge": 0.5}
    config = resolve(args)
    lacking = deployments_module.lacking_resources
    assert lacking(config, {"edge": 1.5}) == ""
    assert lacking(config, {"edge": 1.0}) == "1.5 edge and there are 1"
