"""`ttserve simulate` from its arguments to its files."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster import cli
from cluster.lab.simulation.command import (
    SimulateOptions,
    load_cluster,
    load_trace,
    pool_specs,
    run_cluster,
    scale_pools,
)
from replicas.config import EngineConfig, SimulatedMeshConfig
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.simulation.virtual_engine import simulated_facts

MESH = "simulated_mesh: {model: Llama-3.1-8B, board: n150}"
COLOCATED = """\
http_options: {host: 127.0.0.1}
applications:
- name: ttserve
  import_path: cluster.app:build
  args:
    engine: {block_size: 64, max_model_len: 4096, %s}
    pools: {both: {replicas: 2}}
"""
DISAGGREGATED = """\
http_options: {host: 127.0.0.1}
applications:
- name: ttserve
  import_path: cluster.app:build
  args:
    engine: {block_size: 64, max_model_len: 4096, %s}
    pools:
      prefill: {replicas: 1}
      decode: {replicas: 2}
"""
TRACE = [
    {"timestamp": 1000 * i, "input_length": 600 + i, "output_length": 5, "hash_ids": [0, 10 + i]}
    for i in range(12)
]


@pytest.fixture
def files(tmp_path):
    (tmp_path / "serve.yaml").write_text(COLOCATED % MESH)
    (tmp_path / "pd.yaml").write_text(DISAGGREGATED % MESH)
    (tmp_path / "plain.yaml").write_text(COLOCATED.replace(", max_model_len: 4096, %s", ""))
    (tmp_path / "trace.jsonl").write_text("\n".join(json.dumps(row) for row in TRACE))
    return tmp_path


@pytest.fixture
def run(files):
    runner = CliRunner()

    def invoke(config, *arguments):
        command = ["simulate", str(files / config), *map(str, arguments)]
        if "--trace" not in command:
            command += ["--trace", str(files / "trace.jsonl")]
        return runner.invoke(cli.app, command)

    return invoke


def test_a_run_shows_its_numbers_and_writes_them(run, files):
    result = run("serve.yaml", "--json", files / "out.json", "--log", files / "out.log",
                 "--slo-ttft-ms", 5000, "--speed-up", 2, "--seed", 3)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "TTFT ≤ 5,000 ms" in result.output
    summary = json.loads((files / "out.json").read_text())
    assert summary["requests"]["num_ok"] == len(TRACE)
    assert (summary["seed"], summary["speed_up"]) == (3, 2.0)
    assert summary["config"]["board"] == "n150"
    kinds = {json.loads(line)["kind"] for line in (files / "out.log").read_text().splitlines()}
    assert {"arrive", "place", "tokens", "end"} <= kinds


def test_the_same_arguments_give_the_same_bytes(run, files):
    for name in ("one", "two"):
        run("pd.yaml", "--json", files / f"{name}.json", "--log", files / f"{name}.log")
    for suffix in ("json", "log"):
        one, two = ((files / f"{n}.{suffix}").read_bytes() for n in ("one", "two"))
        assert one
        assert one == two


def test_prompts_that_are_too_long_fail_and_are_counted(run, files):
    rows = [*TRACE, {"timestamp": 20000, "input_length": 4096, "output_length": 5, "hash_ids": []}]
    (files / "long.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    result = run("serve.yaml", "--trace", files / "long.jsonl", "--json", files / "out.json")
    assert result.exit_code == 0
    assert "prompts too long for max_model_len 4,096: 1 " in result.output
    requests = json.loads((files / "out.json").read_text())["requests"]
    assert requests["failures"] == {"BadRequestError": 1}


def test_a_workload_of_distributions_is_a_trace_too(run, files):
    (files / "load.yaml").write_text(
        "arrivals: {kind: poisson, rate_rps: 2}\n"
        "prompt_tokens: {kind: constant, tokens: 100}\n"
        "output_tokens: {kind: constant, tokens: 3}\n"
        "num_requests: 7\n"
    )
    result = run("serve.yaml", "--trace", files / "load.yaml", "--limit", 5)
    assert result.exit_code == 0, result.output
    assert "5" in next(line for line in result.output.splitlines() if "requests sent" in line)


def test_faults_are_injected_and_drawn(run, files):
    (files / "faults.yaml").write_text("- {at_s: 2, target: decode/1, kind: kill}\n")
    result = run("pd.yaml", "--faults", files / "faults.yaml", "--log", files / "out.log",
                 "--plot", files / "plots")  # fmt: skip
    assert result.exit_code == 0, result.output
    events = [json.loads(line) for line in (files / "out.log").read_text().splitlines()]
    assert any(e["kind"] == "kill" and e["subject"] == "decode/1" for e in events)
    assert "kill decode/1" in (files / "plots" / "timeline.svg").read_text()


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        ("plain.yaml", [], ["simulated_mesh", "args.engine", "configs/sim-n150x4.yaml"]),
        ("serve.yaml", ["--trace", "/no/such/file"], ["/no/such/file"]),
        ("serve.yaml", ["--format", "tea-leaves"], ["tea-leaves", "mooncake"]),
        ("serve.yaml", ["--policy", "best"], ["best", "round_robin"]),
        ("serve.yaml", ["--speed-up", "0"], ["speed-up"]),
        ("serve.yaml", ["--slo-tpot-ms", "-1"], ["--slo-tpot-ms"]),
        ("serve.yaml", ["--faults", "/no/such/plan"], ["/no/such/plan"]),
        ("serve.yaml", ["--json", "/no/such/folder/out.json"], ["--json", "/no/such/folder"]),
        ("pd.yaml", ["--replicas", "1"], ["prefill", "decode", "2 or more"]),
        ("none.yaml", [], ["none.yaml"]),
    ],
)
def test_bad_input_is_named_and_ends_with_2(run, config, arguments, words):
    result = run(config, *arguments)
    assert result.exit_code == 2
    assert all(word in result.output for word in words), result.output


@pytest.mark.parametrize(
    ("counts", "total", "scaled"),
    [
        ({"both": 4}, 1000, {"both": 1000}),
        ({"prefill": 2, "decode": 2}, 6, {"prefill": 3, "decode": 3}),
        ({"prefill": 2, "decode": 2}, 5, {"prefill": 3, "decode": 2}),
        ({"decode": 2, "prefill": 2}, 5, {"prefill": 3, "decode": 2}),
        ({"prefill": 1, "decode": 3}, 5, {"prefill": 1, "decode": 4}),
        ({"prefill": 1, "decode": 3}, 10, {"prefill": 3, "decode": 7}),
        ({"prefill": 1, "decode": 9}, 2, {"prefill": 1, "decode": 1}),
        ({"prefill": 1, "decode": 9}, 4, {"prefill": 1, "decode": 3}),
    ],
)
def test_replicas_are_shared_out_in_proportion(counts, total, scaled):
    assert scale_pools(counts, total) == scaled


def test_replicas_and_policy_replace_those_of_the_file(files):
    cluster = load_cluster(files / "pd.yaml", replicas=6, policy="round_robin")
    assert {role: pool.replicas for role, pool in cluster.pools.items()} == {
        "prefill": 2,
        "decode": 4,
    }
    result = run_cluster(cluster, load_trace(SimulateOptions(trace=files / "trace.jsonl")))
    assert result.num_replicas == 6
    assert result.policy == "round_robin"
    assert result.config["decode_replicas"] == 4


def test_a_dead_replica_is_away_as_long_as_the_mesh_compiles(files):
    for seconds, mesh in ((7.5, MESH.replace("}", ", compile_s: 7.5}")), (None, MESH)):
        (files / "serve.yaml").write_text(COLOCATED % mesh)
        (spec,) = pool_specs(load_cluster(files / "serve.yaml"))
        warm_up_s = spec.timing.warm_up_s()
        assert warm_up_s == seconds if seconds is not None else warm_up_s > 10


@pytest.mark.parametrize("num_blocks", [None, 500])
def test_a_simulated_engine_is_told_what_a_real_one_is(num_blocks):
    from cluster.config.resolve import demo_model_folder

    config = EngineConfig(
        model=str(demo_model_folder()),
        max_batch_size=8,
        block_size=64,
        max_model_len=4096,
        num_blocks=num_blocks,
        simulated_mesh=SimulatedMeshConfig(model="Llama-3.1-8B", board="n150"),
    )
    core = EngineCore(config, UniProcExecutor(config, "real", lambda: None))
    try:
        assert simulated_facts(config) == core.facts
    finally:
        core.shutdown()


def test_the_config_for_long_documents_serves_them(tmp_path):
    trace = tmp_path / "long.jsonl"
    row = {"input_length": 55_296, "output_length": 500}
    rows = [{"timestamp": 1000 * i, "hash_ids": [i], **row} for i in range(4)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    config = Path(cli.__file__).parent.parent / "configs/sim-t3k-long.yaml"
    result = run_cluster(load_cluster(config), load_trace(SimulateOptions(trace=trace)))
    assert [len(record.token_times_s) for record in result.records] == [500] * 4
