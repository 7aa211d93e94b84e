"""Engine process with planned faults; `replicas.launch` starts it in place of the usual one.

python -m replicas.simulation.faulty_process   (then as `python -m replicas.engine_process.process`)
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from replicas.engine.hooks import NO_HOOKS, EngineHooks
from replicas.engine_process import process
from replicas.simulation.fault_injection import SignalSender, client_sockets, engine_faults

if TYPE_CHECKING:
    from replicas.config import EngineConfig


def fault_hooks(config: EngineConfig) -> EngineHooks:
    """Return the hooks that inject the faults of an engine's configuration."""
    faults = engine_faults(config)
    if not faults.faults:
        return NO_HOOKS
    return EngineHooks(
        unix_now_s=faults.unix_now_s,
        make_transport=faults.make_transport,
        device_faults=faults.faults,
        plan_clock=faults.clock,
        client_sockets=partial(client_sockets, faults),
        ignores_sigterm=faults.ignores_sigterm,
        beside=lambda: contextlib.closing(SignalSender(faults)),
    )


def main() -> None:
    """Run an engine with its planned faults; see `replicas.engine_process.process.main`."""
    process.main(fault_hooks)


if __name__ == "__main__":
    main()
