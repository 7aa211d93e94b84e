"""Long texts of many clients in few threads: shares, order and bounds, and an attack on them."""

import asyncio
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config.schema import AdmissionConfig, IngressConfig
from cluster.edge.fair_scheduler import SLICE_CHARS, FairScheduler, Job, JobLimits, Priority
from cluster.edge.heavy_work import HeavyWork
from cluster.edge.routes import create_app
from cluster.errors import SaturatedError
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.test_routes import Client

SIZES = st.integers(0, 3 * SLICE_CHARS)
JOBS = st.tuples(st.sampled_from(Priority), st.sampled_from("abcd"), SIZES)
UNBOUNDED = JobLimits(2**40, 2**40, 2**20, 2**20)


def finish_slice(scheduler, job):
    """End a job's slice: it waits again, or is done."""
    if job.num_left:
        scheduler.resume(job)
    else:
        scheduler.release(job)


@given(jobs=st.lists(JOBS, max_size=40), num_running=st.integers(1, 3), data=st.data())
def test_every_job_ends_and_releases_its_characters(jobs, num_running, data):
    scheduler = FairScheduler(UNBOUNDED)
    waiting = [Job(*job) for job in jobs]
    for job in waiting:
        scheduler.admit(job)
    assert scheduler.num_chars == sum(job.num_chars for job in waiting)
    running = []
    while scheduler.num_jobs:
        while len(running) < num_running and (job := scheduler.pop_next()) is not None:
            running.append(job)
        finish_slice(scheduler, running.pop(data.draw(st.integers(0, len(running) - 1))))
    assert (scheduler.num_jobs, scheduler.num_chars, scheduler.pop_next()) == (0, 0, None)


@given(sizes=st.lists(st.integers(1, 4 * SLICE_CHARS), min_size=4), num_slices=st.integers(1, 60))
def test_of_two_sources_that_both_wait_neither_gets_two_slices_ahead(sizes, num_slices):
    scheduler = FairScheduler(UNBOUNDED)
    had = {"few": 0, "many": 0}
    for number in range(num_slices):
        scheduler.admit(Job(Priority.PROMPT, "many", sizes[number % len(sizes)]))
    scheduler.admit(Job(Priority.PROMPT, "few", 10**9))
    lefts = {}
    for _ in range(num_slices):
        job = scheduler.pop_next()
        had[job.source] += lefts.get(job, job.num_chars) - job.num_left
        lefts[job] = job.num_left
        finish_slice(scheduler, job)
        assert abs(had["few"] - had["many"]) <= 2 * SLICE_CHARS


def test_a_source_of_twice_the_weight_gets_twice_as_much():
    scheduler = FairScheduler(UNBOUNDED)
    for source, weight in (("light", 1.0), ("heavy", 2.0)):
        scheduler.admit(Job(Priority.PROMPT, source, 10**9, weight))
    taken = []
    for _ in range(300):
        job = scheduler.pop_next()
        taken.append(job.source)
        scheduler.resume(job)
    assert abs(taken.count("heavy") - 2 * taken.count("light")) <= 3


def test_prompts_go_first_and_other_texts_are_not_starved():
    scheduler = FairScheduler(UNBOUNDED)
    scheduler.admit(Job(Priority.OTHER, "a", 10**9))
    scheduler.admit(Job(Priority.PROMPT, "b", 10**9))
    taken = []
    for _ in range(90):
        job = scheduler.pop_next()
        taken.append(job.priority)
        scheduler.resume(job)
    assert taken[0] is Priority.PROMPT
    assert taken.count(Priority.OTHER) == 10


def test_a_job_that_cannot_be_divided_is_charged_whole():
    scheduler = FairScheduler(UNBOUNDED)
    whole = Job(Priority.OTHER, "whole", 8 * SLICE_CHARS, slice_chars=8 * SLICE_CHARS)
    jobs = [whole, Job(Priority.OTHER, "whole", 1), Job(Priority.OTHER, "sliced", 8 * SLICE_CHARS)]
    for job in jobs:
        scheduler.admit(job)
    taken = []
    for _ in range(9):
        job = scheduler.pop_next()
        taken.append(job.source)
        finish_slice(scheduler, job)
    assert taken == ["whole", *["sliced"] * 8]


LIMITS = JobLimits(max_chars=1000, max_source_chars=400, max_jobs=8, max_source_jobs=4)


@settings(max_examples=200)
@given(
    asked=st.lists(
        st.tuples(st.sampled_from("abcde"), st.integers(0, 1500), st.booleans()), max_size=60
    )
)
def test_jobs_are_bounded_in_total_and_per_source(asked):
    scheduler, held = FairScheduler(LIMITS), []
    for source, size, ends_one in asked:
        if ends_one and held:
            scheduler.release(held.pop(0))
        job = Job(Priority.PROMPT, source, size)
        if scheduler.refusal_reason(job) is None:
            scheduler.admit(job)
            held.append(job)
        mine = [job for job in held if job.source == source]
        chars = sum(job.num_chars for job in held)
        of_source = sum(job.num_chars for job in mine)
        assert (scheduler.num_jobs, scheduler.num_chars) == (len(held), chars)
        assert len(held) <= 8
        assert len(mine) <= 4
        assert chars <= 1000 or sum(job.num_chars > 0 for job in held) == 1
        assert of_source <= 400 or sum(job.num_chars > 0 for job in mine) == 1


# --- threads --------------------------------------------------------------------------------------


async def test_the_steps_of_a_job_leave_room_for_another_source_between_them():
    order = []

    def steps(name, count):
        for number in range(count):
            order.append(name)
            yield number

    work = HeavyWork(1)
    long = work.run(Job(Priority.PROMPT, "long", 20 * SLICE_CHARS), steps("long", 20))
    short = work.run(Job(Priority.PROMPT, "short", 1), steps("short", 1))
    result = await asyncio.gather(long, short)
    assert result == [19, 0]
    assert order.index("short") <= 2


def order_of_steps(*jobs, num_steps=60):
    """Names of the jobs in the order of their steps, in one thread; each has so many steps."""
    order = []

    def steps(name):
        for number in range(num_steps):
            order.append(name)
            yield number

    async def scenario():
        work = HeavyWork(1)
        await asyncio.gather(*(work.run(job, steps(job.source)) for job in jobs))

    asyncio.run(scenario())
    return order


def test_a_source_of_thrice_the_weight_gets_thrice_as_many_steps():
    size = 60 * SLICE_CHARS
    jobs = [Job(Priority.PROMPT, "heavy", size, 3.0), Job(Priority.PROMPT, "light", size)]
    assert 13 <= order_of_steps(*jobs)[:60].count("light") <= 17


def test_a_prompt_continues_before_other_waiting_texts():
    size = 60 * SLICE_CHARS
    jobs = [Job(Priority.PROMPT, "prompt", size), Job(Priority.OTHER, "other", size)]
    assert order_of_steps(*jobs)[:60].count("other") <= 7


def test_callers_that_leave_at_any_moment_leave_no_thread_taken():
    async def leaves_after(num_turns):
        work = HeavyWork(1)
        callers = [
            asyncio.create_task(work.run(Job(Priority.PROMPT, source, 1), iter(range(50))))
            for source in "ab"
        ]
        for _ in range(num_turns):
            await asyncio.sleep(0)
        callers[0].cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        job = Job(Priority.PROMPT, "c", 1)
        return await work.run(job, iter([7]))

    for num_turns in range(40):
        assert asyncio.run(asyncio.wait_for(leaves_after(num_turns), 30)) == 7


async def test_a_caller_that_is_gone_leaves_its_thread_and_its_place():
    go_on = threading.Event()

    def steps():
        assert go_on.wait(30)
        yield 1

    work = HeavyWork(1, JobLimits(max_source_jobs=2))
    jobs = [Job(Priority.PROMPT, "a", 1) for _ in range(3)]
    running, waiting = (asyncio.create_task(work.run(job, steps())) for job in jobs[:2])
    await asyncio.sleep(0)
    with pytest.raises(SaturatedError, match="of this client"):
        await work.run(jobs[2], steps())
    running.cancel()
    waiting.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    go_on.set()
    result = await work.run(jobs[2], steps())
    assert result == 1


# --- an attack ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tenants", [False, True])
async def test_a_flood_of_long_texts_delays_no_prompt_of_another_client(tenants):
    """70 connections of one client encode texts; another one's prompt is encoded next."""
    order = []
    gate = threading.Semaphore(0)
    service = FakeBackend()
    service.max_model_len = 2**15
    encode_steps = service.tokenizer.encode_steps

    def watched(text, *args):
        for ids in encode_steps(text, *args):
            assert gate.acquire(timeout=30)
            order.append(text[0])
            yield ids

    service.tokenizer.encode_steps = watched
    admission = AdmissionConfig(tenant_header="x-account") if tenants else None
    app = create_app(service, IngressConfig(), version="0", admission=admission)

    def ask(path, text, client):
        body = {"prompt": text * 20_000}
        headers = [("x-account", client)] if tenants else []
        address = "10.0.0.1" if tenants else client
        return asyncio.create_task(
            Client(app, address).request("POST", path, {**body, "max_tokens": 1}, headers)
            if path == "/v1/completions"
            else Client(app, address).request("POST", path, body, headers)
        )

    flood = [ask("/tokenize", "7", "10.0.0.66") for _ in range(70)]
    await asyncio.sleep(0.05)
    honest = ask("/v1/completions", "h", "10.0.0.7")
    await asyncio.sleep(0.05)
    for _ in range(200):
        gate.release()
    answer = await honest
    num_before = order.index("h")
    refused = 0
    for task in flood:
        refused += (await task).status == 429
    status = answer.status
    assert status == 200
    assert num_before <= 6, "two threads had begun, and each source takes turns"
    assert refused > 0, "one client may not hold all that waits"
