"""What `ttserve status` prints of what Serve and Ray say."""

import socket
import warnings

import msgspec
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from ray.serve.schema import ServeStatus

    from cluster.lifecycle.ray_nodes import RayNode, check_reach
    from cluster.lifecycle.status import is_whole, status_text

NODES = [RayNode("bb", "192.0.2.2", False), RayNode("aa", "192.0.2.1", True)]


def serve_status(message="", application="RUNNING", deployment="HEALTHY", **states):
    overview = {
        "status": deployment, "status_trigger": "CONFIG_UPDATE_STARTED",
        "replica_states": states, "message": message,
    }  # fmt: skip
    of_application = {
        "status": application, "message": message, "last_deployed_time_s": 0,
        "deployments": {"decode": overview},
    }  # fmt: skip
    proxies = {"bb": "DRAINING"}
    return msgspec.convert(
        {"applications": {"ttserve": of_application}, "proxies": proxies}, ServeStatus
    )


def test_an_unreachable_control_plane_is_reported_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        check_reach(address)
    with pytest.raises(ConnectionError, match=f"{address}: .*still run"):
        check_reach(address)


def test_a_whole_cluster():
    status = serve_status(RUNNING=2)
    assert is_whole(status)
    assert status_text(status, NODES, {}).splitlines() == [
        "ttserve: RUNNING",
        "  decode: HEALTHY, 2 running",
        "host 192.0.2.1: HTTP none, head",
        "host 192.0.2.2: HTTP draining",
    ]


def test_a_leaving_host_is_listed_with_its_remaining_time():
    text = status_text(serve_status(), NODES, {"bb": 41.6})
    assert "host 192.0.2.2: HTTP draining, leaves within 42 s" in text
    assert "  decode: HEALTHY, no replica" in text


def test_the_reason_of_a_failure_is_the_tracebacks_last_line():
    why = "Traceback\n  File x\ncluster.errors.ClusterConfigError: no model"
    status = serve_status(why, application="DEPLOY_FAILED", deployment="UPDATING", STARTING=1)
    assert not is_whole(status)
    assert status_text(status, [], {}).splitlines() == [
        "ttserve: DEPLOY_FAILED: cluster.errors.ClusterConfigError: no model",
        "  decode: UPDATING, 1 starting: cluster.errors.ClusterConfigError: no model",
    ]


def test_nothing_is_deployed():
    status = ServeStatus()
    assert not is_whole(status)
    assert status_text(status, [], {}) == "no application is deployed\n"
