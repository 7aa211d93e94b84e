"""A demand has the same hashes and needs as engines compute for the request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.demand import Demand
from kv_transfer.block_hash import extend_block_hashes, prefix_root
from replicas.messages import EngineRequest, MultimodalInput
from replicas.sampling_params import SamplingParams
from tests.kv_groups import one_kv_group

KEY = b"of the deployment's prefix caches"


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=200),
    st.sampled_from([16, 32, 64]),
    st.sampled_from(["", "pepper"]),
)
def test_hashes_equal_the_engines_for_each_block_size(prompt, block_size, salt):
    hashes = []
    extend_block_hashes(hashes, prompt, block_size, prefix_root(KEY, salt))
    demand = Demand("r", prompt, cache_salt=salt)
    assert demand.block_hashes(block_size, KEY) == hashes
    first = demand.block_hashes(block_size, KEY)
    assert first is demand.block_hashes(block_size, KEY), "computed once"


def test_hashes_of_another_adapter_or_image_differ():
    image = MultimodalInput("image", 2, 3, b"hash", b"data")
    requests = [
        EngineRequest("r", [7] * 64, SamplingParams()),
        EngineRequest("r", [7] * 64, SamplingParams(), adapter="english"),
        EngineRequest("r", [7] * 64, SamplingParams(), multimodal=[image]),
    ]
    hashes = [Demand.of(request, 0.0).block_hashes(32, KEY) for request in requests]
    assert len({h for found in hashes for h in found}) == 6


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "num_blocks"),
    [(31, 32, 1), (32, 32, 2), (63, 64, 1), (1, 1, 2), (127, 64, 2)],
)
def test_a_request_needs_blocks_for_its_prompt_and_one_token(num_tokens, block_size, num_blocks):
    assert Demand("r", [7] * num_tokens).num_blocks(*one_kv_group(9, block_size)) == num_blocks


def test_a_demand_has_every_field_of_its_request():
    request = EngineRequest(
        "r",
        [1, 2, 3],
        SamplingParams(max_tokens=9, n=2),
        cache_salt="pepper",
        adapter="poet",
        priority=-1,
        tenant="acme",
        timeout_s=2.5,
    )
    demand = Demand.of(request, now_s=10.0)
    assert (demand.request_id, demand.num_prompt_tokens, demand.num_choices) == ("r", 3, 2)
    assert (demand.expected_output_tokens, demand.cache_salt) == (9, "pepper")
    assert (demand.adapter, demand.priority, demand.tenant) == ("poet", -1, "acme")
    assert demand.deadline_s == 12.5
    assert Demand.of(EngineRequest("r", [1], SamplingParams()), now_s=10.0).deadline_s is None


def test_a_demand_never_changes():
    with pytest.raises(AttributeError):
        Demand("r", [1]).priority = 1
