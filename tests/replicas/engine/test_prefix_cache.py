"""The prefix cache gives a request the KV of its own prefix, whatever others ask for."""

from __future__ import annotations

import struct

import pytest
import xxhash

from kv_transfer.keys import KeyRing
from tests.engines import engine_core, generate, make_config, num_prefix_hits
from tests.models import model_folder

OURS, NEXT, THEIRS = (name * 8 for name in (b"ours", b"next", b"them"))
PROMPT = [(7 * i) % 149 for i in range(70)]
POISON = [(11 * i + 5) % 149 for i in range(32)] + PROMPT[32:]
"""Another prompt whose first block has the same xxh3: see `break_xxh3`."""


def config(**changes):
    return make_config(model_folder("llama-gqa"), **changes)


def indexed(keys):
    """Hashes that an engine with these secrets has of a prompt's blocks, once it is answered."""
    with engine_core(config(keys=keys)) as core:
        generate(core, [PROMPT])
        return set(core._scheduler._groups._pools[0]._block_by_hash)


def test_engines_of_one_deployment_agree_and_no_others_do():
    ours = indexed(KeyRing((OURS, NEXT)))
    assert len(ours) == 2
    assert indexed(KeyRing((OURS,))) == ours, "the first secret counts"
    for others in (KeyRing((THEIRS,)), KeyRing((NEXT, OURS)), KeyRing()):
        assert not indexed(others) & ours


def test_without_secrets_each_engine_draws_a_key():
    assert not indexed(KeyRing()) & indexed(KeyRing())


@pytest.fixture
def _break_xxh3(monkeypatch):
    """Somebody has found a second preimage: two first blocks have the same xxh3."""
    first, poison = (struct.pack("<32i", *prompt[:32]) for prompt in (PROMPT, POISON))
    for name in ("xxh3_128_digest", "xxh3_64_digest", "xxh128_digest"):
        digest = getattr(xxhash, name)
        monkeypatch.setattr(
            xxhash, name, lambda data, _digest=digest: _digest(data.replace(poison, first))
        )


@pytest.mark.usefixtures("_break_xxh3")
def test_a_collision_of_xxh3_poisons_nobodys_prefix():
    with engine_core(config(enable_prefix_caching=False)) as core:
        [wanted] = generate(core, [PROMPT])
    with engine_core(config()) as core:
        [other] = generate(core, [POISON])
        assert other != wanted
        assert generate(core, [PROMPT]) == [wanted], "answered from the KV of another prompt"
        assert num_prefix_hits(core) == 0


def test_no_xxh3_is_taken_of_a_prompt(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("xxh3 of what a client chose")

    for name in [name for name in dir(xxhash) if name.startswith(("xxh", "XXH"))]:
        monkeypatch.setattr(xxhash, name, refuse)
    with engine_core(config()) as core:
        first, second = (generate(core, [PROMPT]) for _ in range(2))
        assert first == second
        assert num_prefix_hits(core) == 64
