from prometheus_client.parser import text_string_to_metric_families

from cluster.edge.metric_pages import merged_pages
from cluster.routing.metrics import RouterMetrics


def test_pages_of_ingresses_are_one_with_the_samples_of_a_metric_together():
    ingresses = [RouterMetrics("demo") for _ in range(3)]
    for i, metrics in enumerate(ingresses):
        metrics.num_queued.set(i)
        metrics.requests.labels("stop").inc(i)
    page = merged_pages(metrics.render() for metrics in ingresses)
    families = list(text_string_to_metric_families(page.decode()))
    assert len({family.name for family in families}) == len(families)
    [queued] = (f for f in families if f.name == "ttserve_router_queued_requests")
    assert {s.labels["ingress"]: s.value for s in queued.samples} == {
        metrics.ingress: i for i, metrics in enumerate(ingresses)
    }
    assert len(page.splitlines()) < sum(len(m.render().splitlines()) for m in ingresses)


def test_one_page_alone_stays_as_it_is():
    page = RouterMetrics("demo").render()
    assert merged_pages([page]) == page
