"""Rows by layer: how many tokens each layer of a model keeps under a fixed mean.

All totals are exact: shares are rounded down and the rows left over go to the largest remainders,
earlier layers first among equals, so that larger shares never end up smaller.
"""

from collections.abc import Sequence


def rounded(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers with this sum, next to `shares`, which have the same sum.

    A larger share never gets less than a smaller one.
    """
    out = [int(share) for share in shares]
    order = sorted(range(len(out)), key=lambda i: out[i] - shares[i])
    for i in order[: total - sum(out)]:
        out[i] += 1
    return out


def raised(shares: Sequence[float], least: float) -> list[float]:
    """Shares of at least `least` with the same sum; what that takes is taken from the others' rest.

    The mean must be at least `least`.
    """
    over = [max(share - least, 0.0) for share in shares]
    rest = sum(shares) - least * len(shares)
    factor = rest / sum(over) if sum(over) > 0 else 0.0
    return [least + factor * part for part in over]


def pyramid_budgets(
    n_layers: int, avg_budget: int, n_sink: int, beta: float = 2.0, window: int = 0
) -> list[int]:
    """Rows of each layer, falling along an arithmetic progression from the first to the last.

    Source: PyramidKV (arXiv 2406.02069), section 4. Of the mean without `window`, the last layer
    gets the part 1/beta and the first one what makes the mean right.

    Args:
        n_layers: layers that keep tokens.
        avg_budget: mean rows, `window` included.
        n_sink: first rows that every layer keeps besides its window.
        beta: steepness, at least 1; 1 gives every layer the same.
        window: newest rows that every layer keeps.

    Returns:
        One budget a layer; their sum is `n_layers` times `avg_budget`.

    Raises:
        ValueError: without layers, with a beta below 1, or a mean that sinks and window exceed.
    """
    if n_layers < 1:
        raise ValueError(f"n_layers={n_layers} is not possible; a model has at least 1 layer")
    if beta < 1:
        raise ValueError(f"beta={beta} is not possible; it must be at least 1")
    if avg_budget <= n_sink + window:
        raise ValueError(
            f"avg_budget={avg_budget} leaves no room; it must be more than n_sink + window = "
            f"{n_sink + window}"
        )
    mean = avg_budget - window
    low = mean / beta
    high = 2 * mean - low
    step = (high - low) / (n_layers - 1) if n_layers > 1 else 0.0
    shares = [high - layer * step for layer in range(n_layers)] if step else [mean] * n_layers
    caps = rounded(raised(shares, n_sink), n_layers * mean)
    return [cap + window for cap in caps]
