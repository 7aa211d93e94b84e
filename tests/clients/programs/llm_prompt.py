"""The command `llm`, configured for the server as its documentation says."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

url = sys.argv[1]
with tempfile.TemporaryDirectory() as folder:
    models = "- model_id: ours\n  model_name: demo\n  api_base: {}\n  supports_tools: true\n"
    Path(folder, "extra-openai-models.yaml").write_text(models.format(url))
    Path(folder, "tools.py").write_text(
        "def get_weather(city: str) -> str:\n"
        '    "Say how the weather is."\n'
        '    return "sunny in " + city\n'
    )
    environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
    command = [str(Path(sys.executable).with_name("llm")), "-m", "ours"]

    def run(*arguments: str) -> str:
        return subprocess.run(
            [*command, *arguments], env=environment, check=True, text=True, capture_output=True
        ).stdout.strip()

    assert run("hello") == "Hello! How can I help?"
    assert run("hello", "--no-stream") == "Hello! How can I help?"
    tools = str(Path(folder, "tools.py"))
    assert run("How is the weather in Bern?", "--functions", tools) == "It is sunny in Bern."
