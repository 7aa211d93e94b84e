"""Experts on several ranks: any placement gives the results of one rank with all experts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replicas.errors import ConfigError
from replicas.generators.expert_placement import place_experts
from replicas.generators.layer_specs import ExpertsConfig
from replicas.generators.torch.experts import ExpertDispatch, Experts
from replicas.generators.torch.linear import PlainLinear

NUM_EXPERTS, PER_TOKEN, HIDDEN = 6, 2, 8
CONFIG = ExpertsConfig(NUM_EXPERTS, PER_TOKEN, HIDDEN, is_normalised=True, rounds_shares=False)
CHANCE = torch.Generator().manual_seed(1)
ROUTER = PlainLinear(torch.randn(NUM_EXPERTS, HIDDEN, generator=CHANCE), None)
SCALES = torch.randn(NUM_EXPERTS, generator=CHANCE)

tables = st.integers(1, 4).flatmap(
    lambda size: st.tuples(
        st.just(size),
        st.lists(
            st.sets(st.integers(0, size - 1), min_size=1).map(tuple),
            min_size=NUM_EXPERTS,
            max_size=NUM_EXPERTS,
        ),
    )
)


class Ranks:
    """All-to-all between threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = Barrier(size, timeout=30)
        self.sent: list[list[torch.Tensor]] = [[]] * size

    def swap(self, rank: int, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        self.sent[rank] = parts
        self.barrier.wait()
        found = [parts[rank] for parts in self.sent]
        self.barrier.wait()
        return found


class ThreadExchange:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.rank, self.size = rank, ranks.size
        self._ranks = ranks

    def counts(self, counts):
        return torch.cat(self._ranks.swap(self.rank, list(counts.chunk(self.size))))

    def rows(self, rows, sent, received):
        found = self._ranks.swap(self.rank, list(rows.split(list(sent))))
        assert [len(part) for part in found] == list(received)
        return torch.cat(found)


def expert(number):
    """An expert that computes element by element, so that neighbours cannot change a bit."""
    return lambda x: torch.tanh(x * SCALES[number])


def experts_of(rank, ranks, table):
    placement = place_experts(NUM_EXPERTS, ranks.size, table)
    dispatch = ExpertDispatch(placement, ThreadExchange(ranks, rank))
    return Experts(CONFIG, ROUTER, [expert(n) for n in dispatch.own], dispatch)


def run(table, size, inputs):
    """Each rank's layer, after it has computed its own inputs together with the others."""
    ranks = Ranks(size)
    layers = [experts_of(rank, ranks, table) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return layers, list(pool.map(lambda layer, x: layer(x), layers, inputs))


@given(tables, st.lists(st.integers(0, 9), min_size=4, max_size=4), st.integers(0, 1000))
def test_any_placement_gives_what_one_rank_gives(sized, lengths, seed):
    size, table = sized
    chance = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(length, HIDDEN, generator=chance) for length in lengths[:size]]
    alone = Experts(CONFIG, ROUTER, [expert(n) for n in range(NUM_EXPERTS)])
    wanted = [alone(x) for x in inputs]
    layers, found = run(table, size, inputs)
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)
    num_tokens = sum(layer.num_tokens for layer in layers)
    assert torch.equal(num_tokens, alone.num_tokens)
    assert sum(layer.num_rows for layer in layers) == alone.num_rows == int(num_tokens.sum())


def test_ranks_that_hold_an_expert_share_out_the_rows_of_the_others():
    """Rank 0 has no expert at all; every expert is on ranks 1 to 3."""
    inputs = [torch.randn(30, HIDDEN, generator=CHANCE), *[torch.zeros(0, HIDDEN)] * 3]
    layers, _ = run([(1, 2, 3)] * NUM_EXPERTS, 4, inputs)
    assert layers[0].num_rows == 0
    rows = [layer.num_rows for layer in layers[1:]]
    assert sum(rows) == 30 * PER_TOKEN
    assert max(rows) - min(rows) <= NUM_EXPERTS


def test_a_rank_computes_its_own_rows_where_it_holds_the_expert():
    inputs = [torch.randn(length, HIDDEN, generator=CHANCE) for length in (20, 1)]
    layers, _ = run([(0, 1)] * NUM_EXPERTS, 2, inputs)
    assert [layer.num_rows for layer in layers] == [20 * PER_TOKEN, 1 * PER_TOKEN]


def test_without_a_table_each_rank_has_an_equal_run():
    placement = place_experts(6, 3, None)
    assert [placement.experts_of(rank) for rank in range(3)] == [(0, 1), (2, 3), (4, 5)]


@pytest.mark.parametrize(
    ("table", "error"),
    [
        (None, "6 experts do not divide by gang_size 4"),
        ([[0]] * 5, "ranks for 5 experts, and the model has 6"),
        ([[0]] * 5 + [[]], r"expert_placement\[5\] \[\] must be one or more"),
        ([[0]] * 5 + [[1, 1]], r"expert_placement\[5\] \[1, 1\] must be one or more different"),
        ([[4]] + [[0]] * 5, r"expert_placement\[0\] \[4\] must be ranks from 0 to 3"),
        ([[-1]] + [[0]] * 5, r"expert_placement\[0\] \[-1\] must be ranks from 0 to 3"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(table, error):
    with pytest.raises(ConfigError, match=error):
        place_experts(NUM_EXPERTS, 4, table)
