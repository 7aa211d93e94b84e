"""The `ttserve` command line.

Each command imports its modules when it runs, so that `ttserve --help` is fast.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.lifecycle.local_nodes import LocalNode
    from cluster.lifecycle.supervisor import ServeOptions
    from replicas.config import Role

app = typer.Typer(
    name="ttserve",
    help="Serve large language models from pools of prefill and decode replicas.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

keys = typer.Typer(help="Make API keys.", no_args_is_help=True)
app.add_typer(keys, name="keys")

bench = typer.Typer(
    help="Measure an engine or a server, with the options of `vllm bench`.", no_args_is_help=True
)
app.add_typer(bench, name="bench")
_PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

_BAD_CONFIG = 2
_FAILED = 1
_KV_TIMEOUT_S = 5.0
_DEFAULT_WAIT_S = 660.0
_KV_HINT = "check that a cluster of this ttserve version is served there"


@app.command()
def serve(
    config: Annotated[
        Path | None, typer.Option(help="Ray Serve config file; by default the bundled demo.yaml.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model folder instead of the file's; `demo` is bundled.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Public address instead of the file's.")] = None,
    port: Annotated[int | None, typer.Option(help="Public port instead of the file's.")] = None,
    faults: Annotated[
        Path | None, typer.Option(help="Fault plan for replicas on simulated meshes.")
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(
            envvar=["TTSERVE_API_KEY", "VLLM_API_KEY"],
            help="API key that all clients share; prefer the variable. For several: docs/keys.md.",
        ),
    ] = "",
) -> None:
    """Run a local Ray cluster that serves a config file, until Ctrl-C."""
    import configs
    from cluster.errors import ClusterConfigError
    from cluster.lifecycle.supervisor import ServeOptions

    demo = Path(configs.__file__).resolve().with_name("demo.yaml")
    path = demo if config is None else config.absolute()
    options = ServeOptions(
        config=str(path),
        model=None if model is None else _absolute_model(model),
        host=host,
        port=port,
        faults=None if faults is None else str(faults.absolute()),
    )
    try:
        code = _supervise(options, path, api_key)
    except ClusterConfigError as error:
        _fail(f"{path}: {error}", _BAD_CONFIG)
    raise typer.Exit(code)


@app.command()
def environment(
    operations: Annotated[
        str | None,
        typer.Option(
            help="Operations listener, ADDRESS:PORT; by default 127.0.0.1, public port + 1."
        ),
    ] = None,
    trusted_proxies: Annotated[
        str | None,
        typer.Option(help="Networks of gateways whose X-Forwarded-For to trust, comma-separated."),
    ] = None,
    certificate: Annotated[
        str | None,
        typer.Option(help="PEM file with certificate and key: the public port speaks TLS alone."),
    ] = None,
    cors_origins: Annotated[
        str | None,
        typer.Option(
            help="args.ingress.cors_origins, comma-separated, for errors of HAProxy itself."
        ),
    ] = None,
) -> None:
    """Print the variables and umask that `ray start` needs on each host, for the shell's `eval`."""
    import shlex

    from cluster.config.environment import process_environment
    from cluster.config.front import (
        CERTIFICATE_VARIABLE,
        CORS_ORIGINS_VARIABLE,
        OPERATIONS_VARIABLE,
        TRUSTED_PROXIES_VARIABLE,
        FrontSettings,
    )
    from cluster.errors import ClusterConfigError
    from cluster.lifecycle import haproxy
    from cluster.lifecycle.private_files import UnsafeFileError
    from cluster.lifecycle.ray_token import require_private_token
    from cluster.lifecycle.supervisor import private_folder

    given = {
        OPERATIONS_VARIABLE: operations or "",
        TRUSTED_PROXIES_VARIABLE: trusted_proxies or "",
        CERTIFICATE_VARIABLE: certificate or "",
        CORS_ORIGINS_VARIABLE: cors_origins or "",
    }
    script = haproxy.find_script()
    try:
        FrontSettings.read(given).require_haproxy(script is not None)
    except ClusterConfigError as error:
        typer.echo("false")
        _fail(str(error), _BAD_CONFIG)
    try:
        require_private_token(process_environment())
    except UnsafeFileError as error:
        # The shell ignores the exit code of a command in `eval "$(...)"`; `false` sets its own.
        typer.echo("false")
        _fail(str(error), _FAILED)
    if script is None:
        typer.echo("ttserve: HAProxy not found; Ray Serve's own, slower proxy is used", err=True)
    folder = private_folder()
    # Ray makes its folder writable for every user, so it must be inside a private folder.
    # SPT_NOENV: processes that set a title keep their environment, which `ttserve doctor` reads.
    variables = {"RAY_AUTH_MODE": "token", "RAY_TMPDIR": str(folder), "SPT_NOENV": "1"}
    variables |= haproxy.environment(folder, script)
    variables |= {name: value for name, value in given.items() if value}
    # Ray creates its token, logs and sockets with the umask that it inherits.
    typer.echo("umask 077")
    for name, value in variables.items():
        typer.echo(f"export {name}={shlex.quote(value)}")


@app.command()
def validate(
    files: Annotated[list[Path], typer.Argument(help="Ray Serve config files.", metavar="FILE...")],
) -> None:
    """Check config files: keys, types, model, weights, generator, and values that must agree.

    Of a good file the bytes of KV that a token takes in each pool are printed, and how many of the
    longest sequences fit.
    """
    from cluster.config.environment import process_environment
    from cluster.config.resolve import (
        check_generators,
        check_weights,
        kv_per_token_lines,
        resolve,
    )
    from cluster.config.serve_file import read_serve_file
    from cluster.errors import ClusterConfigError

    def is_good(path: Path) -> bool:
        try:
            file = read_serve_file(path)
            config = resolve(file.args)
            check_generators(config, process_environment())
            check_weights(config)
        except ClusterConfigError as error:
            typer.echo(f"{path}: {error}", err=True)
            return False
        typer.echo(f"{path}: ok")
        for line in kv_per_token_lines(config):
            typer.echo(f"  {line}")
        _warn(path, file.warning)
        return True

    results = [is_good(path) for path in files]
    if not all(results):
        raise typer.Exit(_BAD_CONFIG)


@app.command()
def generate(  # noqa: PLR0913, PLR0917 - one argument per command-line option
    prompts: Annotated[list[str], typer.Argument(help="Texts to continue.", metavar="PROMPT...")],
    model: Annotated[str, typer.Option(help="Model folder; `demo` is bundled.")] = "demo",
    chat: Annotated[
        bool, typer.Option("--chat", help="Send each prompt as a chat message.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 always takes the likeliest token.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many tokens; 0: from all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample from tokens of this total probability.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed that makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float64.")] = "auto",
) -> None:
    """Generate text offline, without a server."""
    from cluster.config.resolve import demo_model_folder
    from cluster.config.schema import DEMO_MODEL
    from replicas import LLM, SamplingParams
    from replicas.errors import EngineError

    folder = str(demo_model_folder()) if model == DEMO_MODEL else _absolute_model(model)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    try:
        with LLM(folder, dtype=dtype) as llm:
            if chat:
                chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
                outputs = [llm.chat(messages, params)[0] for messages in chats]
            else:
                outputs = llm.generate(prompts, params)
    except EngineError as error:
        _fail(str(error), _FAILED)
    for prompt, output in zip(prompts, outputs, strict=True):
        text = output.outputs[0].text
        typer.echo(text if chat else prompt + text)


@app.command()
def simulate(  # noqa: PLR0913, PLR0917 - one argument per command-line option
    config: Annotated[
        Path, typer.Argument(help="Ray Serve config file with engines on simulated meshes.")
    ],
    trace: Annotated[Path, typer.Option(help="Trace file or folder, or a file of distributions.")],
    format: Annotated[
        str,
        typer.Option(
            help="auto, mooncake, azure, servegen, aibrix, llmservingsim or distributions."
        ),
    ] = "auto",
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Total of all pools; the file's proportion is kept.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="Placement policy (docs/policies.md) instead of the file's."),
    ] = None,
    faults: Annotated[Path | None, typer.Option(help="Fault plan instead of the file's.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Folder for plots.")] = None,
    json: Annotated[Path | None, typer.Option(help="File for all results, in JSON.")] = None,
    log: Annotated[Path | None, typer.Option(help="File for an event log.")] = None,
    speed_up: Annotated[
        float, typer.Option(help="Factor by which requests arrive faster than in the trace.")
    ] = 1.0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Number of requests to take from the trace.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random values.")] = 0,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(help="Objective: time to first token.")
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option(help="Objective: mean time per further token.")
    ] = None,
    slo_e2e_ms: Annotated[
        float | None, typer.Option(help="Objective: time to the last token.")
    ] = None,
) -> None:
    """Simulate a cluster under a virtual clock: replay a trace of hours within seconds."""
    from cluster.lab.simulation.command import SimulateError, SimulateOptions, read_slo
    from cluster.lab.simulation.command import simulate as run

    try:
        options = SimulateOptions(
            trace=trace,
            format=format,
            replicas=replicas,
            policy=policy,
            faults=faults,
            plot=plot,
            json=json,
            log=log,
            speed_up=speed_up,
            limit=limit,
            seed=seed,
            slo=read_slo(slo_ttft_ms, slo_tpot_ms, slo_e2e_ms),
        )
        run(config, options)
    except SimulateError as error:
        _fail(str(error), _BAD_CONFIG)


@app.command()
def kv(
    url: Annotated[
        str, typer.Option(help="Operations listener; by default 127.0.0.1, public port + 1.")
    ] = "http://127.0.0.1:8001",
    api_key: Annotated[
        str, typer.Option(envvar="TTSERVE_API_KEY", help="An admin's API key, if keys are used.")
    ] = "",
    json: Annotated[
        bool, typer.Option("--json", help="Print the cluster's answer as JSON.")
    ] = False,
) -> None:
    """Show each replica's running KV transfers, the blocks they hold, and its store's totals."""
    import urllib.error
    import urllib.request

    import msgspec

    from cluster.edge.transfers import TransfersView, transfers_text

    address = f"{url.rstrip('/')}/kv"
    if not address.startswith(("http://", "https://")):
        _fail(f"--url must begin with http:// or https://, got {url!r}", _BAD_CONFIG)
    try:
        headers = {"Authorization": f"Bearer {api_key.rstrip()}"} if api_key else {}
        request = urllib.request.Request(address, headers=headers)
        with urllib.request.urlopen(request, timeout=_KV_TIMEOUT_S) as response:
            body = response.read()
        view = msgspec.json.decode(body, type=TransfersView)
    except urllib.error.HTTPError as error:
        with error:
            _fail(f"{address}: {error.code} {error.reason}; {_KV_HINT}", _FAILED)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        _fail(f"{address}: {reason}; {_KV_HINT}", _FAILED)
    typer.echo(body.decode() if json else transfers_text(view), nl=json)


@app.command("run-batch")
def run_batch(  # noqa: PLR0913, PLR0917 - one argument per command-line option
    input: Annotated[
        Path, typer.Option("--input-file", "-i", help="Requests, in OpenAI's batch format.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output-file", "-o", help="Answers; the file of a stopped run is continued."
        ),
    ],
    url: Annotated[str, typer.Option(help="Server.")] = "http://127.0.0.1:8000",
    concurrency: Annotated[int, typer.Option(min=1, help="Most requests at a time.")] = 64,
    tries: Annotated[
        int, typer.Option(min=1, help="Most tries of a request that meets a busy server or none.")
    ] = 10,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Longest wait for an answer, in seconds.")
    ] = 3600.0,
    api_key: Annotated[
        str, typer.Option(envvar="TTSERVE_API_KEY", help="An API key, if keys are used.")
    ] = "",
) -> None:
    """Send a file of requests to a running server; exits with 1 if one has failed."""
    from cluster.batch import (
        BatchError,
        BatchOptions,
        keep_final_answers,
        read_requests,
    )
    from cluster.batch import run_batch as run

    if not url.startswith(("http://", "https://")):
        _fail(f"--url must begin with http:// or https://, got {url!r}", _BAD_CONFIG)

    def say(text: str) -> None:
        typer.echo(f"ttserve: {text}", err=True)

    try:
        # The file of a secret often ends with a newline.
        key = api_key.rstrip("\r\n")
        options = BatchOptions(url.rstrip("/"), concurrency, tries, timeout, key)
        requests = read_requests(input)
        answered = keep_final_answers(output)
        left = [request for request in requests if request.custom_id not in answered]
        if len(left) < len(requests):
            say(f"{len(requests) - len(left)} of {len(requests)} requests are answered already")
        num_failed = sum(answered.get(request.custom_id) is not None for request in requests)
        num_failed += run(left, output, options, say)
    except BatchError as error:
        _fail(str(error), _BAD_CONFIG)
    if num_failed:
        text = f"{num_failed} requests have failed; the output file has their errors"
        _fail(f"{text}. Run the same command again to send those that may succeed", _FAILED)


@app.command()
def leave(
    seconds: Annotated[
        float,
        typer.Option(min=1, help="Deadline: the longest drain_timeout_s plus a replica's start."),
    ] = _DEFAULT_WAIT_S,
) -> None:
    """Drain this host or pod out of its Ray cluster; returns when its requests have ended."""
    node = _node_here()
    from cluster.lifecycle.leave import LeaveError
    from cluster.lifecycle.leave import leave as run
    from cluster.lifecycle.ray_nodes import RayNodes

    def say(text: str) -> None:
        typer.echo(f"ttserve: {text}", err=True)

    try:
        run(RayNodes(node.address), node.node_id, seconds, say)
    except LeaveError as error:
        _fail(str(error), _FAILED)


@app.command()
def flip(
    replica: Annotated[str, typer.Argument(help="Replica name, as in /debug/slots.")],
    role: Annotated[str, typer.Argument(help="New role: prefill or decode.")],
    seconds: Annotated[
        float, typer.Option(min=1, help="How long to wait; the change continues after that.")
    ] = _DEFAULT_WAIT_S,
) -> None:
    """Change a replica's role without reloading its model; runs on a host of a Ray cluster."""
    if role not in {"prefill", "decode"}:
        _fail(f"ROLE must be prefill or decode, got {role!r}", _BAD_CONFIG)
    wanted: Role = "prefill" if role == "prefill" else "decode"
    node = _node_here()
    from cluster.lifecycle.flip import flip as run
    from cluster.lifecycle.flip import serve_replicas
    from cluster.lifecycle.ray_nodes import ControlLostError
    from cluster.scaling.flip import FlipError

    try:
        with serve_replicas(node.address) as replicas:
            run(replicas, replica, wanted, seconds, lambda text: typer.echo(f"ttserve: {text}"))
    except FlipError as error:
        _fail(str(error), _FAILED)
    except (ControlLostError, ConnectionError) as error:
        _fail(f"Ray's head node does not answer: {error}", _FAILED)


@app.command()
def status() -> None:
    """Show what Serve runs, errors, and draining hosts; runs on a host of a Ray cluster."""
    node = _node_here()
    from cluster.lifecycle.ray_nodes import ControlLostError, RayNodes
    from cluster.lifecycle.status import is_whole, serve_status, status_text

    try:
        found = serve_status(node.address)
        nodes = RayNodes(node.address)
        text = status_text(found, nodes.alive(), nodes.draining())
    except (ControlLostError, ConnectionError) as error:
        _fail(f"Ray's head node does not answer: {error}", _FAILED)
    typer.echo(text, nl=False)
    if not is_whole(found):
        raise typer.Exit(_FAILED)


@app.command()
def doctor(
    config: Annotated[
        Path | None,
        typer.Option(help="Ray Serve config file whose meshes to look for on this host."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all findings as JSON.")] = False,
) -> None:
    """Report what this host can run: boards, their problems and settings, and open ports."""
    import msgspec

    from cluster.config.resolve import resolve
    from cluster.config.serve_file import read_serve_file
    from cluster.errors import ClusterConfigError
    from cluster.lifecycle.doctor import diagnose, doctor_text
    from replicas.errors import ConfigError

    try:
        file = None if config is None else read_serve_file(config)
        diagnosis = diagnose(None if file is None else resolve(file.args))
    except (ClusterConfigError, ConfigError) as error:
        _fail(f"{config}: {error}", _BAD_CONFIG)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(diagnosis)))
    else:
        typer.echo(doctor_text(diagnosis), nl=False)
    if file is not None:
        _warn(config, file.warning)
    if not diagnosis.is_good:
        raise typer.Exit(_FAILED)


@app.command()
def chaos(
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    events: Annotated[
        int, typer.Option(min=1, help="Stop after the seed that reaches this many events.")
    ] = 1_000_000,
    jobs: Annotated[int, typer.Option(min=1, help="Number of parallel processes.")] = 1,
    replay: Annotated[
        Path | None, typer.Option(help="Scenario file to run instead, showing its events.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for failing scenarios.")] = Path("chaos"),
) -> None:
    """Inject random faults into simulated clusters and check all invariants after each event."""
    from cluster.lab.simulation.chaos import ChaosError, ChaosOptions
    from cluster.lab.simulation.chaos import chaos as run
    from cluster.lab.simulation.chaos import replay as run_file

    def echo(text: str) -> None:
        typer.echo(text, nl=False)

    options = ChaosOptions(seed=seed, events=events, jobs=jobs, out=out)
    try:
        if replay is not None:
            is_good = run_file(replay, echo)
        else:
            is_good = run(options, echo, shows_progress=sys.stdout.isatty())
    except ChaosError as error:
        _fail(str(error), _BAD_CONFIG)
    if not is_good:
        raise typer.Exit(_FAILED)


@bench.command("serve", context_settings=_PASSED_ON)
def bench_serve(context: typer.Context) -> None:
    """Measure a running server: TTFT, TPOT, ITL, latencies, throughput and goodput."""
    from cluster.bench.serve import bench_serve as run
    from cluster.config.environment import process_environment

    environment = process_environment()
    # The file of a secret often ends with a newline.
    api_key = environment.get("TTSERVE_API_KEY") or environment.get("OPENAI_API_KEY", "")
    _exit_after(lambda: run(context.args, api_key.rstrip("\r\n"), typer.echo))


@bench.command("latency", context_settings=_PASSED_ON)
def bench_latency(context: typer.Context) -> None:
    """Measure the time that one batch takes on an engine, without a server."""
    from cluster.bench.offline import bench_latency as run

    _exit_after(lambda: run(context.args, typer.echo))


@bench.command("throughput", context_settings=_PASSED_ON)
def bench_throughput(context: typer.Context) -> None:
    """Measure the tokens per second of many requests on an engine, without a server."""
    from cluster.bench.offline import bench_throughput as run

    _exit_after(lambda: run(context.args, typer.echo))


def _exit_after(benchmark: Callable[[], int]) -> NoReturn:
    """End with a benchmark's exit code, or with its error."""
    from cluster.bench.errors import BenchError

    try:
        code = benchmark()
    except BenchError as error:
        _fail(str(error), _BAD_CONFIG)
    raise typer.Exit(code)


@keys.command("new")
def keys_new(
    tenant: Annotated[str, typer.Argument(help="The tenant's name.")],
) -> None:
    """Make an API key: print it once, and its tenant's entry for the file of keys."""
    import json

    from cluster.edge.api_keys import new_key, parse_keys
    from cluster.errors import ClusterConfigError

    key, line = new_key()
    entry = f"{json.dumps(tenant)}: {{keys: [{json.dumps(line)}]}}"
    try:
        parse_keys(entry, "ttserve keys new")
    except ClusterConfigError as error:
        _fail(str(error), _BAD_CONFIG)
    typer.echo("The key, which is not shown again:", err=True)
    typer.echo(key)
    typer.echo("For the file of args.ingress.api_keys (docs/keys.md):", err=True)
    typer.echo(entry)


def main() -> None:
    """Entry point of the console script."""
    app()


def _supervise(options: ServeOptions, path: Path, api_key: str) -> int:
    """Check a config file, then serve it.

    Raises:
        ClusterConfigError: The file is not valid, or names a file that cannot be used.
    """
    from cluster.config.resolve import resolve
    from cluster.edge.api_keys import read_keys
    from cluster.errors import ClusterConfigError
    from cluster.lifecycle.key_file import key_ring
    from cluster.lifecycle.supervisor import serve as supervise

    # Checked before Ray starts, so that mistakes are reported at once.
    file = options.read()
    config = resolve(file.args)
    if config.key_file is not None:
        key_ring(config.key_file)
    if config.ingress.api_keys is not None:
        if api_key:
            raise ClusterConfigError("--api-key and args.ingress.api_keys exclude each other")
        read_keys(config.ingress.api_keys)
    if config.admin is not None and config.admin.api_keys is not None:
        read_keys(config.admin.api_keys)
    if not api_key:
        _warn(path, file.warning)
    http = file.http_options
    return supervise(options, http.host, http.port, api_key, config.ingress.cors_origins)


def _absolute_model(model: str) -> str:
    """Return the absolute path of a model folder; leave anything else for the checks to refuse.

    Symbolic links are not resolved, because third-party classes recognise models by their names.
    """
    path = Path(model).expanduser()
    return str(path.absolute()) if path.is_dir() else model


def _warn(path: Path | None, warning: str) -> None:
    if warning:
        typer.echo(f"{path}: warning: {warning}", err=True)


def _node_here() -> LocalNode:
    """Find the Ray node of this host, and take over the variables that connect to its cluster.

    Call it before importing Ray, which reads some of them from the environment only then.
    """
    from cluster.config.environment import process_environment, replace_in_environment
    from cluster.config.ray_auth import VARIABLES
    from cluster.lifecycle.local_nodes import NoNodeError, find_node

    try:
        node = find_node(process_environment())
    except NoNodeError as error:
        _fail(str(error), _BAD_CONFIG)
    # The caller's own variables may belong to another cluster, and Ray prefers a token to a file.
    replace_in_environment(VARIABLES, node.variables)
    return node


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"ttserve: {message}", err=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    main()
