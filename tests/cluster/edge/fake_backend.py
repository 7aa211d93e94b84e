"""A `Backend` without engines: byte tokens, an echo of the prompt, or a script."""

import asyncio
import struct

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from cluster.edge.openai import ModelCard, Usage
from cluster.edge.resume import ReplayCheck
from cluster.edge.slots import SlotsView
from cluster.edge.transfers import ReplicaView, TransfersView
from replicas.messages import TokenLogprob, TokenOutput
from replicas.output_processor import OutputDelta, OutputProcessor
from replicas.sampling_params import SamplingDefaults
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


def likely(token_id, count):
    """A token that was the likeliest, and the `count` likeliest ones: those that follow it."""
    likeliest = [TokenLogprob(token_id + i, -0.5 - i, 1 + i) for i in range(count)]
    return [TokenLogprob(token_id, -0.5, 1), *likeliest]


async def flood(request, emit):
    """A script that never ends."""
    del request
    for i in range(10**9):
        await emit(OutputDelta(0, "x" * 1000, [i % 256]))
        await asyncio.sleep(0)


class FakeBackend:
    """Every choice is the prompt's own tokens, in turns; `script` runs a request otherwise."""

    max_model_len = 64
    defaults = SamplingDefaults()
    tool_call_parser = reasoning_parser = None

    def __init__(self, script=None, adapters=()):
        self.tokenizer = make_tokenizer()
        self.script = script
        self.adapters = adapters
        self.requests = []
        self.steps = {}
        self.num_open = 0
        self.ready = (True, "")

    def models(self):
        adapters = [ModelCard(a, a, self.max_model_len, 17, parent="demo") for a in self.adapters]
        demo = ModelCard(
            "demo",
            "demo-folder",
            self.max_model_len,
            17,
            defaults=self.defaults,
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
        )
        return [demo, *adapters]

    async def generate(self, request, emit, known=None, token_ids=()):
        assert not token_ids, "a script begins at its start"
        self.requests.append(request)
        self.num_open += 1
        try:
            if self.script is None:
                return await self._echo(request, emit, known)
            return await self.script(request, emit)
        finally:
            self.num_open -= 1

    async def _echo(self, request, emit, known):
        replay = None if known is None else ReplayCheck(known)
        processor = OutputProcessor(self.tokenizer, request, frozenset())
        sampling = request.sampling
        echo = request.prompt_token_ids[: sampling.max_tokens]
        embedding = None if sampling.pooling is None else struct.pack("<2f", 0.6, 0.8)
        for i, token_id in enumerate(echo):
            reason = "length" if i + 1 == len(echo) else None
            logprobs = None if sampling.logprobs is None else [likely(token_id, sampling.logprobs)]
            of_prompt = None
            if i == 0 and sampling.prompt_logprobs is not None:
                rest = request.prompt_token_ids[1:]
                of_prompt = [[], *(likely(t, sampling.prompt_logprobs) for t in rest)]
            for choice in range(sampling.n):
                output = TokenOutput(
                    request.request_id, i, [token_id], reason, choice=choice, logprobs=logprobs,
                    prompt_logprobs=of_prompt, embedding=embedding,
                )  # fmt: skip
                if replay is not None:
                    replay.check_next(output)
                delta = processor.take(output)
                if delta is not None:
                    await emit(delta)
        return Usage(len(request.prompt_token_ids), processor.num_output_tokens)

    def is_ready(self):
        return self.ready

    async def metrics_text(self):
        return b"vllm:num_requests_running 0\n"

    async def probe(self):
        return self.steps

    async def slots(self):
        return SlotsView(num_queued=3, num_awaiting_admission=1, replicas=[])

    async def routes(self, request_id):
        return None

    def route_header(self, request):
        return f"decode={len(request.prompt_token_ids)}"

    async def transfers(self):
        return TransfersView(replicas=[ReplicaView(replica="decode-d", pool="decode")])
