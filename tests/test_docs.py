"""What the documents name is in the tree."""

import re
from pathlib import Path

import pytest

import cluster.edge.admin.cluster  # noqa: F401 - its errors are on the page, too
from cluster.edge.route_table import ROUTES
from cluster.errors import ServingError

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "cluster",
    "replicas",
    "kv_transfer",
    "configs",
    "benchmarks",
    "scripts",
    "examples",
    "docs",
    "helm",
    "tests",
)
FILES = [p.relative_to(ROOT).as_posix() for folder in FOLDERS for p in (ROOT / folder).rglob("*")]
DOCUMENTS = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CHANGELOG.md"]

IN_A_FOLDER = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w(?![\w./-]*\*)")
SOURCE = re.compile(r"`([\w/]+\.py)`")
MODULE = re.compile(r"(?<![\w./-])(?:cluster|replicas|kv_transfer|benchmarks|scripts)(?:\.\w+)+")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


def is_module(name):
    """Whether it is a module, or a word of one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:count])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                text = path.read_text()
                return all(re.search(rf"\b{word}\b", text) for word in parts[count:])
    return False


def missing(text, folder):
    """Every file, folder and module that a document in `folder` names and nobody finds."""
    yield from (name for name in IN_A_FOLDER.findall(text) if not (ROOT / name).exists())
    for name in SOURCE.findall(text):
        if not any(f"/{path}".endswith(f"/{name}") for path in FILES):
            yield name
    yield from (name for name in MODULE.findall(text) if not is_module(name))
    yield from (name for name in LINK.findall(text) if not (folder / name).exists())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_names_what_is_there(document):
    assert list(missing(document.read_text(), document.parent)) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("see `cluster/routing/rooter.py`", ["cluster/routing/rooter.py"] * 2),
        ("the folder (`cluster/simulation`)", ["cluster/simulation"]),
        ("`no_such_file.py` beside `router.py` and `routing/leg.py`", ["no_such_file.py"]),
        ("`cluster.router.Router` is `cluster.routing.router.Router`", ["cluster.router.Router"]),
        ("python -m benchmarks.no_such_thing --quick", ["benchmarks.no_such_thing"]),
        ("[here](no-such-page.md#part), [there](../README.md)", ["no-such-page.md"]),
    ],
)
def test_what_is_not_there_is_found(text, wrong):
    assert list(missing(text, ROOT / "docs")) == wrong


def test_the_readme_lists_every_route():
    readme = re.sub(r"\{\w+\}", "{}", (ROOT / "README.md").read_text())
    paths = {re.sub(r"\{[\w:]+\}", "{}", route.path) for route in ROUTES}
    assert {path for path in paths if f"`{path}`" not in readme} == set()


def kinds_of(error):
    """An error class and everything below it."""
    return [error, *(kind for below in error.__subclasses__() for kind in kinds_of(below))]


def test_the_page_of_errors_has_every_status_and_code():
    page = (ROOT / "docs" / "errors.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", page, re.MULTILINE)
    assert {(int(status), code) for status, code in rows} == {
        (kind.status, kind.code) for kind in kinds_of(ServingError)
    }
