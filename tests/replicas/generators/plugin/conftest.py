"""A model folder with only a configuration, and events to wait for."""

from __future__ import annotations

import json
import sys
import types
from typing import TYPE_CHECKING

import pytest

from tests.replicas.generators.plugin.conformance import CONFIG

if TYPE_CHECKING:
    from pathlib import Path

    from tests.replicas.generators.plugin.doubles import Event


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with only config.json, as the doubles have no weights."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def ttnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of ttnn that a class with outputs on the device imports."""

    def event_synchronize(event: Event) -> None:
        event.is_done = True

    module = types.ModuleType("ttnn")
    module.event_synchronize = event_synchronize
    monkeypatch.setitem(sys.modules, "ttnn", module)
