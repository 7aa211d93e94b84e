"""The configuration that Serve wrote, as `ttserve-haproxy` runs it."""

import json

import pytest

from cluster.lifecycle import haproxy

CONFIG = """\
defaults
    errorfile 502 /tmp/h/500.http
    errorfile 503 /tmp/h/500.http
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind {public}
    mode http
backend http-app
    server one 127.0.0.1:30000 check
listen stats
  bind *:8404
  stats enable
"""


@pytest.mark.parametrize("public", ["127.0.0.1:8000", "10.0.0.5:80", "*:8000", "0.0.0.0:8000"])
def test_administration_listeners_are_on_loopback_whatever_the_public_address(public):
    run = haproxy.rewrite(CONFIG.format(public=public))
    binds = [line.strip() for line in run.splitlines() if line.lstrip().startswith("bind")]
    assert binds == ["bind 127.0.0.1:9101", f"bind {public}", "bind 127.0.0.1:8404"]


def test_who_asks_before_an_ingress_is_known_is_told_to_come_again():
    nobody = "backend default_backend\n    http-request return status 404 content-type text/plain\n"
    run = haproxy.rewrite(CONFIG.format(public="127.0.0.1:8000") + nobody, "/tmp/h/e.http")
    assert run.endswith("    http-request return status 503 errorfile /tmp/h/e.http\n")


def test_administration_listeners_may_not_take_the_clients_connections():
    run = haproxy.protect(CONFIG.format(public="127.0.0.1:8000"), "/tmp/h/t.http")
    assert run.count("maxconn 32") == 2


def test_rewriting_twice_changes_nothing_more():
    once = haproxy.rewrite(CONFIG.format(public="10.0.0.5:80"), "/tmp/h/e.http")
    assert haproxy.rewrite(once, "/tmp/h/e.http") == once
    assert "127.0.0.1:9101" in once


def test_only_listeners_and_error_files_change():
    config = CONFIG.format(public="127.0.0.1:8000")
    run = haproxy.rewrite(config, "/tmp/h/e.http")
    changed = [
        new for old, new in zip(config.splitlines(), run.splitlines(), strict=True) if old != new
    ]
    assert [line.split()[0] for line in changed] == ["errorfile", "errorfile", "bind", "bind"]
    assert "errorfile 503 /tmp/h/e.http" in run


def test_requests_are_not_spliced_and_responses_are_left_alone():
    splices = "    option splice-request\n    option splice-response\n"
    config = CONFIG.format(public="127.0.0.1:8000").replace("defaults\n", "defaults\n" + splices)
    run = haproxy.rewrite(config)
    assert "splice-request" not in run
    assert "option splice-response\n" in run


def test_own_error_is_a_503_that_openai_clients_understand():
    head, _, body = haproxy.error_response().partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 503 Service Unavailable"
    assert f"Content-Length: {len(body)}" in lines
    assert json.loads(body)["error"]["code"] == "not_ready"
