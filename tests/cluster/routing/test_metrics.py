"""An ingress's own metrics as text."""

from prometheus_client.parser import text_string_to_metric_families

from cluster.routing.metrics import RouterMetrics


def series(metrics):
    """(name, labels) -> value."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_an_ingress_labels_its_own_metrics_with_its_name():
    metrics = RouterMetrics("tiny")
    metrics.ingress = "mine"
    metrics.requests.labels("stop").inc(4)
    metrics.refusals.labels("no_slot").inc(2)
    metrics.retries.labels("prefill").inc()
    metrics.queue_time.observe(0.2)
    metrics.time_to_first_token.observe(0.03)
    metrics.num_queued.set(5)
    found = series(metrics)

    def own(name, **labels):
        return found[name, tuple(sorted({"ingress": "mine", **labels}.items()))]

    assert own("ttserve_ingress_requests_total", finished_reason="stop") == 4
    assert own("ttserve_router_refusals_total", reason="no_slot") == 2
    assert own("ttserve_router_retries_total", reason="prefill") == 1
    assert own("ttserve_router_queued_requests", model_name="tiny") == 5
    for name in ("vllm:request_queue_time_seconds", "vllm:time_to_first_token_seconds"):
        assert own(f"{name}_count", model_name="tiny") == 1
    bucket = "vllm:time_to_first_token_seconds_bucket"
    assert own(bucket, model_name="tiny", le="0.04") == 1
    assert own(bucket, model_name="tiny", le="0.02") == 0


def test_every_family_has_a_help_text():
    for family in text_string_to_metric_families(RouterMetrics("tiny").render().decode()):
        assert family.documentation, family.name


def test_two_ingresses_have_no_series_in_common():
    def own():
        metrics = RouterMetrics("tiny")
        metrics.requests.labels("stop").inc()
        return series(metrics).keys()

    one, other = own(), own()
    assert one
    assert not one & other
