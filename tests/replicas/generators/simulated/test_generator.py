"""The simulated generator keeps the contract of generators, and takes its time."""

import pytest
import torch

from replicas.errors import ConfigError
from replicas.generators.model_config import load_hf_config
from replicas.generators.protocol import CpuDevice
from replicas.generators.registry import resolve_generator
from replicas.generators.simulated.device import SimulatedMesh
from replicas.generators.simulated.generator import SimulatedGenerator
from replicas.generators.simulated.profiles import mesh_profile
from replicas.generators.simulated.timing import LinkTiming
from replicas.generators.simulated.tokens import expected_tokens
from tests.replicas.generators.conformance import NUM_NEW, PROMPTS, check_generator
from tests.replicas.generators.paged_loop import PagedLoop
from tests.replicas.generators.simulated.clocks import FakeClock
from tests.replicas.generators.simulated.engines import MODEL

CONFIG = load_hf_config(MODEL)
TIMING = mesh_profile("n150", "Llama-3.1-8B").timing(
    block_size=16, link=LinkTiming(0.0, 1e9), compile_s=60.0
)


def make(clock=None, **sizes):
    sizes = {"max_batch_size": 8, "max_seq_len": 128, "tt_data_parallel": 1, **sizes}
    mesh = SimulatedMesh(TIMING, clock or FakeClock())
    return SimulatedGenerator.initialize_vllm_model(
        CONFIG, mesh, sizes.pop("max_batch_size"), **sizes
    )


def make_loop(clock=None, lanes=1):
    generator = make(clock, tt_data_parallel=lanes)
    return PagedLoop(generator, CONFIG, num_lanes=lanes, slots_per_lane=8 // lanes)


def test_simulated_generator_conforms():
    check_generator(lambda **sizes: (make(**sizes), CONFIG))


@pytest.mark.parametrize(("lanes", "chunk"), [(1, None), (4, None), (1, 7), (2, 5)])
def test_tokens_are_those_expected(lanes, chunk):
    sequences = make_loop(lanes=lanes).generate(PROMPTS, NUM_NEW, chunk=chunk)
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        right = expected_tokens(prompt, NUM_NEW, CONFIG.vocab_size, CONFIG.eos_token_id)
        assert sequence.output == right


def test_a_prefill_reads_what_was_there_before_its_start():
    loop = make_loop()
    first, other = loop.add(list(range(40)), 1), loop.add(list(range(40)), 1)
    loop.step_prefill([first])
    other.num_computed_tokens = 32
    other.block_ids[0] = first.block_ids[0]  # the second block was never written
    loop.step_prefill([other])
    assert other.output != first.output


def test_logits_are_one_hot_and_not_the_generators_own():
    loop = make_loop()
    sequence = loop.add([3, 4, 5], 3)
    loop.step_prefill([sequence])
    logits = loop.step_decode([sequence])
    assert logits.dtype == torch.float32
    assert logits.count_nonzero() == 1
    kept = logits.clone()
    loop.step_decode([sequence])
    assert torch.equal(logits, kept)


class Ahead:
    """Decodes of a few prompts on a device that gets only the inputs that it needs."""

    def __init__(self, clock=None):
        self.clock = clock or FakeClock()
        self.loop = make_loop(self.clock, lanes=2)
        self.sequences = [self.loop.add(list(range(n, 2 * n)), 40) for n in (3, 14, 40)]
        self.loop.step_prefill(self.sequences)
        self.slots = [s.slot for s in self.sequences]
        self.table = torch.zeros(8, self.loop.table_width, dtype=torch.int32)
        self.table[self.slots] = self.loop._page_table(self.sequences)
        self.tokens = torch.zeros(8, 1, dtype=torch.int32)
        self.tokens[self.slots, 0] = torch.tensor([s.token_ids[-1] for s in self.sequences]).int()
        self.positions = torch.full((8,), -1)
        self.positions[self.slots] = torch.tensor([s.num_prompt_tokens for s in self.sequences])

    def decode(self, **commands):
        return self.loop.generator.decode_forward(
            tokens=self.tokens, page_table=self.table, kv_cache=self.loop.cache,
            start_pos=self.positions, enable_trace=True,
            **{"sampling_params": object(), "read_from_device": False, **commands},
        )  # fmt: skip

    def wanted(self, num_tokens):
        return [
            expected_tokens(
                s.token_ids[: s.num_prompt_tokens], num_tokens, CONFIG.vocab_size,
                CONFIG.eos_token_id,
            )
            for s in self.sequences
        ]  # fmt: skip


def test_the_device_continues_from_its_own_tokens():
    ahead = Ahead()
    found = [ahead.decode()]
    ahead.tokens.fill_(7)
    ahead.positions.fill_(5)
    kept, ahead.table = ahead.table, torch.zeros_like(ahead.table)
    found += [ahead.decode(reload_inputs=False) for _ in range(8)]
    # A block more: the table alone is new, and it may be written into after the call.
    ahead.table = kept.clone()
    found.append(ahead.decode(reload_inputs=False, reload_page_table=True))
    ahead.table.zero_()
    found += [ahead.decode(reload_inputs=False) for _ in range(8)]
    outputs = []
    for handle in found:
        host, events = ahead.loop.generator.read_decode_output(handle, async_read=True)
        assert len(events) == 1
        tokens = ahead.loop.generator.process_decode_output_host(host, is_tokens=True)
        outputs.append(tokens[ahead.slots, 0].tolist())
    assert [list(row) for row in zip(*outputs, strict=True)] == [w[1:] for w in ahead.wanted(19)]


def test_a_device_that_has_not_drawn_the_last_tokens_cannot_go_on():
    for between in (
        lambda ahead: ahead.decode(sampling_params=None),
        lambda ahead: ahead.loop.step_prefill([ahead.loop.add([3, 4], 2)]),
    ):
        ahead = Ahead()
        ahead.decode()
        between(ahead)
        with pytest.raises(ValueError, match="set reload_inputs"):
            ahead.decode(reload_inputs=False)


def test_decodes_are_begun_without_waiting_and_waited_for_in_their_order():
    clock = FakeClock()
    ahead = Ahead(clock)
    started_s, mesh = clock.time_s, ahead.loop.generator._mesh
    first, second = ahead.decode(), ahead.decode(reload_inputs=False)
    assert clock.time_s == started_s
    rows = [(s.lane, s.num_prompt_tokens + 1) for s in ahead.sequences]
    first_s = TIMING.decode_s(rows)
    both_s = first_s + TIMING.decode_s([(lane, n + 1) for lane, n in rows])
    for handle, after_s in ((first, first_s), (second, both_s)):
        _, (event,) = ahead.loop.generator.read_decode_output(handle, async_read=True)
        mesh.wait(event)
        assert clock.time_s == pytest.approx(started_s + after_s)
    third = ahead.decode(reload_inputs=False)
    other = ahead.loop.add([3, 4, 5], 2)
    ahead.loop.step_prefill([other])
    third_s = TIMING.decode_s([(lane, n + 2) for lane, n in rows])
    end_s = started_s + both_s + third_s + TIMING.prefill_s([(other.lane, 0, 3)])
    assert clock.time_s == pytest.approx(end_s), "a prompt waits for the device"
    assert ahead.loop.generator.read_decode_output(third, async_read=False)[1] == []
    assert clock.time_s == pytest.approx(end_s), "it was over before"


def test_calls_take_the_time_of_the_model_of_time():
    clock = FakeClock()
    loop = make_loop(clock, lanes=2)
    sequences = [loop.add(list(range(n)), 3) for n in (48, 20, 16)]
    loop.step_prefill(sequences)
    chunks = [(s.lane, 0, s.num_prompt_tokens) for s in sequences]
    assert clock.spent == [pytest.approx(TIMING.prefill_s(chunks))]
    loop.step_decode(sequences)
    rows = [(s.lane, s.num_prompt_tokens + 1) for s in sequences]
    assert clock.spent[1:] == [pytest.approx(TIMING.decode_s(rows))]


def test_a_prefix_hit_costs_only_what_is_left():
    clock = FakeClock()
    loop = make_loop(clock)
    sequence = loop.add(list(range(40)), 3)
    sequence.num_computed_tokens = 32
    loop.step_prefill([sequence])
    assert clock.spent == [pytest.approx(TIMING.prefill_s([(0, 32, 40)]))]


def test_warm_up_takes_the_time_of_compiling_in_all():
    clock = FakeClock()
    generator = make(clock)
    for enable_trace in (False, True):
        generator.warmup_model_prefill(kv_cache=None, enable_trace=enable_trace)
        generator.warmup_model_decode(
            kv_cache=None, enable_trace=enable_trace, max_batch_size=8, num_blocks=4
        )
    assert sum(clock.spent) == pytest.approx(60.0)


def test_the_token_budget_is_that_of_the_boards_memory():
    def budget(name, lanes=1):
        return SimulatedGenerator.get_max_tokens_all_users(
            model_name=name, num_devices=1, tt_data_parallel=lanes, max_model_len=1, max_num_seqs=1
        )

    assert budget("n150/Llama-3.1-8B") == mesh_profile("n150", "Llama-3.1-8B").max_tokens_per_lane
    assert budget("T3K/Llama-3.1-8B", 8) == budget("n150/Llama-3.1-8B")
    assert budget("some/folder") == 131_072


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="CpuDevice; set simulated_mesh"):
        SimulatedGenerator.initialize_vllm_model(
            CONFIG, CpuDevice(torch.float32), 8, max_seq_len=128
        )
    with pytest.raises(ConfigError, match="multiple of tt_data_parallel"):
        make(tt_data_parallel=3)
    generator = make()
    decode = {
        "tokens": torch.zeros(8, 1, dtype=torch.int32),
        "page_table": torch.zeros(8, 4, dtype=torch.int32),
        "kv_cache": None,
        "start_pos": torch.full((8,), -1),
        "enable_trace": True,
    }
    with pytest.raises(TypeError, match="reset_batch"):
        generator.decode_forward(**decode, reset_batch=True)
    with pytest.raises(ValueError, match="reload_inputs"):
        generator.decode_forward(**decode, reload_inputs=False)
    with pytest.raises(ValueError, match="page_tables_per_layer"):
        generator.decode_forward(**decode, page_tables_per_layer=[])
    with pytest.raises(ValueError, match="4 rows for a batch of 8"):
        generator.decode_forward(**{**decode, "start_pos": torch.full((4,), -1)})


def test_it_is_found_by_its_name():
    name = "replicas.generators.simulated.generator:SimulatedGenerator"
    assert resolve_generator(name) is SimulatedGenerator
