"""Tenstorrent's conformance suites for chat and responses, from a checkout, against our server.

The suites are `llm_module/test_vllm_chat_completions.py` and `test_vllm_responses.py` of
tenstorrent/tt-inference-server; they decide there whether a model's entry in the catalogue may be
called complete. Nothing of them is kept here. They need a Python with pytest, pytest-asyncio,
requests and PyJWT. Some tests judge the model and not the server: it must repeat a sentence, know
a name, call a tool, or say much, which the demo model does not.

    python -m benchmarks.suites /path/to/tt-inference-server --python /path/to/venv/bin/python

The last line is JSON: for each suite how many tests passed, of how many, and which failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from benchmarks.ready import running
from cluster.config.resolve import demo_model_folder
from cluster.lifecycle.supervisor import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
MODEL = "demo"
MAX_CONTEXT = 8192
"""Some tests ask for 4,096 tokens; the demo model runs beyond its 2,048 positions, if not well."""
SUITES = {
    "chat": ("test_vllm_chat_completions.py", "/v1/chat/completions"),
    "responses": ("test_vllm_responses.py", "/v1/responses"),
}


@contextlib.contextmanager
def served(folder: Path, *, is_random: bool) -> Iterator[str]:
    """Serve the demo model with calls in the format of Hermes; yields the base URL."""
    config = yaml.safe_load((ROOT / "configs" / "single.yaml").read_text())
    port = config["http_options"]["port"] = free_port()
    arguments = config["applications"][0]["args"]
    model = shutil.copytree(demo_model_folder(), folder / MODEL)
    fields = json.loads((model / "config.json").read_text())
    fields["max_position_embeddings"] = MAX_CONTEXT
    (model / "config.json").write_text(json.dumps(fields))
    arguments |= {"model": str(model), "tool_call_parser": "hermes"}
    if is_random:
        arguments["engine"] = {"load_format": "dummy"}
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [str(Path(sys.executable).with_name("ttserve")), "serve", "--config", str(path)]
    url = f"http://127.0.0.1:{port}"
    with running(command, f"{url}/health", cwd=ROOT, env={}, is_quiet=False):
        yield url


def run_suite(checkout: Path, python: Path, url: str, name: str, folder: Path) -> dict[str, Any]:
    """Run one suite; returns its score and the first line of each failure."""
    file, path = SUITES[name]
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    command = [
        python, "-m", "pytest", "-q", f"llm_module/{file}", "--output-path", folder,
        "--endpoint-url", url + path, "--model-name", model, "--max-context", MAX_CONTEXT,
        "--task-name", name,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OPENAI_API_KEY": "none"}
    subprocess.run(list(map(str, command)), cwd=checkout, env=environment, check=False)
    report = json.loads((folder / f"parameter_report_{name}.json").read_text())
    results = [result for group in report["results"].values() for result in group]
    failed = {r["test_node_name"]: r["message"][:200] for r in results if r["status"] == "failed"}
    return {"passed": len(results) - len(failed), "of": len(results), "failed": failed}


def main() -> None:
    """Run the suites and print their scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="of tenstorrent/tt-inference-server")
    parser.add_argument("--python", type=Path, default=sys.executable, help="that runs the suites")
    parser.add_argument("--suite", choices=SUITES, action="append", help="by default all")
    parser.add_argument(
        "--random-weights", action="store_true", help="of a model that says much without an end"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with served(folder, is_random=asked.random_weights) as url:
            scores = {
                suite: run_suite(asked.checkout, asked.python.absolute(), url, suite, folder)
                for suite in asked.suite or SUITES
            }
    for suite, score in scores.items():
        print(f"\n{suite}: {score['passed']} of {score['of']}")
        for test, message in score["failed"].items():
            print(f"  {test}: {message.splitlines()[-1] if message else ''}")
    print(json.dumps(scores))


if __name__ == "__main__":
    main()
