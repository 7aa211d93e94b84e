"""One engine in a process of its own, to be killed or frozen by a test that tells it what to do.

``peer_process NAME CONFIG SHARES`` prints its endpoints, and then answers
every line of its standard input, a JSON list of a command and its arguments, with a line. Between
commands it steps when its connector wakes it. It ends when its standard input closes.

    ["offer", request_id, consumer, num_tokens]
    ["save", request_id, block_ids, num_tokens]
    ["load", request_id, producer, endpoints, num_tokens, block_ids]
"""

import json
import queue
import sys
import threading
from typing import Any

import msgspec

from kv_transfer.config import TransferConfig
from kv_transfer.transports import options
from tests.kv_transfer.fakes import FakeEngine, FakeIO, make_engine, make_ticket

NUM_BLOCKS = 64
SEEDS = {"P": 1, "D": 2}


def obey(engine: FakeEngine, command: str, *args: Any) -> None:
    """Carry out a command."""
    if command == "offer":
        request_id, consumer, num_tokens = args
        endpoints, names = engine.worker.endpoints, {"producer": engine.name, "consumer": consumer}
        engine.add(make_ticket(request_id, endpoints, num_tokens, **names))
    elif command == "save":
        engine.save(*args)
    elif command == "load":
        request_id, producer, endpoints, num_tokens, block_ids = args
        names = {"producer": producer, "consumer": engine.name}
        engine.load(make_ticket(request_id, tuple(endpoints), num_tokens, **names), block_ids)


def main(name: str, config: str, shares: str) -> None:
    """Run one end until standard input closes."""
    options.HEARTBEAT_TIMEOUT_S = 60.0  # Longer than any deadline of the tests.
    engine = make_engine(
        name,
        FakeIO(NUM_BLOCKS, seed=SEEDS[name], shares=shares == "shared"),
        config=msgspec.json.decode(config, type=TransferConfig),
    )
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
            engine.notified.set()
        lines.put("")
        engine.notified.set()

    threading.Thread(target=read, daemon=True).start()
    print(json.dumps(engine.worker.endpoints), flush=True)
    while True:
        engine.notified.wait(1.0)
        engine.notified.clear()
        while not lines.empty():
            line = lines.get()
            if not line:
                engine.worker.close(5.0)
                return
            command = json.loads(line)
            obey(engine, *command)
            engine.step()
            print(json.dumps("done"), flush=True)
        engine.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
