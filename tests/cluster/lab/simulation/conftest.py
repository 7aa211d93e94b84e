"""What all tests of the simulator share."""

import logging

import pytest


@pytest.fixture(autouse=True)
def _quiet():
    """Log nothing of engines that are lost on purpose."""
    for name in ("replicas", "cluster"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    yield
    for name in ("replicas", "cluster"):
        logging.getLogger(name).setLevel(logging.NOTSET)
