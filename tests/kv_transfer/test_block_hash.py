"""Equal hashes mean equal prefixes, and a hash cannot be computed without its key."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.block_hash import HASH_BYTES, extend_block_hashes, prefix_root
from kv_transfer.connector import TransferRequest
from kv_transfer.pooled import unit_keys

KEY, OTHER = b"one deployment's key", b"another deployment's"
PROMPTS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
SALTS = st.sampled_from(["", "pepper", "pepperoni"])


def hashes_of(prompt, key=KEY, salt="", block_size=4):
    hashes: list[bytes] = []
    extend_block_hashes(hashes, prompt, block_size, prefix_root(key, salt))
    return hashes


@given(PROMPTS, PROMPTS, SALTS, SALTS)
def test_two_hashes_are_equal_where_everything_up_to_their_end_is(one, other, salt, other_salt):
    pairs = zip(hashes_of(one, salt=salt), hashes_of(other, salt=other_salt), strict=False)
    for i, (a, b) in enumerate(pairs):
        end = 4 * (i + 1)
        assert (a == b) == ((one[:end], salt) == (other[:end], other_salt))


@pytest.mark.parametrize(
    ("salt", "digest"),
    [
        ("", "22f0f6ebbc7ef8f67337f38184beae4761be004db89c4c79a9f975581777ef9f"),
        ("pepper", "ae99143c9cc35d4c2775f18430b42ad2714039155db0531bdf7af76078de8b7f"),
    ],
)
def test_a_salt_alone_gives_the_root_of_earlier_versions(salt, digest):
    assert prefix_root(KEY, salt).hex() == digest
    assert prefix_root(KEY, salt, "", ()).hex() == digest


ADAPTERS = st.sampled_from(["", "pepper", "english"])
IMAGES = st.lists(
    st.tuples(
        st.just("image"), st.integers(0, 3), st.integers(1, 2), st.sampled_from([b"a", b"b"])
    ),
    max_size=2,
)


@given(SALTS, ADAPTERS, IMAGES, SALTS, ADAPTERS, IMAGES)
def test_two_roots_are_equal_where_salt_adapter_and_images_are(
    salt, adapter, images, other_salt, other_adapter, other_images
):
    one = prefix_root(KEY, salt, adapter, images)
    other = prefix_root(KEY, other_salt, other_adapter, other_images)
    is_equal = (salt, adapter, images) == (other_salt, other_adapter, other_images)
    assert (one == other) == is_equal


@given(PROMPTS, st.integers(0, 40))
def test_a_chain_may_be_grown_in_parts(prompt, num_first):
    hashes = hashes_of(prompt[:num_first])
    extend_block_hashes(hashes, prompt, 4, prefix_root(KEY, ""))
    assert hashes == hashes_of(prompt)


@given(PROMPTS, SALTS)
def test_two_deployments_have_no_hash_in_common(prompt, salt):
    ours, theirs = hashes_of(prompt, KEY, salt), hashes_of(prompt, OTHER, salt)
    assert not set(ours) & set(theirs)
    assert len({*ours, *theirs}) == 2 * len(ours)
    assert all(len(block_hash) == HASH_BYTES == 32 for block_hash in ours)


def test_a_hash_is_keyed_in_each_of_its_blocks():
    # An attacker that learns the hash of a block cannot extend the chain without the key.
    prompt = list(range(8))
    parent, wanted = hashes_of(prompt)
    chained = parent + struct.pack("<4i", *prompt[4:])
    person = b"ttserve block"
    for key in (b"", KEY, OTHER):
        assert hashlib.blake2b(chained, digest_size=32, key=key, person=person).digest() != wanted
    root = prefix_root(KEY, "")
    assert hashlib.blake2b(chained, digest_size=32, key=root, person=person).digest() == wanted


def test_a_pools_names_are_no_hashes_of_a_prefix_cache():
    prompt = list(range(64))
    names = unit_keys("layout", TransferRequest("r", prompt), 32)
    assert not set(names) & set(hashes_of(prompt, block_size=32))
