"""The configuration reference agrees with the schema, and describes every key."""

import re

from scripts import configuration_page


def test_page_is_up_to_date():
    assert configuration_page.DOCUMENT.read_text() == configuration_page.page(), (
        "run `python scripts/configuration_page.py`"
    )


def test_every_key_has_a_meaning():
    bare = re.findall(r"^- \*\*`\w+`\*\* \([^)]*\)\.$", configuration_page.page(), re.MULTILINE)
    assert not bare
