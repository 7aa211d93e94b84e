"""`ttserve-haproxy` in front of one backend, with the configuration that Ray Serve writes."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from cluster.config.front import OPERATIONS_VARIABLE
from cluster.lifecycle import haproxy, supervisor
from tests.cluster.edge.http_server import poll
from tests.e2e.other_user import as_other_user

_FOLDER, _BACKEND, _PUBLIC, _METRICS, _STATS = "/F/", 1, 2, 3, 4
_RENDER = f"""
import os
from unittest import mock
from ray.serve._private import haproxy as h
from ray.serve.config import HTTPOptions, gRPCOptions
server = h.ServerConfig(name="one", host="127.0.0.1", port={_BACKEND})
backend = h.BackendConfig(name="http-app", path_prefix="/", servers=[server], app_name="app")
options = HTTPOptions.model_construct(host="127.0.0.1", port={_PUBLIC}, keep_alive_timeout_s=90)
config = h.HAProxyConfig(
    http_options=options, grpc_options=gRPCOptions(), is_head=True,
    socket_path="/F/admin.sock", server_state_base="/F", server_state_file="/F/state",
    metrics_socket_path="/F/m.sock", metrics_port={_METRICS}, stats_port={_STATS},
    has_received_routes=True, pass_health_checks=not os.environ["DRAINS"],
)
folder = os.environ["FOLDER"]
with mock.patch.object(h.HAProxyApi, "_initialize_directories_and_error_files"):
    api = h.HAProxyApi(config, {{"http-app": backend}}, config_file_path=folder + "/haproxy.cfg")
config.error_file_path = "/F/500.http"
api._generate_config_file_internal()
"""
"""Private parts of Ray: what `ttserve-haproxy` gets is theirs, and no other way writes it."""


def serve_config(*, drains=False):
    """The configuration that Serve writes, with places for folder and ports.

    Args:
        drains: On a node that drains.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ, "RAY_SERVE_ENABLE_HA_PROXY": "1", "FOLDER": folder,
            "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
            "DRAINS": "yes" if drains else "",
        }  # fmt: skip
        subprocess.run(
            [sys.executable, "-c", _RENDER], env=environment, check=True, capture_output=True
        )
        return Path(folder, "haproxy.cfg").read_text()


class World:
    """One HAProxy and its folder; close ends it.

    Attributes:
        folder: Of its files.
        port: Public.
        operations_port: Of the operations listener.
        processes: Every HAProxy that was started, the newest last.
    """

    def __init__(
        self, folder, config, backend_port, *,
        request_timeout_s=10, client_timeout_s=30, keep_alive_s=10, variables=None,
    ):  # fmt: skip
        """Choose ports; `variables` are added to the environment of `ttserve-haproxy`."""
        self.folder = folder
        self.port, self.operations_port = supervisor.free_port(), supervisor.free_port()
        self._times = (request_timeout_s, client_timeout_s, keep_alive_s)
        operations = {OPERATIONS_VARIABLE: f"127.0.0.1:{self.operations_port}"}
        self._environment = {**os.environ, **operations, **(variables or {})}
        self._config = (
            config.replace("/F/", f"{folder}/")
            .replace("server-state-base /F", f"server-state-base {folder}")
            .replace(f"127.0.0.1:{_BACKEND} ", f"127.0.0.1:{backend_port} ")
            .replace(f"127.0.0.1:{_PUBLIC}\n", f"127.0.0.1:{self.port}\n")
            .replace(f"bind :{_METRICS}\n", f"bind :{supervisor.free_port()}\n")
            .replace(f"bind *:{_STATS}\n", f"bind *:{supervisor.free_port()}\n")
        )
        self.processes = []

    @property
    def socket(self):
        return str(self.folder / "admin.sock")

    def write(self):
        """Write the configuration, as Serve does before each start."""
        (self.folder / "500.http").write_text("HTTP/1.1 500 Error\r\nContent-Length: 0\r\n\r\n")
        (self.folder / "haproxy.cfg").write_text(self._config)

    def start(self, *arguments):
        """Start HAProxy on what is written; returns the process."""
        script = (
            "import sys; from cluster.lifecycle import haproxy as h; "
            f"h.REQUEST_TIMEOUT_S, h.CLIENT_TIMEOUT_S, h.KEEP_ALIVE_S = {self._times}; "
            "sys.exit(h.main())"
        )
        config = str(self.folder / "haproxy.cfg")
        process = subprocess.Popen(
            [sys.executable, "-c", script, "-db", "-f", config, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=self._environment,
            text=True,
        )
        self.processes.append(process)
        return process

    def run(self):
        """Write, start, and wait until the backend is reached."""
        self.write()
        process = self.start()
        poll(lambda: self.pid() == process.pid or process.poll() is not None, "HAProxy answers")
        poll(lambda: "UP" in self.tell("show stat").split("http-app,one,")[1][:60], "backend is up")

    def tell(self, command):
        """What the admin socket answers."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self.socket)
            client.sendall(command.encode() + b"\n")
            return b"".join(iter(lambda: client.recv(65536), b"")).decode()

    def pid(self):
        """Process id of whoever answers the admin socket."""
        with contextlib.suppress(OSError):
            lines = self.tell("show info").splitlines()
            return next(int(line[4:]) for line in lines if line.startswith("Pid:"))
        return None

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stderr.close()


def as_nobody(action):
    """Run an action as another user of this host; returns the name of its error, or ""."""

    def attempt():
        try:
            action()
        except OSError as error:
            return type(error).__name__
        return ""

    return as_other_user(attempt)


is_available = haproxy.real_binary() is not None
