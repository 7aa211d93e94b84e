"""A model with recurrent layers: states are cached at checkpoints, and the tokens are the same."""

from __future__ import annotations

import random

import pytest

from replicas import kv_groups as kv_groups_module
from replicas.config import SpeculativeConfig
from replicas.engine.facts import model_facts
from replicas.errors import ConfigError
from replicas.generators.model_config import load_hf_config
from replicas.generators.protocol import ModelCapabilities
from replicas.kv_sizing import kv_groups
from replicas.messages import AddRequest, EngineRequest, TokenOutput
from replicas.sampling_params import SamplingParams
from tests.engines import (
    CLIENT,
    engine_core,
    generate,
    make_config,
    num_preemptions,
    num_prefix_hits,
    take_events,
)
from tests.models import VOCAB_SIZE, model_folder

BLOCK_SIZE = 4
SAMPLING = SamplingParams(max_tokens=9, temperature=0.0, seed=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder():
    return model_folder("qwen3-next")


@pytest.fixture
def close_checkpoints(monkeypatch):
    """Regular checkpoints at a distance that short sequences reach."""
    monkeypatch.setattr(kv_groups_module, "_MIN_CHECKPOINT_TOKENS", 12)


def state_core(folder, **changes):
    # In float64 no two tokens are so close that the order of sums decides.
    settings = {"dtype": "float64", "block_size": BLOCK_SIZE, "max_num_batched_tokens": 16}
    return engine_core(make_config(folder, **{**settings, **changes}))


def branching_prompts(dice, count):
    """Prompts of which most continue a part of another one."""
    prompts = [[dice.randrange(2, VOCAB_SIZE) for _ in range(40)]]
    while len(prompts) < count:
        stem = dice.choice(prompts)
        tail = [dice.randrange(2, VOCAB_SIZE) for _ in range(dice.randint(1, 25))]
        prompts.append([*stem[: dice.randint(0, len(stem))], *tail][:80])
    return prompts


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "changes",
    [{}, {"num_blocks": 40, "max_batch_size": 4}, {"mixed_batches": False, "tt_data_parallel": 2}],
    ids=["room", "few blocks", "apart, lanes"],
)
def test_a_hit_gives_the_tokens_of_a_miss(folder, close_checkpoints, seed, changes):
    dice = random.Random(seed)
    prompts = branching_prompts(dice, 10)
    with state_core(folder, enable_prefix_caching=False, **changes) as core:
        wanted = generate(core, prompts, SAMPLING)
    with state_core(folder, **changes) as core:
        assert generate(core, prompts, SAMPLING, stagger=dice.randint(1, 4)) == wanted
        assert num_prefix_hits(core) > 0
        # Conversations continue after the answers.
        longer = [[*p, *out, 3] for p, out in zip(prompts, wanted, strict=True)]
        again = generate(core, longer, SAMPLING)
    with state_core(folder, enable_prefix_caching=False, **changes) as core:
        assert again == generate(core, longer, SAMPLING)


def test_a_long_hit_costs_what_is_behind_the_last_checkpoint(folder):
    dice = random.Random(1)
    prompt = [dice.randrange(2, VOCAB_SIZE) for _ in range(2000)]
    longer = [*prompt, *(dice.randrange(2, VOCAB_SIZE) for _ in range(30))]
    settings = {
        "block_size": 32, "num_blocks": 200, "max_num_batched_tokens": 512, "max_model_len": 2200,
        "max_batch_size": 2,
    }  # fmt: skip
    with state_core(folder, **settings) as core:
        generate(core, [prompt], SAMPLING)
        # The end of the prompt, 1,999 tokens before its last, in whole blocks.
        [hit] = generate(core, [longer], SAMPLING)
        assert num_prefix_hits(core) == 1984
    with state_core(folder, enable_prefix_caching=False, **settings) as core:
        assert generate(core, [longer], SAMPLING) == [hit]


def test_the_third_prompt_of_a_branch_starts_where_the_second_left_the_first(folder):
    dice = random.Random(2)
    stem, *tails = ([dice.randrange(2, VOCAB_SIZE) for _ in range(n)] for n in (20, 30, 30, 30))
    with state_core(folder) as core:
        hits = []
        for tail in tails:
            generate(core, [[*stem, *tail]], SAMPLING)
            hits.append(num_prefix_hits(core))
    # The first has a checkpoint at its end alone. The second finds the KV of the stem, not a state.
    assert hits == [0, 0, 20]


def test_choices_share_the_prompt(folder):
    dice = random.Random(3)
    prompt = [dice.randrange(2, VOCAB_SIZE) for _ in range(30)]
    alone, other, both = (
        SamplingParams(max_tokens=9, temperature=1.0, seed=seed, ignore_eos=True, n=n)
        for seed, n in ((0, 1), (1, 1), (0, 2))
    )
    with state_core(folder) as core:
        wanted = generate(core, [prompt] * 2, [alone, other])
    with state_core(folder) as core:
        core.handle(CLIENT, AddRequest(EngineRequest("r", prompt, both)), 0.0)
        outputs = [[], []]
        while core.num_live:
            core.step(0.0)
            for event in take_events(core).get(CLIENT, []):
                if isinstance(event, TokenOutput):
                    outputs[event.choice] += event.token_ids
        assert outputs == wanted


def test_preempted_rows_compute_their_states_again(folder):
    dice = random.Random(4)
    prompts = [[dice.randrange(2, VOCAB_SIZE) for _ in range(n)] for n in (6, 7, 5, 6, 8, 7)]
    with state_core(folder, max_model_len=48) as core:
        wanted = generate(core, prompts, SAMPLING)
    with state_core(folder, max_model_len=48, num_blocks=13) as core:
        assert generate(core, prompts, SAMPLING) == wanted
        assert num_preemptions(core) > 0


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"kv_connector": "p2p", "role": "both"}, "kv_connector does not work"),
        (
            {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=2)},
            "speculative_config does not work",
        ),
    ],
    ids=["connector", "drafts"],
)
def test_what_states_do_not_allow_is_refused_by_name(folder, changes, error):
    config = make_config(folder, **changes)
    with pytest.raises(ConfigError, match=error):
        kv_groups(config, load_hf_config(folder))


@pytest.mark.parametrize("caching", [None, False])
@pytest.mark.parametrize("num_bytes", [300_000, 1_000_000, 20_000_000])
def test_states_and_kv_fit_in_the_memory(folder, caching, num_bytes):
    config = make_config(
        folder, num_blocks=None, kv_cache_memory_bytes=num_bytes, max_batch_size=4,
        enable_prefix_caching=caching,
    )  # fmt: skip
    full, states = groups = kv_groups(config, load_hf_config(folder))
    taken = sum(group.num_blocks * group.bytes_per_block for group in groups)
    assert taken <= num_bytes < taken + 4 * max(group.bytes_per_block for group in groups)
    # Of the null block, a sequence for each slot, and as many checkpoints.
    assert states.num_blocks >= (5 if caching is False else 9)
    assert states.spec.kind == "state" != full.spec.kind


def test_a_class_that_keeps_states_by_itself_hits_no_prefixes(folder):
    """It would continue behind a cached prefix with the state of another sequence."""
    able = ModelCapabilities(supports_prefix_caching=True, supports_chunked_prefill=True)
    model = load_hf_config(folder)
    theirs = model_facts(make_config(folder, generator="module:Class"), model, able)
    assert not theirs.supports_prefix_caching
    [group] = theirs.kv_groups
    assert len(group.layers) == model.num_hidden_layers
    assert model_facts(make_config(folder), model, able).supports_prefix_caching
