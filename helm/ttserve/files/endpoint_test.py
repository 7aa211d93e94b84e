"""What `helm test` runs: asks the endpoint what a user would ask, and says what it got."""

import json
import os
import re
import sys
import time
import urllib.error
import urllib.request

URL = os.environ["URL"]
DEADLINE_S = time.monotonic() + float(os.environ["TIMEOUT_S"])
IS_DISAGGREGATED = os.environ["IS_DISAGGREGATED"] == "true"
DELIVERED = re.compile(r'^ttserve_kv_transfers_total\{[^}]*\} ([0-9.e+]+)$', re.MULTILINE)


def ask(path, body=None):
    """The answer's text, once the endpoint gives one."""
    while True:
        try:
            request = urllib.request.Request(
                URL + path,
                None if body is None else json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.read().decode()
        except OSError as error:
            detail = error.read().decode() if isinstance(error, urllib.error.HTTPError) else error
            if time.monotonic() > DEADLINE_S:
                sys.exit(f"{URL}{path}: {detail}")
            time.sleep(1)


def num_transfers():
    return sum(float(count) for count in DELIVERED.findall(ask("/metrics")))


ask("/health")
print("health: ok")
model = json.loads(ask("/v1/models"))["data"][0]["id"]
print("model:", model)

before = num_transfers() if IS_DISAGGREGATED else 0
prompt = f"{time.time_ns()} " + "a prompt of more than one block, which nobody has sent before, " * 4
events = [
    line[6:]
    for line in ask(
        "/v1/completions",
        {"model": model, "prompt": prompt, "max_tokens": 16, "stream": True, "ignore_eos": True},
    ).splitlines()
    if line.startswith("data: ")
]
chunks = [json.loads(event) for event in events if event != "[DONE]"]
if not events or events[-1] != "[DONE]" or any("error" in chunk for chunk in chunks):
    sys.exit(f"the stream did not end well: {events[-3:]}")
print("stream:", len(chunks), "chunks")

if IS_DISAGGREGATED:
    while num_transfers() <= before:
        if time.monotonic() > DEADLINE_S:
            sys.exit("no KV went from a prefill to a decode replica: see `ttserve kv`")
        time.sleep(1)
    print("prefill to decode: ok")
