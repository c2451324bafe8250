"""Statistical tests of a loader against Poisson sampling."""

import numpy as np
from scipy import stats


def inclusion_counts(loader, draws, rows):
    """Returns how often the loader returned each example in each logical batch, ``(draws, rows)``."""
    found = np.zeros((draws, rows), dtype=int)
    step = 0
    while step < draws:
        for batch in loader:
            if step < draws:
                np.add.at(found[step], batch.numpy(), 1)
            step += 1
    return found


def p_values(found, rate):
    """Returns two-sided p-values under Poisson sampling at this rate.

    They test the count of each example (``"each"``), the total, and the variance of batch sizes (``"batch_sizes"``).
    """
    draws, rows = found.shape
    each = stats.chi2(rows).cdf(((found.sum(0) - draws * rate) ** 2).sum() / (draws * rate * (1 - rate)))
    total = stats.binom(draws * rows, rate).cdf(found.sum())
    sizes = found.sum(1)
    batch_sizes = stats.chi2(draws).cdf(((sizes - rows * rate) ** 2).sum() / (rows * rate * (1 - rate)))
    return {name: 2 * min(p, 1 - p) for name, p in {"each": each, "total": total, "batch_sizes": batch_sizes}.items()}


def largest_pair_correlation(found):
    """Returns the largest correlation of two examples over draws, in units of its standard deviation."""
    correlations = np.corrcoef(found.T.astype(float)) - np.eye(found.shape[1])
    return float(np.abs(correlations).max()) * found.shape[0] ** 0.5
