"""The driver of a local server: starts Ray and Serve, deploys one Serve config file, waits, stops.

Started by `cluster.lifecycle.supervisor` in a session of its own, with Serve's settings in its
environment. It stops when its standard input closes, which the supervisor does to stop it and the
kernel does if the supervisor dies. It prints its progress and the address of the endpoint. In
production, `serve deploy` deploys the same file on a Ray cluster instead.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import ssl
import sys
import threading
import time
import urllib.request
from typing import TYPE_CHECKING

import msgspec
import ray
import typer
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation

from cluster.config.environment import process_environment
from cluster.config.front import FrontSettings
from cluster.config.resolve import resolve
from cluster.errors import ClusterConfigError
from cluster.lifecycle.application import bind
from cluster.lifecycle.deployments import lacking_resources
from cluster.lifecycle.status import reason
from cluster.lifecycle.supervisor import ServeOptions, say

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview

    from cluster.config.resolve import ClusterConfig
    from cluster.config.schema import AdminConfig
    from cluster.config.serve_file import ServeFile

OBJECT_STORE_BYTES = 100 * 2**20
"""Ray's shared memory; no token and no KV block goes through it."""

DRAIN_S = 8.0
"""Seconds for running requests to end after a stop; replaces the pools' `drain_timeout_s`."""

_POLL_S = 0.2
_WAIT_NOTE_S = 10.0


class DeploymentFailedError(Exception):
    """The application did not start; the message has each deployment's reason."""


def main() -> int:
    """Serve until standard input closes.

    Returns:
        Exit code: 0 after a stop, 1 if the application did not start, 2 if the config cannot work.
    """
    options = msgspec.json.decode(sys.argv[1], type=ServeOptions)
    stop = _stop_event()
    try:
        file = options.read()
        _require_local(file)
        config = resolve(file.args)
        application = bind(file.args, config)
        front = FrontSettings.read(process_environment())
    except ClusterConfigError as error:
        say(f"{options.config}: {error}")
        return 2
    try:
        _start_ray(options)
        lacking = lacking_resources(config, ray.cluster_resources())  # type: ignore[no-untyped-call]
        if lacking:
            # Ray would wait for a node to bring them, and a local cluster gets none.
            say(f"The replicas need {lacking} on this host; `ttserve doctor` lists its boards.")
            return 1
        try:
            _deploy(file, application)
            if _wait_until_running(file, front, stop):
                _announce(file, config, front, options.has_haproxy)
                stop.wait()
            return 0
        except DeploymentFailedError as error:
            say(str(error))
            return 1
        finally:
            _stop_serve(file.name)
    finally:
        ray.shutdown()
        # The supervisor does this too, unless it was killed.
        shutil.rmtree(options.folder, ignore_errors=True)


def _require_local(file: ServeFile) -> None:
    """Refuse keys that have an effect only on a Ray cluster.

    Raises:
        ClusterConfigError: The file has such a key.
    """
    for key, value in (
        ("applications[0].deployments", file.applications[0].deployments),
        ("applications[0].runtime_env", file.applications[0].runtime_env),
        ("applications[0].route_prefix", file.applications[0].route_prefix != "/"),
        ("applications[0].logging_config", file.applications[0].logging_config),
        ("applications[0].external_scaler_enabled", file.applications[0].external_scaler_enabled),
        ("applications[0].autoscaling_policy", file.applications[0].autoscaling_policy),
        ("http_options.root_path", file.http_options.root_path),
        ("proxy_location", file.proxy_location == "Disabled"),
        ("logging_config", file.logging_config),
        ("target_capacity", file.target_capacity is not None),
        ("grpc_options", file.grpc_options),
        ("controller_options", file.controller_options),
        ("tracing_config", file.tracing_config),
    ):
        if value:
            raise ClusterConfigError(
                f"{key} has no effect on a local server; remove it, or use `serve deploy`"
            )


def _stop_event() -> threading.Event:
    """Return an event that is set when standard input ends. Ray's own handlers prevent signals."""
    stop = threading.Event()

    def watch() -> None:
        # Unbuffered: a buffered read would hold the stream's lock when the interpreter ends.
        while os.read(sys.stdin.fileno(), 1024):
            pass
        stop.set()

    threading.Thread(target=watch, name="stdin-watch", daemon=True).start()
    return stop


def _start_ray(options: ServeOptions) -> None:
    say("Starting a local Ray cluster.")
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=True,
        logging_level=logging.ERROR,
        # A private folder: Ray lets every user of the host write to its default one.
        _temp_dir=f"{options.folder}/r",
    )
    logging.getLogger("ray.serve").setLevel(logging.ERROR)


def _deploy(file: ServeFile, application: serve.Application) -> None:
    say("Starting Ray Serve.")
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options=HTTPOptions(
            host=file.http_options.host,
            port=file.http_options.port,
            keep_alive_timeout_s=file.http_options.keep_alive_timeout_s,
        ),
    )
    serve.run_many(
        [serve.RunTarget(target=application, name=file.name, route_prefix="/")],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def _wait_until_running(file: ServeFile, front: FrontSettings, stop: threading.Event) -> bool:
    """Wait until every deployment is healthy and the endpoint answers.

    Returns:
        False if the stop came first.

    Raises:
        DeploymentFailedError: Serve reports the application as failed.
    """
    shown = ""
    started_s = noted_s = time.monotonic()
    while not stop.wait(_POLL_S):
        application = serve.status().applications.get(file.name)
        if application is None:
            continue
        if application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise DeploymentFailedError(_reasons(application))
        progress = _progress(application)
        now_s = time.monotonic()
        if progress != shown or now_s - noted_s > _WAIT_NOTE_S:
            say(f"[{now_s - started_s:4.0f} s] {progress}")
            shown, noted_s = progress, now_s
        if application.status == "RUNNING" and _is_healthy(front.public_url(file.url)):
            return True
    return False


def _progress(application: ApplicationStatusOverview) -> str:
    return ", ".join(
        f"{name} {deployment.status.lower()}"
        for name, deployment in sorted(application.deployments.items())
    )


def _reasons(application: ApplicationStatusOverview) -> str:
    """Return the messages of the application and its deployments, one line each."""
    messages = {"application": application.message} | {
        f"deployment {name}": deployment.message
        for name, deployment in sorted(application.deployments.items())
    }
    lines = [
        f"  {name}: {reason(message)}" for name, message in messages.items() if message.strip()
    ]
    return "\n".join(["The application did not start:", *lines])


def _is_healthy(url: str) -> bool:
    try:
        # The certificate is for the endpoint's public name, and this asks by address.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with urllib.request.urlopen(f"{url}/health", timeout=2, context=context) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _announce(
    file: ServeFile, config: ClusterConfig, front: FrontSettings, has_haproxy: bool
) -> None:
    model = config.served_model_name
    url = operations = front.public_url(file.url)
    if has_haproxy:
        operations = f"http://{front.operations_address(file.http_options.port)}"
    else:
        say("HAProxy is not available here: Serve's own proxy answers, which is slower.")
    body = json.dumps({"model": model, "prompt": "Return the", "max_tokens": 48, "stream": True})
    typer.echo(
        f"\nReady: {url}/v1 serves the model {model!r}. Try:\n\n"
        f"  curl -N {url}/v1/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{body}'\n\n"
        f"For operators: {operations}/metrics, /kv, /debug/slots.\n"
        f"{_admin_line(config.admin)}\nCtrl-C stops everything."
    )


def _admin_line(admin: AdminConfig | None) -> str:
    if admin is None:
        return ""
    scheme = "http" if admin.certificate is None else "https"
    host = f"[{admin.host}]" if ":" in admin.host else admin.host
    return f"To change the cluster: {scheme}://{host}:{admin.port}/replicas (docs/admin.md).\n"


def _stop_serve(name: str) -> None:
    """Let running requests end, for at most `DRAIN_S`.

    Not `serve.shutdown`: it ends HAProxy first, which would cut running streams.
    """
    deadline_s = time.monotonic() + DRAIN_S
    with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
        serve.delete(name, _blocking=False)
        while name in serve.status().applications and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main())
