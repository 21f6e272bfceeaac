"""Bases that a kernel's runs may be in: scaled, constant, cut or grouped channels."""

import mlx.core as mx


class Scaled:
    """Channels times a factor each, (B, H, 1, D)."""

    def __init__(self, factor: mx.array) -> None:
        self.factor = factor

    def rotate_query(self, q: mx.array) -> mx.array:
        """Queries for rows without the factor."""
        return q * self.factor

    def unrotate(self, x: mx.array) -> mx.array:
        """Sums of rows with the factor."""
        return x * self.factor


class Constant:
    """One row, (B, H, 1, D), that every token adds."""

    def __init__(self, row: mx.array) -> None:
        self.row = row

    def rotate_query(self, q: mx.array) -> mx.array:
        """Products with the row."""
        return (q * self.row).sum(axis=-1, keepdims=True)

    def unrotate(self, x: mx.array) -> mx.array:
        """The row times sums of weights."""
        return x * self.row


class Piece:
    """Channels from `start` on, of `dim`."""

    def __init__(self, start: int, stop: int, dim: int) -> None:
        self.start, self.stop, self.dim = start, stop, dim

    def rotate_query(self, q: mx.array) -> mx.array:
        """These channels of queries."""
        return q[..., self.start : self.stop]

    def unrotate(self, x: mx.array) -> mx.array:
        """Sums of these channels among zeros."""
        return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(self.start, self.dim - self.stop)])


class Groups:
    """One number for each `group` channels, of `dim`."""

    def __init__(self, group: int, dim: int) -> None:
        self.group, self.dim = group, dim

    def rotate_query(self, q: mx.array) -> mx.array:
        """Sums of the groups of queries."""
        wide = mx.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, -self.dim % self.group)])
        return wide.reshape(*q.shape[:-1], -1, self.group).sum(axis=-1)

    def unrotate(self, x: mx.array) -> mx.array:
        """Each number for all channels of its group."""
        return mx.repeat(x, self.group, axis=-1)[..., : self.dim]
