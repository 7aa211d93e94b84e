"""Engines whose host's wall clock is set while they run."""

import time

import msgspec
import pytest

from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.engine.hooks import EngineHooks
from replicas.sampling_params import SamplingParams
from tests.kv_transfer.virtual_wire import Net
from tests.replicas.engine import pair as pair_module
from tests.replicas.engine.fakes import KEYS
from tests.replicas.engine.virtual import LOOP, CountingClock, LoopConnector, LoopPair, Side
from tests.replicas.generators.simulated.engines import right_tokens, simulated_config

TICKET_S = 30.0
NUM_NEW = 4
PROMPT = list(range(20, 90))


@pytest.mark.parametrize("jumps_s", [(-180.0,), (180.0,), (-1e9, 1e9), (1e9, -1e9)])
def test_tickets_minted_after_the_clock_was_set_are_good(
    jumps_s: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    skew_s, read_s = 0.0, time.time

    def wall() -> float:
        return read_s() + skew_s

    monkeypatch.setattr(time, "time", wall)
    LoopConnector.net = net = Net()
    sides = []
    for name in ("prefill", "decode"):
        config = simulated_config(num_blocks=60)
        config = msgspec.structs.replace(config, kv_connector=LOOP, keys=KEYS)
        executor = UniProcExecutor(config, name, hooks=EngineHooks(unix_now_s=wall))
        core = EngineCore(config, executor, name, wall)
        sides.append(Side(core, CountingClock()))
    pair = LoopPair(sides[0], sides[1], net)
    for jump_s in (0.0, *jumps_s):
        skew_s += jump_s
        monkeypatch.setattr(pair_module, "FOREVER_MS", int(1000 * (wall() + TICKET_S)))
        prompt = [len(pair.loaded), *PROMPT]
        sampling = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, seed=0, ignore_eos=True)
        assert pair.generate([prompt], sampling)[-1:] == right_tokens([prompt], NUM_NEW)
        assert set(pair.loaded.values()) == {None}
    assert len(pair.loaded) == 1 + len(jumps_s)
    for side in sides:
        side.core.shutdown()
