"""No module imports itself by way of others, imports for type checking included."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from pip._vendor import tomli

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cluster", "replicas", "kv_transfer")


def sources():
    """Text of every module of the packages, by its name."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path.read_text()
    return found


def imported(text):
    """Every name that an import statement anywhere in a module may mean a module by."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def import_graph(texts):
    """Which modules of `texts` each of them imports."""
    return {name: set(imported(text)) & texts.keys() - {name} for name, text in texts.items()}


def test_imports_have_no_cycle():
    graph = import_graph(sources())
    assert "cluster.lab.simulation.network" in graph["cluster.lab.simulation.host"]
    # Raises with the circle that it finds.
    TopologicalSorter(graph).prepare()


def test_a_type_checking_import_cycle_counts():
    texts = {
        "p": "",
        "p.a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.b import B\n",
        "p.b": "def late():\n    from p import a\n",
    }
    with pytest.raises(CycleError) as caught:
        TopologicalSorter(import_graph(texts)).prepare()
    assert {"p.a", "p.b"} <= set(caught.value.args[1])


def test_modules_that_call_themselves_pure_are_held_to_the_contract():
    contracts = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (pure,) = (c for c in contracts["contracts"] if c["name"].startswith("pure cores"))
    claims = {
        name
        for name, text in sources().items()
        if re.search(r"\bPure\.", ast.get_docstring(ast.parse(text)) or "")
    }
    assert claims
    assert claims <= set(pure["source_modules"])
