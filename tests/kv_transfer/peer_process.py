"""One end of a transfer in a process of its own, to be killed or frozen by a test.

``producer NUM_TOKENS NUM_READY`` prints its endpoint and offers request "r", of which no more than
NUM_READY tokens are ever ready, so that a consumer is mid-stream for as long as the test likes.
``consumer NUM_TOKENS ENDPOINT`` loads request "r" and prints its name at once. Either ends when its
standard input closes.
"""

import sys
import threading

from tests.kv_transfer.fakes import QUICK, FakeEngine, FakeIO, make_engine, make_ticket


def produce(num_tokens: int, num_ready: int) -> FakeEngine:
    """Offer the request."""
    engine = make_engine("P", FakeIO(64, seed=1), config=QUICK)
    endpoint = engine.worker.endpoint
    engine.scheduler.on_new_request("r", make_ticket("r", endpoint, num_tokens))
    engine.save("r", range(1, 33), num_ready)
    engine.step()
    return engine


def consume(num_tokens: int, endpoint: str) -> FakeEngine:
    """Load the request."""
    engine = make_engine("D", FakeIO(64, seed=2), config=QUICK)
    engine.load(make_ticket("r", endpoint, num_tokens), range(1, 33))
    engine.step()
    return engine


def main(role: str, num_tokens: int, argument: str) -> None:
    """Run one end until standard input closes."""
    if role == "producer":
        engine = produce(num_tokens, int(argument))
        sys.stdout.write(engine.worker.endpoint + "\n")
    else:
        engine = consume(num_tokens, argument)
        sys.stdout.write(engine.name + "\n")
    sys.stdout.flush()
    stopping = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        stopping.set()
        engine.notified.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    while not stopping.is_set():
        engine.notified.wait(1.0)
        engine.notified.clear()
        engine.step()
    engine.worker.close(5.0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
