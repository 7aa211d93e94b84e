"""A model whose layers see a window: blocks behind it are free, and the tokens are the same."""

from __future__ import annotations

import random

import pytest

from replicas.config import SpeculativeConfig
from replicas.generators.model_config import load_hf_config
from replicas.kv_sizing import kv_groups
from replicas.sampling_params import SamplingParams
from tests.engines import engine_core, generate, make_config, num_preemptions, num_prefix_hits
from tests.models import MARGIN, VOCAB_SIZE, model_folder, references

WINDOW, BLOCK_SIZE, NUM_NEW = 9, 4, 30
SAMPLING = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, seed=0, ignore_eos=True)


@pytest.fixture(scope="module", params=["mistral-window", "gemma2", "gemma3", "gpt-oss"])
def folder(request):
    return model_folder(request.param)


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
    sizes = {"num_blocks": 32, "max_model_len": 100}
    if folder != model_folder("mistral-window"):
        # Beside layers that keep all tokens one slot has few blocks of a window.
        sizes, prompts[1:2] = {"num_blocks": 64, "max_batch_size": 1, "max_model_len": 100}, []
    with window_core(folder, **sizes) as core:
        num_used = sum(-(-(len(p) + NUM_NEW - 1) // BLOCK_SIZE) for p in prompts[:-1])
        assert core.facts.kv_groups[-1].num_usable_blocks < num_used
        outputs = [generate(core, [each], SAMPLING)[0] for each in prompts]
        assert num_prefix_hits(core) == 56
        assert_right(folder, prompts, outputs)


@pytest.mark.parametrize(
    "changes",
    [{"mixed_batches": False}, {"attention": "batched"}, {"tt_data_parallel": 2}],
    ids=["padded calls", "batched operations", "two lanes"],
)
def test_every_way_of_computing_reads_the_blocks_of_its_layer(changes):
    folder, prompts = model_folder("gemma3"), make_prompts(60, 5, 33, 8)
    with window_core(folder, **changes) as core:
        assert_right(folder, prompts, generate(core, prompts, SAMPLING, stagger=2))
        assert sum(g.window_blocks_freed for g in core.metrics(0.0).groups) > 20


def test_drafts_are_verified_over_the_blocks_of_a_window(folder):
    prompts = [[*part, *part, *part] for part in make_prompts(12, 7, 9)]
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1)
    with window_core(folder, speculative_config=drafts) as core:
        assert_right(folder, prompts, generate(core, prompts, SAMPLING))
        assert core.metrics(0.0).drafts.num_draft_tokens > 0
        assert num_freed(core) > 0


@pytest.mark.parametrize(
    ("case", "changes", "window"),
    [
        ("mistral-window", {}, WINDOW),
        # Nothing would be freed, and one group is simpler than two.
        ("mistral-window", {"max_model_len": WINDOW}, None),
        ("mistral-window", {"kv_connector": "p2p", "role": "both", "block_size": 32}, WINDOW),
        # A connector of another package may read any block of a prompt.
        ("mistral-window", {"kv_connector": "module:Class", "role": "both"}, None),
        # A class of another package is given one table for all tokens.
        ("mistral-window", {"generator": "module:Class"}, None),
        ("gemma2", {}, (None, WINDOW)),
        ("gemma2", {"kv_connector": "p2p", "role": "both", "block_size": 32}, (None, WINDOW)),
        # The engine of the other pool may serve longer sequences.
        (
            "gemma2",
            {"kv_connector": "p2p", "role": "both", "block_size": 32, "max_model_len": WINDOW},
            (None, WINDOW),
        ),
        ("gemma2", {"kv_connector": "multi", "role": "both", "block_size": 32}, None),
        ("llama-gqa", {}, None),
    ],
    ids=[
        "all layers", "too long", "connector", "other connector", "class", "some layers",
        "their connector", "their connector, too long", "their pool", "none",
    ],
)  # fmt: skip
def test_which_models_keep_the_blocks_of_a_window(case, changes, window):
    config = make_config(model_folder(case), **changes)
    groups = kv_groups(config, load_hf_config(config.model))
    windows = window if isinstance(window, tuple) else (window,)
    assert tuple(group.spec.window for group in groups) == windows
