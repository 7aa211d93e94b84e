"""The command line without a cluster behind it."""

import hashlib
import http.server
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
import warnings
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

import configs
from cluster import cli
from cluster.edge.api_keys import parse_keys
from cluster.edge.transfers import ReplicaView, TransfersView, transfers_text
from cluster.lifecycle import haproxy, local_nodes, supervisor

with warnings.catch_warnings():
    # Ray Serve's own models use what Pydantic has deprecated, and `status` imports them.
    warnings.simplefilter("ignore")
    import cluster.lifecycle.status

GOOD = """\
http_options: {{host: 127.0.0.1}}
applications:
- name: ttserve
  import_path: cluster.app:build
  args: {{model: {model}, pools: {{both: {{}}}}}}
"""


@pytest.fixture
def run():
    runner = CliRunner()
    return lambda *arguments: runner.invoke(cli.app, [str(argument) for argument in arguments])


def test_help_names_every_command(run):
    result = run("--help")
    assert result.exit_code == 0
    names = {
        "serve", "environment", "validate", "generate", "simulate", "kv", "leave", "status",
        "doctor", "chaos", "flip",
    }  # fmt: skip
    assert all(name in result.output for name in names)


def test_environment_is_for_a_shell_and_names_a_new_private_folder(run, monkeypatch):
    monkeypatch.setattr(haproxy, "find_script", lambda: "/a folder/ttserve-haproxy")
    outputs = [run("environment").output for _ in range(2)]
    folders = []
    for output in outputs:
        lines = [shlex.split(line) for line in output.splitlines()]
        assert ["umask", "077"] in lines
        variables = dict(word.split("=", 1) for export, word in lines if export == "export")
        assert variables["RAY_SERVE_HAPROXY_BINARY_PATH"] == "/a folder/ttserve-haproxy"
        folders.append(Path(variables["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent)
        assert folders[-1].stat().st_mode & 0o777 == 0o700
        folders[-1].rmdir()
    assert folders[0] != folders[1]


def test_environment_names_the_origins_of_web_pages(run):
    result = run("environment", "--cors-origins", "https://a.example,https://b.example")
    assert "export TTSERVE_CORS_ORIGINS=https://a.example,https://b.example\n" in result.stdout
    Path(re.search(r"RAY_TMPDIR=(\S+)", result.stdout)[1]).rmdir()
    result = run("environment", "--cors-origins", "https://a.example/path")
    assert (result.exit_code, result.stdout) == (2, "false\n")


def test_environment_refuses_a_readable_token_and_fails_in_eval(run, monkeypatch):
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        folder.chmod(0o755)
        token = folder / "token"
        token.write_text("secret")
        monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        token.chmod(0o644)
        result = run("environment")
        assert result.exit_code == 1
        assert f"{token} can be used by other users" in result.stderr
        assert "chmod 600" in result.stderr
        # `eval "$(ttserve environment)" && ray start` must not start Ray.
        assert subprocess.run(["sh", "-c", f"eval '{result.stdout}'"], check=False).returncode == 1
        token.chmod(0o600)
        accepted = run("environment")
        assert accepted.exit_code == 0
        Path(re.search(r"RAY_TMPDIR=(\S+)", accepted.stdout)[1]).rmdir()
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("script", "certificate", "reason"),
    [("/ttserve-haproxy", "tls.pem", "absolute path"), (None, "/tls.pem", "needs HAProxy")],
)
def test_environment_refuses_a_certificate_that_would_not_act(
    run, monkeypatch, script, certificate, reason
):
    monkeypatch.setattr(haproxy, "find_script", lambda: script)
    result = run("environment", "--certificate", certificate)
    assert (result.exit_code, result.stdout) == (2, "false\n")
    assert reason in result.stderr


def test_validate_names_every_bad_file_and_its_key(run, tmp_path):
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(GOOD.format(model="/no/such/folder"))
    two.write_text(GOOD.format(model="demo").replace("pools", "poools"))
    result = run("validate", one, two)
    assert result.exit_code == 2
    assert "/no/such/folder" in result.output
    assert "poools" in result.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 99}, "weights missing in .*layers.* more; config.json implies"),
        ({"intermediate_size": 7}, r"mlp.gate_proj.weight .* instead of \(7, .*model.safetensors"),
        ({"architectures": ["UnheardOf"]}, "'UnheardOf' is not one of LlamaForCausalLM"),
        ({"rope_scaling": {"rope_type": "odd"}}, "rope type 'odd' is not supported"),
    ],
    ids=["missing", "shape", "family", "rope"],
)
def test_validate_names_weights_that_contradict_the_configuration(run, tmp_path, change, message):
    demo = Path(configs.__file__).parent / "demo-model"
    for file in demo.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    raw = json.loads((demo / "config.json").read_text())
    raw.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    path = tmp_path / "serve.yaml"
    path.write_text(GOOD.format(model=tmp_path))
    result = run("validate", path)
    assert result.exit_code == 2
    assert re.search(message, result.output, re.DOTALL)


@pytest.mark.parametrize(
    ("generator", "message"),
    [
        ("tt-mettal", "no generator class for 'tt-mettal'"),
        ("tt-metal", "set TT_METAL_HOME or mesh.tt_metal_home"),
    ],
)
def test_a_generator_of_a_mesh_that_is_not_here_is_refused(
    run, tmp_path, monkeypatch, generator, message
):
    monkeypatch.delenv("TT_METAL_HOME", raising=False)
    path = tmp_path / "mesh.yaml"
    engine = f"engine: {{block_size: 64, mesh: {{name: N150}}, generator: {generator}}}"
    path.write_text(GOOD.format(model="demo").replace("pools:", f"{engine}, pools:"))
    result = run("validate", path)
    assert result.exit_code == 2
    assert f"{path}: args.pools.both: " in result.output
    assert message in result.output


def test_serve_refuses_a_bad_config_before_anything_starts(run, tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(GOOD.format(model="relative/folder"))
    result = run("serve", "--config", path)
    assert result.exit_code == 2
    assert "relative" in result.output


def test_serve_refuses_a_bad_key_file_before_anything_starts(run, tmp_path):
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text("too short")
    path = tmp_path / "serve.yaml"
    path.write_text(GOOD.format(model="demo").replace("pools", f"key_file: {keys}, pools"))
    result = run("serve", "--config", path)
    assert result.exit_code == 2
    assert f"{keys}, line 1" in result.output
    assert "too short" not in result.output


VIEW = TransfersView(
    replicas=[
        ReplicaView(replica="decode-d", pool="decode", is_silent=True),
        ReplicaView(replica="prefill-p", pool="prefill", leased_blocks=3),
    ]
)


@pytest.fixture
def endpoint():
    """Address of a server that answers GET /kv, and nothing else."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/kv" else 404)
            self.end_headers()
            if self.path == "/kv":
                self.wfile.write(msgspec.json.encode(VIEW))

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_new_key_opens_with_its_line_in_a_file(run):
    result = run("keys", "new", "team-a")
    assert result.exit_code == 0
    key, entry = result.stdout.splitlines()
    [(digest, tenant)] = parse_keys(entry, "file").items()
    assert (digest, tenant.name) == (hashlib.sha256(key.encode()).digest(), "team-a")
    assert run("keys", "new", "not a name").exit_code == 2


def test_serve_refuses_bad_api_keys_before_anything_starts(run, tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text("alice: {keys: [plain]}")
    path = tmp_path / "serve.yaml"
    ingress = f"ingress: {{api_keys: {file}}}, pools"
    path.write_text(GOOD.format(model="demo").replace("pools", ingress))
    result = run("serve", "--config", path)
    assert result.exit_code == 2
    assert "alice.keys[0] must be sha256:" in result.output


def test_one_shared_key_is_served_from_a_file_of_its_hash(run, tmp_path, monkeypatch):
    served = []

    class Driver:
        def __init__(self, command, *, env, **options):
            del options
            assert "very secret" not in env.values()
            served.append(msgspec.json.decode(command[-1], type=supervisor.ServeOptions))
            path = Path(served[0].api_keys)
            served.append((stat.S_IMODE(path.stat().st_mode), path.read_text()))
            assert "very secret" not in " ".join(map(str, command))

    monkeypatch.setattr(supervisor.subprocess, "Popen", Driver)
    monkeypatch.setattr(supervisor, "_wait", lambda *_: 0)
    monkeypatch.setattr(supervisor, "_end_session", lambda _: None)
    path = tmp_path / "serve.yaml"
    path.write_text(GOOD.format(model="demo"))
    port = supervisor.free_port()
    monkeypatch.setenv("VLLM_API_KEY", "very secret")
    result = run("serve", "--config", path, "--port", port)
    assert result.exit_code == 0, result.output
    options, (mode, text) = served
    assert mode == 0o600
    [(digest, tenant)] = parse_keys(text, "file").items()
    assert digest == hashlib.sha256(b"very secret").digest()
    assert (tenant.is_admin, tenant.limits) == (True, None)
    assert options.read().args["ingress"] == {"api_keys": options.api_keys}


def test_kv_prints_tables_or_the_clusters_json(run, endpoint):
    result = run("kv", "--url", f"{endpoint}/")
    assert (result.exit_code, result.output) == (0, transfers_text(VIEW))
    assert "silent" in result.output
    result = run("kv", "--url", endpoint, "--json")
    assert result.exit_code == 0
    assert msgspec.json.decode(result.output, type=TransfersView) == VIEW


@pytest.mark.parametrize(
    ("url", "code", "reason"),
    [
        ("127.0.0.1:8000", 2, "must begin with http"),
        ("file:///etc", 2, "must begin with http"),
        ("http://127.0.0.1:1", 1, "refused"),
        ("{endpoint}/other", 1, "404 Not Found"),
    ],
)
def test_kv_reports_why_it_got_no_answer(run, endpoint, url, code, reason):
    result = run("kv", "--url", url.format(endpoint=endpoint))
    assert result.exit_code == code
    assert reason in result.output


def test_a_command_shows_a_cluster_its_own_token_and_no_other(run, monkeypatch):
    """Ray prefers RAY_AUTH_TOKEN to the file that the cluster's processes name."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/p/token"}
    for name in own:
        monkeypatch.setenv(name, os.environ.get(name, ""))  # put back after the test
    node = local_nodes.LocalNode("ab12", "127.0.0.1:1", own)
    monkeypatch.setattr(local_nodes, "find_node", lambda _: node)
    seen = []

    def look(_):
        seen.append({k: v for k, v in os.environ.items() if k.startswith("RAY_AUTH_")})
        raise ConnectionError

    monkeypatch.setattr(cluster.lifecycle.status, "serve_status", look)
    assert run("status").exit_code == 1
    assert seen == [own]


@pytest.mark.parametrize("command", [["leave"], ["status"], ["flip", "decode-1", "prefill"]])
def test_commands_for_ray_hosts_fail_with_advice_elsewhere(run, command, monkeypatch):
    monkeypatch.setattr(local_nodes, "process_table", lambda _: {})
    result = run(*command)
    assert result.exit_code == 2
    assert "no Ray node of this user runs here; run the command on the host" in result.output


def test_an_unknown_role_is_refused(run):
    result = run("flip", "decode-1", "both")
    assert result.exit_code == 2
    assert "ROLE must be prefill or decode, got 'both'" in result.output


def test_generate_names_the_folder_that_holds_no_model(run, tmp_path):
    result = run("generate", "hello", "--model", tmp_path)
    assert result.exit_code == 1
    assert str(tmp_path) in result.output


def test_a_link_to_a_model_keeps_its_name(tmp_path, monkeypatch):
    """Classes of others know a model by the name of its folder."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "Llama-3.1-8B-Instruct").symlink_to("weights")
    monkeypatch.chdir(tmp_path)
    assert cli._absolute_model("Llama-3.1-8B-Instruct") == str(tmp_path / "Llama-3.1-8B-Instruct")
    assert cli._absolute_model("no-folder") == "no-folder"
