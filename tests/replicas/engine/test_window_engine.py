"""A model whose layers see a window: blocks behind it are free, and the tokens are the same."""

from __future__ import annotations

import random

import pytest

from replicas.generators.model_config import load_hf_config
from replicas.kv_sizing import kv_groups
from replicas.sampling_params import SamplingParams
from tests.engines import engine_core, generate, make_config, num_preemptions, num_prefix_hits
from tests.models import MARGIN, VOCAB_SIZE, model_folder, references

WINDOW, BLOCK_SIZE, NUM_NEW = 9, 4, 30
SAMPLING = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, seed=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder():
    return model_folder("mistral-window")


def make_prompts(*lengths):
    dice = random.Random(1)
    return [[dice.randrange(2, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def assert_right(folder, prompts, outputs):
    """Each output is that of transformers, up to a token that either could be."""
    for reference, output in zip(references(folder, prompts, NUM_NEW), outputs, strict=True):
        ties = [i for i, margin in enumerate(reference.margins) if margin < MARGIN]
        end = ties[0] if ties else NUM_NEW
        assert end > 0
        assert output[:end] == reference.token_ids[:end]


def num_freed(core):
    [counters] = core.metrics(0.0).groups
    return counters.window_blocks_freed


def window_core(folder, **changes):
    settings = {"block_size": BLOCK_SIZE, "max_num_batched_tokens": 16, **changes}
    return engine_core(make_config(folder, **settings))


def test_rows_free_what_is_behind_their_window(folder):
    prompts = make_prompts(60, 5, 33, 8)
    with window_core(folder) as core:
        assert_right(folder, prompts, generate(core, prompts, SAMPLING, stagger=2))
        # The last position that is computed sees itself and eight before it.
        last = [len(prompt) + NUM_NEW - 2 for prompt in prompts]
        behind = [(position + 1 - WINDOW) // BLOCK_SIZE for position in last]
        # Blocks are freed as others fill: at most one is behind the window at the end.
        assert sum(behind) - len(prompts) <= num_freed(core) <= sum(behind)


def test_preempted_rows_give_the_same_tokens(folder):
    prompts = make_prompts(6, 7, 5, 6, 8, 7)
    with window_core(folder, num_blocks=14, max_model_len=48) as core:
        assert_right(folder, prompts, generate(core, prompts, SAMPLING))
        assert num_preemptions(core) > 0
        assert num_freed(core) > 0


def test_a_prefix_is_hit_though_its_beginning_is_lost(folder):
    [prompt, other, tail] = make_prompts(60, 40, 5)
    prompts = [prompt, other, [*prompt[:56], *tail]]
    # Of 31 blocks the second request takes the oldest: those of the first one's beginning.
    with window_core(folder, num_blocks=32, max_model_len=100) as core:
        outputs = [generate(core, [each], SAMPLING)[0] for each in prompts]
        assert num_prefix_hits(core) == 56
        assert_right(folder, prompts, outputs)


@pytest.mark.parametrize(
    ("case", "changes", "window"),
    [
        ("mistral-window", {}, WINDOW),
        # Nothing would be freed, and one group is simpler than two.
        ("mistral-window", {"max_model_len": WINDOW}, None),
        # Other engines may read any block of a prompt.
        ("mistral-window", {"kv_connector": "p2p", "role": "both", "block_size": 32}, None),
        # A class of another package is given one table for all tokens.
        ("mistral-window", {"generator": "module:Class"}, None),
        ("gemma2", {}, None),
        ("llama-gqa", {}, None),
    ],
    ids=["all layers", "too long", "connector", "class", "some layers", "none"],
)
def test_which_models_keep_the_blocks_of_a_window(case, changes, window):
    config = make_config(model_folder(case), **changes)
    [group] = kv_groups(config, load_hf_config(config.model))
    assert group.spec.window == window
