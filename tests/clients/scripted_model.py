"""A server whose model says what a client's test needs: a recorded answer for each question.

Everything but the model is as in production. The answers are texts in the format of a family, so
that calls and reasoning come out of the real parsers.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from cluster.config.schema import IngressConfig
from cluster.edge.openai import Usage
from cluster.edge.routes import create_app
from replicas.output_processor import OutputDelta
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.http_server import serving

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PIECE_CHARS = 7


def call(name: str, **arguments: object) -> str:
    """A call in the format of Hermes."""
    spelled = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{spelled}\n</tool_call>"


ANSWERS = (
    ("sunny in Bern", "It is sunny in Bern."),
    ("[tool]", "It is done."),
    ("person", '{"name": "Ada", "age": 36}'),
    ("weather", call("get_weather", city="Bern")),
    ("Write hello.txt", call("write", filePath="hello.txt", content="Hi.")),
    ("Save hello.txt", call("exec_command", cmd="printf Hi. > hello.txt")),
    ("Create hello.txt", call("Write", file_path="hello.txt", content="Hi.")),
    ("", "Hello! How can I help?"),
)
"""Parts of a chat from its last question on, each with the model's answer; the first one counts."""


class ScriptedModel(FakeBackend):
    """A model with the calls of Hermes and recorded answers.

    Args:
        answers: Parts of a chat from its last question on, each with the model's answer.
    """

    max_model_len = 2**18
    tool_call_parser = "hermes"

    def __init__(self, answers: Sequence[tuple[str, str]] = ANSWERS) -> None:
        super().__init__(self._say)
        self._answers = answers

    async def _say(self, request, emit) -> Usage:
        prompt = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        question = prompt.rpartition("[user]")[2]
        text = next(answer for part, answer in self._answers if part in question)
        for choice in range(request.sampling.n):
            for start in range(0, len(text), PIECE_CHARS):
                piece = text[start : start + PIECE_CHARS]
                await emit(OutputDelta(choice, piece, [7] * len(piece)))
            await emit(OutputDelta(choice, "", [], "stop"))
        return Usage(len(request.prompt_token_ids), len(text))


@contextlib.contextmanager
def scripted_server(model: ScriptedModel | None = None) -> Iterator[int]:
    """Serve a model on a socket of its own; yields the port."""
    ingress = IngressConfig(max_body_bytes=2**22, request_timeout_s=60)
    with serving(create_app(model or ScriptedModel(), ingress, version="0")) as port:
        yield port


if __name__ == "__main__":
    import time

    with scripted_server() as port:
        print(port, flush=True)
        time.sleep(3600)
