"""The command line without a cluster behind it."""

import pytest
from typer.testing import CliRunner

from cluster import cli

GOOD = """\
http_options: {{host: 127.0.0.1}}
applications:
- name: ttserve
  import_path: cluster.app:build
  args: {{model: {model}, pools: {{both: {{}}}}}}
"""


@pytest.fixture
def run():
    runner = CliRunner()
    return lambda *arguments: runner.invoke(cli.app, [str(argument) for argument in arguments])


def test_help_names_the_three_commands(run):
    result = run("--help")
    assert result.exit_code == 0
    assert all(name in result.output for name in ("serve", "validate", "generate"))


def test_validate_names_every_bad_file_and_its_key(run, tmp_path):
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(GOOD.format(model="/no/such/folder"))
    two.write_text(GOOD.format(model="demo").replace("pools", "poools"))
    result = run("validate", one, two)
    assert result.exit_code == 2
    assert "/no/such/folder" in result.output
    assert "poools" in result.output


def test_serve_refuses_a_bad_config_before_anything_starts(run, tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(GOOD.format(model="relative/folder"))
    result = run("serve", "--config", path)
    assert result.exit_code == 2
    assert "relative" in result.output


def test_generate_names_the_folder_that_holds_no_model(run, tmp_path):
    result = run("generate", "hello", "--model", tmp_path)
    assert result.exit_code == 1
    assert str(tmp_path) in result.output
