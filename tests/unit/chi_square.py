"""A chi-square test without tables: for fixed seeds it passes for ever or fails for ever."""

import numpy as np


def assert_uniform(counts: np.ndarray, expected: float | None = None) -> None:
    """Pearson's statistic over cells of equal expectation lies within five standard deviations of its mean.

    Its mean is (cells − 1) and its variance 2·(cells − 1); tables with fixed margins fall below, which is fine, so
    only the upper side counts. Expectations of 20 and more per cell keep the approximation honest.
    """
    mean = float(np.mean(counts)) if expected is None else expected
    assert mean >= 20, f"too few draws to tell: {mean:g} per cell"
    statistic = float(((np.asarray(counts) - mean) ** 2 / mean).sum())
    freedom = np.size(counts) - 1
    limit = freedom + 5 * np.sqrt(2 * freedom) + 10
    assert statistic < limit, f"not uniform: chi-square {statistic:.1f} for {freedom} degrees of freedom"
