"""Sums and concatenations over the chips of a lane, on meshes that are a line and a ring."""

from __future__ import annotations

import pytest
import torch
import ttnn

from replicas.generators.ttnn.collectives import Collectives
from tests.tt.test_programs import LINE, RING, of, programs_of

WIDTH = 512


def part(device, width=WIDTH, where=ttnn.L1_MEMORY_CONFIG):
    zeros = torch.zeros(1, 1, 32, width, dtype=torch.bfloat16)
    return ttnn.from_torch(
        zeros, layout=ttnn.TILE_LAYOUT, device=device, memory_config=where, dtype=ttnn.bfloat16
    )


def in_l1(device):
    """Bytes of each bank of L1 that are taken."""
    return ttnn.get_memory_view(device, ttnn.BufferType.L1).total_bytes_allocated_per_bank


def around(name, lanes, fabric, program):
    mark = pytest.mark.board(name)
    return pytest.param(name, lanes, fabric, program, marks=mark, id=f"{name}-{lanes}-{fabric}")


@pytest.mark.parametrize(
    ("name", "lanes", "fabric", "program"),
    [
        around("N300", 1, None, LINE),
        around("T3K", 1, None, LINE),
        around("T3K", 1, "FABRIC_1D_RING", RING),
        around("T3K", 2, "FABRIC_1D_RING", LINE),
        around("P150x4", 1, None, LINE),
        around("P150x4", 1, "FABRIC_1D_RING", RING),
        around("P150x4", 2, None, LINE),
    ],
)
def test_a_lane_goes_round_where_its_chips_and_the_fabric_do(
    open_mock_mesh, name, lanes, fabric, program
):
    for device in open_mock_mesh(name, trace="none", fabric=fabric).lanes(lanes):
        collectives, tp = Collectives(device), device.get_num_devices()
        x = part(device)
        collectives.begin_call()
        found = []
        run = programs_of(lambda: found.append(collectives.summed(x, ttnn.L1_MEMORY_CONFIG)))  # noqa: B023
        assert of("ReduceScatterMinimalAsyncDeviceOperation", run) == [program]
        assert of("AllGatherAsyncDeviceOperation", run) == ["DefaultMeshWorkloadFactory"]
        [total] = found
        assert list(total.shape) == [1, 1, 32, WIDTH]
        assert total.memory_config() == ttnn.L1_MEMORY_CONFIG
        assert not x.is_allocated()
        assert list(collectives.gathered(part(device)).shape) == [1, 1, 32, WIDTH * tp]


@pytest.mark.board("N300")
def test_semaphores_are_made_once_and_freed_with_the_lane(open_mock_mesh):
    (device,) = open_mock_mesh(trace="none").lanes(1)
    before = in_l1(device)
    collectives = Collectives(device)
    made = in_l1(device)
    assert made > before

    def call(num_sums):
        collectives.begin_call()
        for _ in range(num_sums):
            ttnn.deallocate(collectives.summed(part(device), ttnn.L1_MEMORY_CONFIG))

    call(3)
    num_programs = device.num_program_cache_entries()
    for num_sums in (2, 4, 3):
        call(num_sums)
        assert in_l1(device) == made
    # Which semaphores a collective takes is no part of its program.
    assert device.num_program_cache_entries() == num_programs
    collectives.close()
    collectives.close()
    device.clear_program_cache()
    assert in_l1(device) == before


@pytest.mark.board("N150")
def test_a_lane_of_one_chip_has_none(open_mock_mesh):
    (device,) = open_mock_mesh(trace="none").lanes(1)
    before = in_l1(device)
    collectives, x = Collectives(device), part(device, where=ttnn.DRAM_MEMORY_CONFIG)
    assert in_l1(device) == before
    assert collectives.summed(x, ttnn.L1_MEMORY_CONFIG) is x
    assert collectives.gathered(x) is x
