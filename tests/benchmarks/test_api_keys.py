from benchmarks.api_keys import measure


def test_a_request_and_a_reading_are_measured():
    each_s, read_s = measure(3, num_requests=5)
    assert each_s > 0.0
    assert read_s > 0.0
