"""The configuration that Serve wrote, as `ttserve-haproxy` runs it."""

import json
import tempfile
from pathlib import Path

import pytest

from cluster.config.front import FrontSettings
from cluster.errors import ClusterConfigError
from cluster.lifecycle import haproxy
from cluster.lifecycle.haproxy import ErrorFiles

FILES = ErrorFiles("/tmp/h/u.http", "/tmp/h/t.http", "/tmp/h/m.http")
CONFIG = """\
global
    maxconn 4096
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


def test_requests_before_an_ingress_is_known_get_a_503_with_retry_after():
    nobody = "backend default_backend\n    http-request return status 404 content-type text/plain\n"
    run = haproxy.rewrite(CONFIG.format(public="127.0.0.1:8000") + nobody, "/tmp/h/e.http")
    assert run.endswith("    http-request return status 503 errorfile /tmp/h/e.http\n")


def test_administration_listeners_may_not_take_the_clients_connections():
    run = haproxy.protect(CONFIG.format(public="127.0.0.1:8000"), FILES, FrontSettings())
    assert run.count("maxconn 32") == 2


def run_of(public="127.0.0.1:8000", **settings):
    """Sections of the configuration that runs, by their names."""
    front = FrontSettings(**settings)

    def run_once(config):
        config = haproxy.rewrite(config, FILES.unavailable)
        return haproxy.protect(haproxy.add_operations(config, front), FILES, front)

    once = run_once(CONFIG.format(public=public))
    assert run_once(once) == once
    sections = {}
    for line in once.splitlines():
        if not line[0].isspace():
            lines = sections[line] = []
        else:
            lines.append(line.strip())
    return sections


@pytest.mark.parametrize(
    ("public", "operations_bind", "expected"),
    [
        ("10.0.0.5:80", None, "127.0.0.1:81"),
        (":8000", None, "127.0.0.1:8001"),
        ("*:8000", "0.0.0.0:9000", "0.0.0.0:9000"),
    ],
)
def test_operators_have_a_listener_of_their_own(public, operations_bind, expected):
    sections = run_of(public, operations_bind=operations_bind)
    named, public_lines = sections["frontend operations"], sections["frontend http_frontend"]
    assert f"bind {expected} proto h1" in named
    assert f"bind {public} proto h1" in public_lines
    sets = "http-request set-header x-ttserve-listener operations"
    assert named.index(next(line for line in named if "del-header" in line)) < named.index(sets)
    assert sets not in public_lines


@pytest.mark.parametrize(
    ("public", "is_told"),
    [("127.0.0.1:8000", True), ("[::1]:8000", True), ("10.0.0.5:8000", False), (":8000", False)],
)
def test_a_header_marks_a_loopback_listener(public, is_told):
    line = "http-request set-header x-ttserve-bound loopback"
    sections = run_of(public, operations_bind="0.0.0.0:8001")
    assert (line in sections["frontend http_frontend"]) is is_told
    assert line not in sections["frontend operations"]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TTSERVE_OPERATIONS_BIND", "8001"),
        ("TTSERVE_OPERATIONS_BIND", "0.0.0.0:99999"),
        ("TTSERVE_OPERATIONS_BIND", "0.0.0.0:1\n  bind :2"),
        ("TTSERVE_TRUSTED_PROXIES", "10.0.0.1/8"),
        ("TTSERVE_TRUSTED_PROXIES", "gateway.example"),
        ("TTSERVE_TLS_CERTIFICATE", "tls.pem"),
        ("TTSERVE_TLS_CERTIFICATE", "/tls.pem verify none"),
        ("TTSERVE_CORS_ORIGINS", "https://chat.example.com/path"),
        ("TTSERVE_CORS_ORIGINS", "https://a.example }"),
    ],
)
def test_invalid_settings_are_refused_by_name(variable, value):
    with pytest.raises(ClusterConfigError, match=variable):
        FrontSettings.read({variable: value})


def test_settings_are_read_from_the_environment():
    read = FrontSettings.read(
        {"TTSERVE_TRUSTED_PROXIES": "10.0.0.0/8, 192.168.1.5", "TTSERVE_OPERATIONS_BIND": "[::]:81"}
    )
    assert read == FrontSettings("[::]:81", ("10.0.0.0/8", "192.168.1.5/32"))
    assert FrontSettings.read({}) == FrontSettings()


def test_with_a_certificate_the_public_listener_speaks_tls_alone():
    sections = run_of("10.0.0.5:443", certificate="/etc/tls.pem", operations_bind="10.0.0.5:8001")
    binds = {
        name: line for name, lines in sections.items() for line in lines if line.startswith("bind")
    }
    assert binds == {
        "frontend prometheus": "bind 127.0.0.1:9101",
        "frontend http_frontend": "bind 10.0.0.5:443 ssl crt /etc/tls.pem alpn http/1.1"
        " ssl-min-ver TLSv1.2 proto h1",
        "frontend operations": "bind 10.0.0.5:8001 proto h1",
        "listen stats": "bind 127.0.0.1:8404",
    }


def test_the_urls_scheme_is_that_of_the_public_listener():
    url = "http://127.0.0.1:8000"
    assert FrontSettings().public_url(url) == url
    assert FrontSettings(certificate="/tls.pem").public_url(url) == "https://127.0.0.1:8000"


def test_a_certificate_needs_haproxy():
    front = FrontSettings(certificate="/etc/tls.pem")
    front.require_haproxy(True)
    FrontSettings().require_haproxy(False)
    with pytest.raises(ClusterConfigError, match="TTSERVE_TLS_CERTIFICATE needs HAProxy"):
        front.require_haproxy(False)


@pytest.fixture
def open_folder():
    """A folder that other users may enter; those of pytest are closed."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_a_private_key_that_others_can_read_is_refused(open_folder):
    path = open_folder / "tls.pem"
    with pytest.raises(ClusterConfigError, match="No such file"):
        haproxy.require_certificate(str(path))
    path.touch(0o600)
    haproxy.require_certificate(str(path))
    path.chmod(0o644)
    with pytest.raises(ClusterConfigError, match=r"used by other users.*chmod 600"):
        haproxy.require_certificate(str(path))


def test_rewriting_twice_changes_nothing_more():
    once = haproxy.rewrite(CONFIG.format(public="10.0.0.5:80"), "/tmp/h/e.http")
    assert haproxy.rewrite(once, "/tmp/h/e.http") == once
    assert "127.0.0.1:9101" in once


@pytest.mark.parametrize("origins", [("https://a.example", "https://b.example"), ("*",)])
def test_protecting_twice_changes_nothing_more(origins):
    front = FrontSettings(cors_origins=origins)
    once = haproxy.protect(CONFIG.format(public="127.0.0.1:8000"), FILES, front)
    assert haproxy.protect(once, FILES, front) == once
    assert once.count("tcp-request content") == 1


def test_no_readiness_check_is_ready_while_its_host_leaves():
    # Source: Ray 2.60's template.
    drains = (
        "    http-request return status 503 string 'This node is being drained.' if healthcheck"
    )
    config = CONFIG.format(public="127.0.0.1:8000").replace("    mode http\n", f"{drains}\n", 1)
    once = haproxy.rewrite(config)
    assert haproxy.rewrite(once) == once
    [line] = [line for line in once.splitlines() if "this host leaves" in line]
    condition = line.rpartition(" if ")[2]
    paths = condition.removeprefix("{ path_end ").partition(" }")[0].split()
    assert paths == ["/health", "/ping", "/v2/health/ready"]
    assert condition.endswith("!{ path_sub /v1/models/ }")


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


def test_own_error_is_a_503_that_clients_of_openai_and_anthropic_understand():
    head, _, body = haproxy.error_response().partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 503 Service Unavailable"
    assert f"Content-Length: {len(body)}" in lines
    error = json.loads(body)
    assert (error["type"], error["error"]["code"]) == ("error", "not_ready")
