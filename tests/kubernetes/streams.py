"""Streams completions and prints how each ended; runs in a pod, so it needs only Python.

    streams.py URL COUNT TOKENS

Prints `running` once every stream has had a token, and at the end one list in JSON.
"""

import http.client
import json
import sys
import threading
import time
import urllib.error
import urllib.request

URL, COUNT, TOKENS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
IDLE_S = 120


def stream(number, has_begun, result):
    start_s = time.monotonic()
    body = {
        "prompt": f"{number} of {COUNT}: "
        + "a prompt of more than one block, that is its own, " * 4,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        URL + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=IDLE_S) as reply:
            read(reply, has_begun, result)
    except urllib.error.HTTPError as error:
        result["error"] = f"{error.code} {error.read().decode()}"
    except (OSError, http.client.HTTPException) as error:
        result["error"] = repr(error)
    finally:
        result["seconds"] = time.monotonic() - start_s
        has_begun.set()


def read(reply, has_begun, result):
    for line in reply:
        if line.strip() == b"data: [DONE]":
            result["is_done"] = True
        elif line.startswith(b"data: "):
            chunk = json.loads(line[6:])
            if "error" in chunk:
                result["error"] = chunk["error"]
            for choice in chunk.get("choices", []):
                has_begun.set()
                result["token_ids"] += choice.get("token_ids") or []
                result["finish_reason"] = choice["finish_reason"] or result["finish_reason"]
            result["tokens"] = (chunk.get("usage") or {}).get("completion_tokens", result["tokens"])
    if not result["is_done"]:
        result["error"] = result["error"] or "it ended without [DONE]"


def main():
    results = [
        {"tokens": 0, "token_ids": [], "finish_reason": None, "error": None, "is_done": False}
        for _ in range(COUNT)
    ]
    began = [threading.Event() for _ in results]
    threads = [
        threading.Thread(target=stream, args=(number, begun, result))
        for number, (begun, result) in enumerate(zip(began, results, strict=True))
    ]
    for thread in threads:
        thread.start()
    for begun in began:
        begun.wait()
    print("running", flush=True)
    for thread in threads:
        thread.join()
    print(json.dumps(results))


main()
