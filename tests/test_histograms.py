"""A value is counted in the first bucket whose upper end is not below it, as Prometheus has it."""

from __future__ import annotations

from kv_connector.histograms import Histogram


def test_upper_ends_are_of_their_buckets_and_the_last_bucket_has_none() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.5, 100.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.sums, histogram.count) == ([2, 2, 2], [1.0, 3.5, 102.5], 6)
