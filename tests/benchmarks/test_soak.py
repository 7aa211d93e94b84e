"""The soak's arithmetic, its verdicts, and its samples of processes."""

import random
import subprocess
import sys

import pytest

from benchmarks import soak
from benchmarks.soaking.growth import Sample, judge, mb_per_1000_requests, table, trend
from benchmarks.soaking.leaks import held
from benchmarks.soaking.load import Load, Tally, make_asks, text_of
from benchmarks.soaking.processes import ProcessSampler

MB = 2**20
METRICS = """
vllm:num_requests_running{{dp_group="0"}} {running}
vllm:num_requests_waiting 0
ttserve_router_queued_requests 0
ttserve_reserved_slots{{dp_group="0"}} 0
ttserve_kv_inflight_transfers{{role="producer"}} 0
ttserve_kv_leased_blocks 0
ttserve_kv_reserved_blocks 0
ttserve_kv_quarantined_blocks 0
ttserve_slots{{replica="a"}} 16
ttserve_slots{{replica="b"}} 32
ttserve_empty_slots{{replica="a"}} 16
ttserve_empty_slots{{replica="b"}} 32
ttserve_kv_blocks{{replica="a"}} 100
ttserve_kv_free_blocks{{replica="a"}} {free}
"""


def series(process, memory, *, times=200, is_ours=True, descriptors=lambda i: 20):
    """A sample every five seconds, fifty requests apart."""
    return [
        Sample(
            time_s=5.0 * i,
            num_requests=50 * i,
            process=process,
            process_id=1,
            is_ours=is_ours,
            anonymous_bytes=int(memory(i)),
            pss_bytes=int(memory(i)),
            num_descriptors=descriptors(i),
            num_threads=4,
        )
        for i in range(times)
    ]


def test_a_line_is_found_through_noise_and_spikes():
    rng = random.Random(1)
    times = [float(i) for i in range(1000)]
    values = [
        100 + 0.5 * t + rng.uniform(-3, 3) + 1000 * (i % 10 == 0) for i, t in enumerate(times)
    ]
    assert trend(times, values).change == pytest.approx(0.5 * 999, rel=0.01)


@pytest.mark.parametrize("count", [1, 2])
def test_a_window_of_few_samples_has_a_trend(count):
    assert trend([1.0, 2.0][:count], [5.0, 7.0][:count]).change == 2.0 * (count - 1)


def test_growth_before_the_end_of_the_warm_up_does_not_count():
    samples = series("engine", lambda i: 500 * MB + min(i, 100) * MB)
    (early,) = judge(samples, warm_up_s=0.0)
    (late,) = judge(samples, warm_up_s=500.0)
    assert not early.is_flat
    assert late.is_flat
    assert late.anonymous.change == 0.0


def test_two_kilobytes_a_request_are_seen():
    (grown,) = judge(series("engine", lambda i: 500 * MB + 50 * i * 2048), warm_up_s=100.0)
    assert not grown.is_flat
    assert grown.bytes_per_request == pytest.approx(2048, rel=0.01)
    assert mb_per_1000_requests([grown]) == pytest.approx(2048 * 1000 / MB, rel=0.01)
    assert "NO" in table([grown])


def test_lost_descriptors_and_a_process_that_ended_are_seen():
    (leaky,) = judge(series("a", lambda _: 9 * MB, descriptors=lambda i: 20 + i // 10), 0.0)
    assert not leaky.is_flat
    both = [*series("a", lambda _: 9 * MB), *series("b", lambda _: 9 * MB)[:150]]
    assert [(g.process, g.is_flat) for g in judge(both, 0.0)] == [("a", True), ("b", False)]


def test_rays_own_processes_are_shown_and_not_judged():
    grown = judge(
        [*series("raylet", lambda i: i * MB, is_ours=False), *series("z", lambda _: MB)], 0.0
    )
    assert [g.process for g in grown] == ["z", "raylet"]
    assert mb_per_1000_requests(grown) == 0.0
    assert not soak.Outcome(Tally(), {}, grown).problems(is_long=True)


def test_what_is_held_is_named_and_counted():
    assert held(METRICS.format(running=0, free=100)) == {}
    assert held(METRICS.format(running=2, free=97)) == {"running sequences": 2, "blocks": 3}


def test_metrics_that_lack_a_family_say_nothing_about_leaks():
    with pytest.raises(ValueError, match="ttserve_kv_leased_blocks"):
        held(METRICS.format(running=0, free=100).replace("ttserve_kv_leased_blocks 0", ""))


def test_the_summary_has_the_promised_keys():
    outcome = soak.Outcome(
        Tally(requests=10, ok=7, aborted=2, errors=1, notes=["x"]), {"slots": 2}, []
    )
    assert outcome.summary() == {
        "requests": 10, "ok": 7, "errors": 1, "leaked": 2, "growth_mb_per_1000_requests": 0,
    }  # fmt: skip
    assert len(outcome.problems(is_long=False)) == 2


def test_requests_are_of_both_apis_many_lengths_and_share_beginnings():
    asks = make_asks("m", random.Random(0))
    assert {ask.path for ask in asks} == {"/v1/completions", "/v1/chat/completions"}
    texts = [ask.body.get("prompt") or ask.body["messages"][0]["content"] for ask in asks]
    assert min(map(len, texts)) < 60 < 1500 < max(map(len, texts))
    assert len({text[:100] for text in texts}) < len(texts) - 50
    assert asks == make_asks("m", random.Random(0))


def test_answers_that_change_are_counted_and_too_many_are_a_problem():
    load = Load("http://nowhere", "m")
    load._check(3, "yes")
    load._check(3, "yes")
    load._check(3, "no")
    assert (load.tally.ok, load.tally.changed) == (3, 1)
    assert soak.Outcome(load.tally, {}, []).problems(is_long=False) == ["1 of 3 answers changed"]


def test_the_text_of_a_choice_of_either_api():
    assert text_of({"text": "a"}) == "a"
    assert text_of({"delta": {"content": "b"}}) == "b"
    assert text_of({"delta": {"role": "assistant"}}) == ""
    assert text_of({"message": {"content": "c"}}) == "c"


@pytest.mark.process
def test_the_processes_below_one_are_measured_and_keep_their_names():
    child = "print('ready', flush=True); input()"
    script = f'import subprocess,sys; subprocess.run([sys.executable, "-c", {child!r}])'
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        # A child that has just begun is still called and as large as the one that began it.
        assert process.stdout.readline() == b"ready\n"
        sampler = ProcessSampler(process.pid)
        looked = sampler.look(0.0, 0)
        again = sampler.look(1.0, 5)
        process.communicate(b"\n")
    assert len(looked) == 2
    assert [s.process for s in again] == [s.process for s in looked]
    assert {s.is_ours for s in again if s.process_id == process.pid} == {True}
    assert [s.num_threads for s in again] == [1, 1]
    assert min(s.pss_bytes for s in again) > MB


def test_the_servers_file_is_the_users_but_for_the_port(tmp_path):
    folder = tmp_path / "copy"
    folder.mkdir()
    original = tmp_path / "serve.yaml"
    original.write_text(
        "http_options: {host: 127.0.0.1, port: 8000}\n"
        "applications: [{name: ttserve, args: {model: demo, engine: {block_size: 32}}}]\n"
    )
    copy = soak.server_file(original, 8123, folder).read_text()
    assert "port: 8123" in copy
    assert "block_size: 32" in copy
