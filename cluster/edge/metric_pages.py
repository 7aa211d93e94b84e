"""One page of the metrics of several ingresses, in Prometheus' text format. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def merged_pages(pages: Iterable[bytes]) -> bytes:
    """Return the samples of all pages, those of one metric together, as the format requires.

    Args:
        pages: Pages whose samples differ in a label, each metric with its HELP and TYPE.
    """
    samples: dict[bytes, list[bytes]] = {}
    for page in pages:
        head = b""
        for line in page.splitlines(keepends=True):
            if line.startswith(b"# HELP"):
                head = line
            elif line.startswith(b"# TYPE"):
                head += line
                samples.setdefault(head, [])
            else:
                samples[head].append(line)
    return b"".join(part for head, lines in samples.items() for part in (head, *lines))
