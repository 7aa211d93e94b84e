"""Log probabilities of prompts: values, chunks, preemption, memory, and who reports them."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch

from replicas.codec import MAX_FRAME_BYTES
from replicas.engine.requests import RequestChecks
from replicas.generators.torch.generator import TorchGenerator
from replicas.messages import AddRequest, EngineRequest, Refused, TokenLogprob, TokenOutput
from replicas.sampling_params import SamplingParams
from tests.engines import CLIENT, engine_core, generate, make_config, num_preemptions, take_events
from tests.models import VOCAB_SIZE, model_folder, oracle_of_all

if TYPE_CHECKING:
    from replicas.engine.core import EngineCore
    from replicas.generators.protocol import ModelCapabilities

PROMPT = [3 + 7 * i % 149 for i in range(100)]
"""More than one portion of 64 positions."""
PARAMS = SamplingParams(max_tokens=4, temperature=1.0, seed=3, ignore_eos=True, prompt_logprobs=2)
PLAIN = msgspec.structs.replace(PARAMS, prompt_logprobs=None)


@pytest.fixture(scope="module")
def folder():
    return model_folder("llama-gqa")


def outputs_of(core: EngineCore, *requests: tuple[list[int], SamplingParams]) -> list[Any]:
    """All outputs of requests that run side by side, in the order of the requests."""
    for index, (prompt, params) in enumerate(requests):
        core.handle(CLIENT, AddRequest(EngineRequest(f"r{index}", prompt, params)), 0.0)
    found: list[list[TokenOutput]] = [[] for _ in requests]
    num_open = sum(params.n for _, params in requests)
    while num_open:
        core.step(0.0)
        core.check_invariants()
        for event in take_events(core).get(CLIENT, []):
            assert not isinstance(event, Refused), event
            if isinstance(event, TokenOutput):
                found[int(event.request_id[1:])].append(event)
                num_open -= event.finish_reason is not None
    return found


def scores_of(outputs: list[TokenOutput]) -> list[list[TokenLogprob]]:
    """The log probabilities of a request's prompt, which come once, with its first token."""
    [with_them] = [output for output in outputs if output.prompt_logprobs is not None]
    assert (with_them.index, with_them.choice) == (0, 0)
    return with_them.prompt_logprobs


def tokens_of(outputs: list[TokenOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def assert_close(found: list[list[TokenLogprob]], wanted: list[list[TokenLogprob]]) -> None:
    assert [[e.token_id for e in entries] for entries in found] == [
        [e.token_id for e in entries] for entries in wanted
    ]
    for entries, others in zip(found, wanted, strict=True):
        logprobs = [entry.logprob for entry in others]
        assert [entry.logprob for entry in entries] == pytest.approx(logprobs, abs=1e-5)


@pytest.mark.parametrize("num_likeliest", [0, 2, -1])
@pytest.mark.parametrize("budget", [None, 64, 33])
def test_values_are_those_of_the_float64_reference_in_chunks_and_as_a_whole(
    folder, budget, num_likeliest
):
    logits = oracle_of_all(folder, torch.float32, PROMPT).numpy()
    wanted = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    params = msgspec.structs.replace(PARAMS, prompt_logprobs=num_likeliest)
    config = make_config(folder, max_num_batched_tokens=budget, max_logprobs=-1)
    with engine_core(config) as core:
        [outputs] = outputs_of(core, (PROMPT, params))
    first, *rest = scores_of(outputs)
    assert first == []
    assert len(rest) == len(PROMPT) - 1
    for token_id, entries, values in zip(PROMPT[1:], rest, wanted[:-1], strict=True):
        of_token, *likeliest = entries
        assert of_token.token_id == token_id
        assert len(likeliest) == (VOCAB_SIZE if num_likeliest == -1 else num_likeliest)
        assert [entry.rank for entry in likeliest] == [*range(1, len(likeliest) + 1)]
        for entry in entries:
            assert entry.logprob == pytest.approx(values[entry.token_id], abs=1e-4)
            # Values that are this close may change their places.
            margin = np.array([1e-4, -1e-4])
            least, most = (values >= values[entry.token_id] + m for m in margin)
            assert least.sum() <= entry.rank <= most.sum()


@pytest.mark.parametrize(
    ("num_other", "budget"), [(30, 16), (20, 128)], ids=["within its prompt", "while it decodes"]
)
def test_a_preempted_request_has_them_once_and_equal(folder, num_other, budget):
    other = msgspec.structs.replace(PLAIN, max_tokens=30)
    params = msgspec.structs.replace(PARAMS, max_tokens=24)
    requests = ([5] * num_other, other), (PROMPT, params)
    config = make_config(folder, max_num_batched_tokens=budget, max_batch_size=2)
    with engine_core(config) as core:
        wanted = outputs_of(core, *requests)
    # One block is missing once the other request needs its second.
    config = msgspec.structs.replace(config, num_blocks=6)
    with engine_core(config) as core:
        found = outputs_of(core, *requests)
        assert num_preemptions(core) == 1
    assert [tokens_of(outputs) for outputs in found] == [tokens_of(o) for o in wanted]
    assert_close(scores_of(found[1]), scores_of(wanted[1]))


class Portions(TorchGenerator):
    """A generator that records the logits which exist at once."""

    num_rows: ClassVar[list[int]] = []
    latest: ClassVar[list[weakref.ref[torch.Tensor]]] = []

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        alive = [ref() for ref in self.latest]
        alive = [logits for logits in alive if logits is not None]
        logits = super().compute_logits(hidden)
        self.latest.append(weakref.ref(logits))
        self.num_rows.append(len(logits) + sum(map(len, alive)))
        return logits


def test_logits_of_a_prompt_never_exist_at_once(folder):
    Portions.num_rows.clear()
    with engine_core(make_config(folder, generator=f"{__name__}:Portions")) as core:
        outputs_of(core, (PROMPT, PARAMS), (PROMPT[::-1], PARAMS))
    # Each row's portions of 64 and 35, beside the logits that are drawn from.
    assert {64, 35} <= {num - 2 for num in Portions.num_rows}
    assert max(Portions.num_rows) <= 64 + 2


def test_neighbours_draw_the_same_tokens(folder):
    prompts = [PROMPT[:9], PROMPT[:40], PROMPT[::-1]]
    with engine_core(make_config(folder, max_num_batched_tokens=48)) as core:
        wanted = generate(core, prompts, PLAIN, stagger=2)
        assert generate(core, prompts, [PLAIN, PARAMS, PLAIN], stagger=2) == wanted


def test_every_choice_but_the_first_leaves_them_out(folder):
    params = msgspec.structs.replace(PARAMS, n=3)
    with engine_core(make_config(folder)) as core:
        [outputs] = outputs_of(core, (PROMPT, params))
        assert len(scores_of(outputs)) == len(PROMPT)
        [alone] = outputs_of(core, (PROMPT, PARAMS))
        assert_close(scores_of(outputs), scores_of(alone))


def test_nothing_predicts_a_prompt_of_one_token(folder):
    with engine_core(make_config(folder)) as core:
        [outputs] = outputs_of(core, ([7], PARAMS))
    assert scores_of(outputs) == [[]]


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits_are_reported_where_the_engine_is_set_so(folder, mode):
    params = msgspec.structs.replace(PARAMS, temperature=0.5, logit_bias={5: 9.0})
    wanted = oracle_of_all(folder, torch.float32, PROMPT).numpy()
    with engine_core(make_config(folder, logprobs_mode=mode)) as core:
        [outputs] = outputs_of(core, (PROMPT, params))
    _, *rest = scores_of(outputs)
    for entries, values in zip(rest, wanted[:-1], strict=True):
        expected = [values[entry.token_id] for entry in entries]
        assert [entry.logprob for entry in entries] == pytest.approx(expected, abs=1e-4)


def test_more_log_probabilities_than_a_frame_can_carry_are_refused_by_name():
    checks = RequestChecks(
        num_groups=1, max_model_len=2**17, vocab_size=128_000, has_connector=False, max_logprobs=-1
    )

    def problem(num_prompt, count):
        params = SamplingParams(prompt_logprobs=count)
        return checks.problem(AddRequest(EngineRequest("r", [5] * num_prompt, params)))

    assert problem(2**17 - 1, 20) is None
    assert problem(20, -1) is None
    for found in (problem(2**17 - 1, 30), problem(30, -1)):
        assert found.startswith("prompt_logprobs of ")
    entry = TokenLogprob(2**17, -math.pi, 2**17)
    assert len(msgspec.msgpack.encode(entry)) * (2**17 * 21) < MAX_FRAME_BYTES


class WithoutHiddenStates(TorchGenerator):
    """A generator that gives logits only."""

    model_capabilities: ClassVar[ModelCapabilities] = {
        **TorchGenerator.model_capabilities,
        "supports_hidden_states": False,
    }


WITHOUT_HIDDEN_STATES = pytest.mark.parametrize(
    "changes",
    [{"generator": f"{__name__}:WithoutHiddenStates"}, {"mixed_batches": False}],
    ids=["class", "setting"],
)


@WITHOUT_HIDDEN_STATES
def test_they_are_refused_by_name_where_logits_cannot_come_in_portions(folder, changes):
    with engine_core(make_config(folder, **changes)) as core:
        core.handle(CLIENT, AddRequest(EngineRequest("r", PROMPT, PARAMS)), 0.0)
        [refused] = take_events(core)[CLIENT]
        assert refused.reason == "invalid"
        assert refused.message.startswith("prompt_logprobs")
        assert len(generate(core, [PROMPT], PLAIN)[0]) == PLAIN.max_tokens
