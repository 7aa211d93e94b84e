"""The program of `helm test`: sends a user's requests to the endpoint, and prints the results."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from http import HTTPStatus

_TRANSFERS = re.compile(r"^ttserve_kv_transfers_total\{([^}]*)\} (\S+)$", re.MULTILINE)


class Endpoint:
    """The endpoint, which has until a deadline to answer.

    Args:
        url: Where it is.
        operations_url: Where its operations listener is, which has the metrics.
        timeout_s: How long it has for everything.
        api_key: Key to send, or "".
    """

    def __init__(self, url: str, operations_url: str, timeout_s: float, api_key: str = "") -> None:
        self._url = url
        self._authorization = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._operations_url = operations_url
        self._deadline_s = time.monotonic() + timeout_s

    def ask(self, path: str, body: object = None) -> str:
        """Return the answer's text, once there is one."""
        return self._ask(self._url + path, body)

    def num_transfers(self) -> float:
        """Return how many KV transfers the decode engines have received."""
        page = self._ask(f"{self._operations_url}/metrics")
        return sum(
            float(count)
            for labels, count in _TRANSFERS.findall(page)
            if 'outcome="ok"' in labels and 'role="consumer"' in labels
        )

    def wait_or_exit(self, why: str) -> None:
        """Wait a second, or end once the deadline is over."""
        if time.monotonic() > self._deadline_s:
            sys.exit(why)
        time.sleep(1)

    def _ask(self, url: str, body: object = None) -> str:
        while True:
            answer, why = self._try(url, body)
            if answer is not None:
                return answer
            self.wait_or_exit(f"{url}: {why}")

    def _try(self, url: str, body: object) -> tuple[str | None, object]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | self._authorization
        request = urllib.request.Request(url, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.read().decode(), None
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.UNAUTHORIZED:
                sys.exit(
                    f"{url} wants an API key: set tests.apiKey.secretName to a Secret with one"
                )
            return None, error.read().decode()
        except OSError as error:
            return None, error


def main() -> None:
    """Health, models, one stream, and one request that crosses from prefill to decode."""
    endpoint = Endpoint(
        os.environ["URL"],
        os.environ["OPERATIONS_URL"],
        float(os.environ["TIMEOUT_S"]),
        os.environ.get("API_KEY", ""),
    )
    endpoint.ask("/health")
    print("health: ok")
    model = json.loads(endpoint.ask("/v1/models"))["data"][0]["id"]
    print("model:", model)

    is_disaggregated = os.environ["IS_DISAGGREGATED"] == "true"
    before = endpoint.num_transfers() if is_disaggregated else 0
    words = "a prompt of more than one block, which nobody has sent before, "
    body = {"model": model, "prompt": f"{time.time_ns()} {words * 4}", "max_tokens": 16}
    stream = endpoint.ask("/v1/completions", {**body, "stream": True, "ignore_eos": True})
    events = [line[6:] for line in stream.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    if not events or events[-1] != "[DONE]" or any("error" in chunk for chunk in chunks):
        sys.exit(f"the stream did not end well: {events[-3:]}")
    print("stream:", len(chunks), "chunks")

    while is_disaggregated and endpoint.num_transfers() <= before:
        endpoint.wait_or_exit("no KV went from a prefill to a decode replica: see `ttserve kv`")
    if is_disaggregated:
        print("prefill to decode: ok")


if __name__ == "__main__":
    main()
