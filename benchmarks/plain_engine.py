"""The engine process with plain sockets, for `benchmarks.control_auth`: what a secret costs.

python -m benchmarks.plain_engine      (then as `python -m replicas.engine.process`)
"""

from __future__ import annotations

from replicas.engine import process, sockets


def nothing(*_: object) -> None:
    """Instead of what secures a socket."""


if __name__ == "__main__":
    vars(sockets).update(secure_server=nothing)
    process.main()
