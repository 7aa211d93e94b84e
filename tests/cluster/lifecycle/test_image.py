"""The Dockerfile says what `ttserve environment` does, which nobody runs in a pod."""

import re
import shlex
from pathlib import Path

from cluster.lifecycle import haproxy

DOCKERFILE = Path(__file__).parents[3] / "Dockerfile"


def test_the_image_has_the_variables_that_serve_reads_when_ray_starts():
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^ENV (.*)$", text, re.MULTILINE)
    variables = dict(word.split("=", 1) for word in shlex.split(line))
    expected = haproxy.environment(Path("/run/ttserve"), "/opt/ttserve/bin/ttserve-haproxy")
    assert {name: variables.get(name) for name in expected} == expected
    read = {name for name in variables if name.startswith(("RAY_SERVE_", "RAY_worker_"))}
    assert read == set(expected)
    assert "VOLUME /run/ttserve\n" in text
