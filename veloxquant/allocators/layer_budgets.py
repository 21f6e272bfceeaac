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


def three_classes(values: Sequence[float]) -> list[int]:
    """Class 0, 1 or 2 of each value, by rising centre: k-means from least, median and largest.

    All 0 for fewer than three different values.
    """
    ordered = sorted(values)
    if len(set(ordered)) < 3:
        return [0] * len(values)
    centres = [ordered[0], ordered[len(ordered) // 2], ordered[-1]]
    classes: list[int] = []
    while True:
        nearest = [min(range(3), key=lambda k: abs(v - centres[k])) for v in values]
        if nearest == classes:
            return classes
        classes = nearest
        for k in range(3):
            members = [v for v, c in zip(values, classes, strict=True) if c == k]
            centres[k] = sum(members) / len(members) if members else centres[k]


def class_budgets(
    values: Sequence[float], avg_budget: int, least: int, strength: float = 1.0
) -> list[int]:
    """Rows of each layer: the class of largest values gives up some, the others share them.

    Source: SqueezeAttention (arXiv 2404.04793), algorithm 1; the paper sets the part that the
    class keeps, here it is 1 - 0.7·strength.

    Args:
        values: how little each layer needs its rows; finite.
        avg_budget: mean rows.
        least: rows that every layer keeps, at most the mean.
        strength: from 0, the same for all, to 1.

    Returns:
        One budget a layer with an exact sum; a larger value never gets more rows.
    """
    classes, n_layers = three_classes(values), len(values)
    given = classes.count(2)
    if given == 0:
        return [avg_budget] * n_layers
    part = 1.0 - 0.7 * strength
    low = part * avg_budget
    high = (n_layers - given * part) * avg_budget / (n_layers - given)
    order = sorted(range(n_layers), key=lambda i: values[i])
    shares = [low if classes[i] == 2 else high for i in order]
    rows = rounded(raised(shares, least), n_layers * avg_budget)
    out = [0] * n_layers
    for i, n in zip(order, rows, strict=True):
        out[i] = n
    return out
