"""The benchmark of attacks: its rows, its HTTP/2 client and its statistics."""

import math

from benchmarks.attacks import HEADER, Seen, Window, row
from tests.e2e.http_attacks import HTTP2_PREFACE, http2_request, parse


def window(alone_ms, beside_ms, num_failed=0, num_down=0, peak_mib=100):
    kinds = ("stream", "short", "body", "long")

    def seen(first_ms, failed):
        return Seen(dict.fromkeys(kinds, [first_ms] * 3), failed)

    return Window(seen(alone_ms, 0), seen(beside_ms, num_failed), {}, peak_mib, num_down)


def test_a_row_has_medians_of_times_and_everything_that_failed():
    rounds = [window(10, 20), window(10, 300, num_failed=2), window(10, 30, 1, 1, 250)]
    cells = [cell.strip() for cell in row("held_bodies", rounds).strip("|").split("|")]
    assert len(cells) == HEADER.count("|") - 1
    assert cells[:4] == ["held bodies", "10 → 30 ms", "3.00", "10 → 30 ms"]
    assert cells[-3:] == ["0 → 3", "250 MiB", "1"]


def test_a_kind_without_answers_has_no_time():
    seen = Seen({"stream": [5.0, 1.0, 3.0]}, 0)
    assert (seen.ms("stream"), seen.ms("stream", 0.99)) == (3.0, 5.0)
    assert math.isnan(seen.ms("long"))


def test_frames_of_http2_have_the_lengths_that_they_declare():
    raw = HTTP2_PREFACE.removeprefix(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") + http2_request(3)
    kinds, sent = [], 0
    while raw:
        size, kind = int.from_bytes(raw[:3], "big"), raw[3]
        kinds.append(kind)
        sent += size * (kind == 0)
        raw = raw[9 + size :]
    assert (kinds, sent) == ([4, 1, 0, 0], 17_000)


def test_a_connection_closed_without_an_answer_is_called_so():
    assert parse(b"HTTP/1.1 429 Too Many\r\nA: b\r\n\r\n{}")[::2] == ("429", b"{}")
    assert parse(b"").status == "closed"
