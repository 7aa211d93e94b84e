"""Questions about routes: what each costs an ingress, however many are asked at a time."""

import asyncio
import contextlib
import threading

from cluster import ingress as ingress_module
from cluster.config.resolve import resolve
from cluster.config.schema import IngressConfig
from cluster.edge.routes import create_app
from cluster.ingress import Ingress
from cluster.routing.explain import KEPT, KEPT_OF_AN_ID, MOST_MADE
from tests.cluster.edge.test_routes import OPERATOR, Client
from tests.cluster.engines import KEYS, model_folder
from tests.cluster.routing.test_explain import choose

NUM_CLIENTS = 40


@contextlib.asynccontextmanager
async def asked(monkeypatch, names):
    """An ingress that has served requests of these names, and the threads that render routes."""
    config = resolve({"model": str(model_folder()), "pools": {"both": {}}})
    ingress = Ingress(config, KEYS)
    threads = []
    render = ingress_module.route_view

    def watched(*args, **kwargs):
        threads.append(threading.current_thread())
        return render(*args, **kwargs)

    monkeypatch.setattr(ingress_module, "route_view", watched)
    _, [made] = choose("least_delay", 1)
    routes = ingress.router.routes
    for number, name in enumerate(names):
        request_id = f"{name}-{number:016x}"
        with routes.follow(request_id, 8):
            for _ in range(MOST_MADE):
                routes.note("decode", request_id, made.choice)
    app = create_app(ingress, IngressConfig(), version="0")

    async def ask(name):
        return await Client(app).request("GET", f"/debug/routes/{name}", b"", OPERATOR)

    try:
        yield ask, threads
    finally:
        await ingress.close()


async def test_a_storm_about_one_id_is_one_bounded_answer_rendered_off_the_loop(monkeypatch):
    async with asked(monkeypatch, ["loud"] * KEPT) as (ask, threads):
        answers = await asyncio.gather(*(ask("loud") for _ in range(NUM_CLIENTS)))
    assert {answer.status for answer in answers} == {200}
    body = answers[0].body
    assert (len(body["routes"]), body["num_dropped"]) == (KEPT_OF_AN_ID, KEPT - KEPT_OF_AN_ID)
    assert all(len(route["placements"]) == MOST_MADE for route in body["routes"])
    assert len(threads) == KEPT_OF_AN_ID
    assert threading.main_thread() not in threads


async def test_questions_about_many_ids_at_a_time_are_refused_and_not_queued(monkeypatch):
    names = [f"r{number}" for number in range(NUM_CLIENTS)]
    async with asked(monkeypatch, names) as (ask, threads):
        answers = await asyncio.gather(*map(ask, names))
    served = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status == 429]
    assert len(served) + len(refused) == NUM_CLIENTS
    assert 0 < len(served) == len(threads) <= 8
    assert refused[0].body["error"]["code"] == "saturated"
    assert "retry-after" in refused[0].headers
