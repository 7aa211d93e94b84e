"""A `ServingService` without engines: byte tokens, an echo of the prompt, or a scripted stream."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from cluster.openai import Finished, ModelCard, TextDelta, Usage
from cluster.transfers import ReplicaView, TransfersView
from replicas.detokenizer import IncrementalDetokenizer
from replicas.tokenizer import Tokenizer

TEMPLATE = """{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""


def make_tokenizer():
    """One token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(
        backend,
        vocab_size=256,
        eos_token_ids=frozenset(),
        special_tokens={},
        chat_template=TEMPLATE,
    )


class FakeService:
    """Answers with the prompt's own tokens; `script` replaces what happens after some events."""

    max_model_len = 64

    def __init__(self, script=None):
        self.tokenizer = make_tokenizer()
        self.script = script
        self.requests = []
        self.request_ids = []
        self.num_open = 0
        self.ready = (True, "")
        self.live = True

    def models(self):
        return [ModelCard("demo", "demo-folder", self.max_model_len, 17)]

    async def generate(self, request, request_id):
        self.requests.append(request)
        self.request_ids.append(request_id)
        self.num_open += 1
        try:
            if self.script is not None:
                async for event in self.script(request):
                    yield event
                return
            prompt, sampling = request.prompt_token_ids, request.sampling
            detokenizer = IncrementalDetokenizer(self.tokenizer, [], stop=sampling.stop)
            for i, token_id in enumerate(prompt[: sampling.max_tokens]):
                yield TextDelta(detokenizer.append([token_id]), (token_id,))
                if detokenizer.stop_reason is not None:
                    yield Finished("stop", detokenizer.stop_reason, Usage(len(prompt), i + 1))
                    return
            num_tokens = min(len(prompt), sampling.max_tokens)
            usage = Usage(len(prompt), num_tokens)
            yield Finished("length", None, usage, detokenizer.finish())
        finally:
            self.num_open -= 1

    def is_ready(self):
        return self.ready

    def is_live(self):
        return self.live

    async def metrics_text(self):
        return b"vllm:num_requests_running 0\n"

    async def transfers(self):
        return TransfersView(replicas=[ReplicaView(replica="decode-d", pool="decode")])
