"""A model folder with only a configuration, an empty recording, and events to wait for."""

from __future__ import annotations

import json
import sys
import types
from typing import TYPE_CHECKING

import pytest

from tests.replicas.generators.plugin.conformance import CONFIG
from tests.replicas.generators.plugin.doubles import Double, Event, Recording

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with only config.json, as the doubles have no weights."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    """The recorded calls of this test's next double."""
    new = Recording()
    monkeypatch.setattr(Double, "recording", new)
    return new


@pytest.fixture
def ttnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of ttnn that a class with outputs on the device imports."""

    def event_synchronize(event: Event) -> None:
        event.is_done = True

    module = types.ModuleType("ttnn")
    module.event_synchronize = event_synchronize
    monkeypatch.setitem(sys.modules, "ttnn", module)
