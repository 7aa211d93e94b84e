"""Profiles: measured where it was measured, predicted elsewhere; memory; what cannot be."""

import pytest

from replicas.errors import ConfigError
from replicas.generators.simulated.calibration import FITTED
from replicas.generators.simulated.meshes import BOARDS, MODELS, ROWS
from replicas.generators.simulated.profiles import (
    DRAM_UTILISATION,
    HOST_ROW_S,
    engine_timing,
    mesh_profile,
)
from tests.replicas.generators.simulated.engines import N150, simulated_config


def test_a_measured_pair_takes_its_row():
    profile = mesh_profile("T3K", "Falcon-7B", 8)
    assert profile.row in ROWS
    assert (profile.ttft_s, profile.step_s) == (0.087, pytest.approx(1 / 15.9))


def test_a_fine_tune_takes_the_row_of_its_model():
    for name in ("Llama-3.3-70B", "DeepSeek-R1-Distill-Llama-70B"):
        assert mesh_profile("T3K", name).row is mesh_profile("T3K", "Llama-3.1-70B").row


def test_other_lanes_on_the_same_chips_add_what_lanes_cost():
    alone, lanes = mesh_profile("n150", "Llama-3.1-8B"), mesh_profile("T3K", "Llama-3.1-8B", 8)
    assert lanes.row is alone.row
    assert lanes.step_s - alone.step_s == pytest.approx(FITTED.decode_lanes_s * (8**0.5 - 1))
    assert lanes.ttft_s - alone.ttft_s == pytest.approx(FITTED.prefill_lanes_s * (8**0.5 - 1))


def test_a_pair_without_a_row_is_predicted():
    profile = mesh_profile("n300", "Llama-3.1-8B")
    assert profile.row is None
    board, model = BOARDS["n300"], MODELS["Llama-3.1-8B"]
    assert profile.step_s == FITTED.step_s(board, model, 1)
    assert profile.step_s < mesh_profile("n150", "Llama-3.1-8B").step_s


def test_mistral_is_not_llama_although_both_have_eight_billion():
    assert mesh_profile("n150", "Mistral-7B").step_s == pytest.approx(1 / 28.7)
    assert mesh_profile("p150", "Mistral-7B").row is None


def test_kv_gets_what_the_weights_leave():
    """Llama-3.1-8B in bfloat8_b: 9.03 GB of weights, 69,632 bytes a token, of 12 GiB."""
    profile = mesh_profile("n150", "Llama-3.1-8B")
    model = profile.model
    assert model.num_forward_params == 7_504_658_432
    assert model.kv_bytes_per_token == 69_632
    assert mesh_profile("T3K", "Llama-3.1-70B").model.kv_bytes_per_token == 174_080
    usable = 12 * 2**30 * DRAM_UTILISATION - 50e6
    expected = (usable - model.weight_bytes) / 69_632
    assert profile.max_tokens_per_lane == int(expected) == 45_471


def test_lanes_do_not_share_memory():
    one, eight = mesh_profile("T3K", "Llama-3.1-8B"), mesh_profile("T3K", "Llama-3.1-8B", 8)
    assert eight.max_tokens_per_lane == 45_471
    # One lane keeps the weights once and not eight times.
    assert one.max_tokens_per_lane > 8 * eight.max_tokens_per_lane


def test_warm_up_grows_with_the_lengths_that_are_compiled():
    profile = mesh_profile("n150", "Llama-3.1-8B")
    assert [profile.compile_s(n) for n in (100, 1000, 2048, 8192)] == [20.0, 30.0, 40.0, 60.0]
    assert profile.compile_s() == profile.compile_s(131_072)


def test_an_engine_of_fewer_slots_takes_off_less_host_time():
    few = engine_timing(simulated_config(max_batch_size=8), N150)
    many = engine_timing(simulated_config(max_batch_size=32), N150)
    assert few.decode_base_s - many.decode_base_s == pytest.approx(24 * HOST_ROW_S)
    assert (few.block_size, few.bytes_per_token) == (32, 69_632)
    assert few.link.bytes_per_s == N150.link_bytes_per_s


def test_the_engines_own_compile_time_goes_over_the_estimate():
    config = simulated_config(max_model_len=128)
    assert engine_timing(config, N150, 0.0).warm_up_s() == 0.0
    assert engine_timing(config, N150).warm_up_s() == 20.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("n151", "Llama-3.1-8B"), "board 'n151' is not known; known: n150, n300, T3K, Galaxy"),
        (("n150", "Llama-4"), "model 'Llama-4' is not known; known: Llama-3.2-1B, "),
        (("n150", "Llama-3.1-70B"), "weights take 75.9 GB, and a lane's 1 chips have 12.9 GB"),
        (("T3K", "Llama-3.1-8B", 3), "tt_data_parallel 3 does not divide the 8 chips of T3K"),
        (("Galaxy", "Llama-3.1-8B"), "32 chips of Galaxy a lane: nothing was measured"),
    ],
)
def test_what_cannot_be_is_refused_with_both_numbers(arguments, message):
    with pytest.raises(ConfigError, match=message):
        mesh_profile(*arguments)
