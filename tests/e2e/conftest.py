"""Lets the tests of this folder import `harness` by its bare name, as pytest runs from anywhere."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
