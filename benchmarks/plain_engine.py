"""The engine process with plain sockets, the baseline of `benchmarks.control_auth`.

python -m benchmarks.plain_engine   (then as `python -m replicas.engine_process.process`)
"""

from __future__ import annotations

from replicas.engine_process import process, sockets


def nothing(*_: object) -> None:
    """Do nothing, in place of the function that secures a socket."""


if __name__ == "__main__":
    vars(sockets).update(secure_server=nothing)
    process.main()
