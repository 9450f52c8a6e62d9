# SPDX-License-Identifier: Apache-2.0
"""Medians, percentiles and bootstrap intervals of small samples.

The interval is the percentile bootstrap of the median: the sample is drawn again with
replacement many times, and the middle 90 % of the medians is the interval. It says how
well the median is known from this run's pairs; it does not say what another machine, or
this one on another day, would give.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

CONFIDENCE = 0.90
NUM_RESAMPLES = 5000


@dataclass(frozen=True)
class Interval:
    """A median with its bootstrap interval [low, high]."""

    median: float
    low: float
    high: float

    @property
    def reach(self) -> float:
        """How far the interval goes from its median, on its longer side."""
        return max(self.high - self.median, self.median - self.low)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks."""
    return float(numpy.percentile(values, percent))


def median_interval(
    values: Sequence[float],
    confidence: float = CONFIDENCE,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """The median of `values` and its percentile bootstrap interval.

    The resampling has a seed of its own, so that the same values always give the same
    interval.
    """
    if not values:
        raise ValueError("values is empty; an interval needs at least one value")
    drawn = numpy.random.default_rng(seed).choice(
        numpy.asarray(values, dtype=float), (num_resamples, len(values))
    )
    medians = numpy.median(drawn, axis=1)
    tail = (1 - confidence) / 2 * 100
    return Interval(
        median=statistics.median(values),
        low=percentile(medians, tail),
        high=percentile(medians, 100 - tail),
    )
