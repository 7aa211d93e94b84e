"""The page of compatibility agrees with the tables of fields, and lists every route and object."""

import re

from cluster.edge.openapi import OPERATIONS, tables_of
from cluster.edge.route_table import ROUTES
from scripts import compatibility_page


def test_page_is_up_to_date():
    assert compatibility_page.DOCUMENT.read_text() == compatibility_page.page(), (
        "run `python scripts/compatibility_page.py`"
    )


def test_every_route_field_and_object_is_listed():
    page = compatibility_page.page()
    assert all(f"`{spec.path.replace(':path', '')}` |" in page for spec in ROUTES)
    tables = {}
    for operation in OPERATIONS.values():
        tables |= tables_of(operation.fields) if operation.fields else {}
    assert all(f"| `{field}`" in page for table in tables.values() for field in table)
    offered = {spec.path for spec in ROUTES}
    named = re.findall("`(/[a-z_/0-9]+)`", " ".join(compatibility_page._NOT_OFFERED))
    assert len(named) > 5
    assert not offered & {*named}
    headings = {line.removeprefix("### ").lower() for line in page.splitlines()}
    assert set(re.findall(r"\(#(\w+)\)", page)) <= headings
