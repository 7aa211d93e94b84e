"""The policy as Serve's controller has it: found by name, given contexts, and bounded by Serve."""

import time
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own.
    from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
    from ray.serve.autoscaling_policy import _apply_app_level_autoscaling_config
    from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from cluster.config.schema import AdmissionConfig, RouterConfig
from cluster.config.serve_file import read_serve_file
from cluster.errors import ClusterConfigError
from cluster.lifecycle.autoscaling import ingress_report, replica_report
from cluster.routing.fleet import Fleet
from cluster.routing.metrics import RouterMetrics
from cluster.routing.router import Router
from cluster.routing.tickets import TicketOffice
from cluster.scaling.policy import DECISION_INTERVAL_S, Autoscaler
from tests.cluster.engines import KEYS, make_member

POLICY = "cluster.lifecycle.autoscaling:ApplicationPolicy"


def context(name, reports, now_s, least=1, most=8, target=1, interval_s=DECISION_INTERVAL_S):
    deployment = DeploymentID(name, "app")
    metrics = {}
    for replica, values in reports.items():
        for metric, value in values.items():
            series = metrics.setdefault(metric, {})
            series[ReplicaID(replica, deployment)] = [TimeStampedValue(now_s - 1.0, value)]
    config = AutoscalingConfig(
        min_replicas=least, max_replicas=most, upscale_delay_s=0, downscale_delay_s=0,
        metrics_interval_s=interval_s,
    )  # fmt: skip
    return deployment, AutoscalingContext(
        deployment_id=deployment, deployment_name=name, app_name="app",
        current_num_replicas=target, target_num_replicas=target, running_replicas=[],
        total_num_requests=0.0, total_queued_requests=0.0, aggregated_metrics={},
        raw_metrics=metrics, capacity_adjusted_min_replicas=least,
        capacity_adjusted_max_replicas=most, policy_state={}, last_scale_up_time=None,
        last_scale_down_time=None, current_time=now_s, config=config,
    )  # fmt: skip


@pytest.fixture
def policy():
    """As Serve's controller makes it: pickled where it is deployed, with its defaults around it."""
    given = AutoscalingPolicy(policy_function=POLICY, policy_kwargs={"ttft_s": 3.0, "tpot_s": 0.1})
    return _apply_app_level_autoscaling_config(given.get_policy()(**given.policy_kwargs))


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The controller's time; the wall's is in contexts."""
    now_s = [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    return now_s


@pytest.fixture
def router():
    fleet = Fleet(lambda *_callbacks: None, KEYS)
    return Router(fleet, RouterConfig(), RouterMetrics("demo"), TicketOffice(KEYS))


REPLICA = replica_report(
    make_member("decode", "d", dp_groups=8, slots_per_group=8).description, cold_start_s=60.0
)


def ask(policy, router, now_s, targets, interval_s=DECISION_INTERVAL_S):
    """What is decided, with all reports a second old, where ingresses report so often."""
    contexts = dict(
        [
            context("ingress", {"i": ingress_report(router)}, now_s, 1, 1, interval_s=interval_s),
            context("prefill", {"p": REPLICA}, now_s, target=targets["prefill"]),
            context("decode", {"d": REPLICA}, now_s, target=targets["decode"]),
        ]
    )
    decided, _ = policy(contexts)
    return {deployment.name: count for deployment, count in decided.items()}


def come(router, num):
    for _ in range(num):
        router.traffic.come(4000)
        router.traffic.begin(4000, 0)
        router.traffic.end(4000, 200)


def test_pools_grow_with_what_ingresses_report(policy, router, clock, monkeypatch):
    costs = router.fleet.pools.pool_costs._replace(
        decode_s=0.04, row_s=1e-3, prompt_s=0.1, prompt_token_s=1e-4
    )
    monkeypatch.setattr(type(router.fleet.pools), "pool_costs", costs)
    monkeypatch.setattr(type(router.fleet.pools), "num_steps_learned", 9)
    targets = {"prefill": 1, "decode": 1}
    for step in range(12):
        come(router, 60)
        clock[0] += DECISION_INTERVAL_S
        decided = ask(policy, router, 1e9 + step * DECISION_INTERVAL_S, targets)
        targets = {**targets, **{k: v for k, v in decided.items() if k in targets}}
        assert decided.get("ingress", 1) == 1
    assert 4 <= targets["prefill"] <= 8
    assert 2 <= targets["decode"] <= 8


@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field")
@pytest.mark.parametrize("interval_s", [1.0, DECISION_INTERVAL_S, 30.0])
def test_counts_stay_until_ingresses_have_reported_again(policy, router, clock, interval_s):
    targets = {"prefill": 3, "decode": 2}
    assert ask(policy, router, 1e9, targets, interval_s) == targets
    clock[0] += interval_s / 2
    assert ask(policy, router, 1e9 + interval_s / 2, targets, interval_s) == {}
    clock[0] += interval_s / 2
    assert ask(policy, router, 1e9 + interval_s, targets, interval_s) == targets


def test_a_wall_clock_that_is_set_back_does_not_stop_it(policy, router, clock):
    targets = {"prefill": 3, "decode": 2}
    ask(policy, router, 1e9, targets)
    clock[0] += DECISION_INTERVAL_S
    assert ask(policy, router, 1e9 - 3600.0, targets) == targets


def test_costs_are_those_of_the_ingress_with_the_most_samples(policy, router, clock, monkeypatch):
    """Not of the one that takes them for largest, as one may that has seen only the first steps."""
    now_s, seen = 1e9, []
    decide = Autoscaler.decide
    monkeypatch.setattr(
        Autoscaler,
        "decide",
        lambda self, *given, **named: seen.append(given[2]) or decide(self, *given, **named),
    )
    report = ingress_report(router)
    reports = {
        "new": {**report, "steps_learned": 3.0, "cost_decode_s": 9.0},
        "old": {**report, "steps_learned": 500.0, "cost_decode_s": 0.04},
    }
    policy(dict([context("ingress", reports, now_s), context("decode", {"d": REPLICA}, now_s)]))
    assert [costs.decode_s for costs in seen] == [0.04]


@pytest.mark.parametrize(
    ("after_s", "refuses"), [((2.5, 3.0), True), ((3.0, 3.5), False), ((3.0, None), False)]
)
def test_refuses_late_holds_only_if_all_ingresses_refuse_within_the_objective(
    policy, router, monkeypatch, after_s, refuses
):
    now_s, seen = 1e9, []
    monkeypatch.setattr(
        Autoscaler, "decide", lambda _self, *_, refuses_late: seen.append(refuses_late) or {}
    )
    reports = {}
    for number, ttft_s in enumerate(after_s):
        admission = None if ttft_s is None else AdmissionConfig(ttft_s=ttft_s)
        router.config = RouterConfig(admission=admission)
        reports[f"i{number}"] = ingress_report(router)
    policy(dict([context("ingress", reports, now_s), context("decode", {"d": REPLICA}, now_s)]))
    assert seen == [refuses]


def test_nothing_changes_before_replicas_and_ingresses_have_reported(policy):
    now_s = 1e9
    contexts = dict([context("ingress", {}, now_s), context("prefill", {"p": REPLICA}, now_s)])
    assert policy(contexts)[0] == {}
    contexts = dict([context("ingress", {}, now_s), context("prefill", {}, now_s, target=4)])
    assert policy(contexts)[0] == {}


def test_a_replica_that_has_not_reported_for_a_minute_does_not_count(policy, router):
    now_s = 1e9
    ingress, reports = context("ingress", {"i": ingress_report(router)}, now_s - 60.0, 1, 1)
    reports.current_time = now_s
    assert policy(dict([(ingress, reports), context("decode", {"d": REPLICA}, now_s)]))[0] == {}


FILE = """
http_options: {{host: 127.0.0.1}}
applications:
  - name: ttserve
    import_path: cluster.app:build
    {policy}
    args: {{pools: {{both: {{replicas: 1, {bound}}}}}}}
"""


def write(tmp_path, policy, bound):
    path = tmp_path / "serve.yaml"
    path.write_text(FILE.format(policy=policy, bound=bound))
    return path


NAMED = f"autoscaling_policy: {{policy_function: '{POLICY}', policy_kwargs: {{ttft_s: 3.0}}}}"


def test_a_file_names_the_policy_and_the_bounds(tmp_path):
    file = read_serve_file(write(tmp_path, NAMED, "max_replicas: 4"))
    assert file.applications[0].autoscaling_policy.policy_kwargs.ttft_s == 3.0


@pytest.mark.parametrize(
    ("policy", "bound", "message"),
    [
        ("", "max_replicas: 4", "max_replicas needs applications"),
        (NAMED, "num_cpus: 1", "needs a pool with max_replicas"),
        (NAMED.replace("ApplicationPolicy", "Other"), "max_replicas: 4", "policy_function"),
    ],
)
def test_a_policy_and_bounds_need_each_other(tmp_path, policy, bound, message):
    with pytest.raises(ClusterConfigError, match=message):
        read_serve_file(write(tmp_path, policy, bound))
