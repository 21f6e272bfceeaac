"""Small unsigned integers in bytes: one little-endian bit stream, whole bytes a call."""

import numpy as np

WIDTHS = (1, 2, 3, 4)


class BitPackBuffer:
    """Packer of `b`-bit integers; 3-bit ones lie eight to three bytes."""

    def __init__(self, b: int) -> None:
        if b not in WIDTHS or isinstance(b, bool):
            raise ValueError(f"b={b!r}; widths are {', '.join(map(str, WIDTHS))}")
        self.b = b

    def pack(self, indices: np.ndarray) -> np.ndarray:
        """Integers (n,) below 2^b as bytes (ceil(n·b / 8),) uint8, lowest bits first.

        Raises:
            ValueError: for integers that do not fit.
        """
        codes = np.asarray(indices).reshape(-1)
        if codes.size and (codes.min() < 0 or codes.max() >= 1 << self.b):
            raise ValueError(
                f"integers from {codes.min()} to {codes.max()} do not fit {self.b} bits"
            )
        bits = codes.astype(np.uint8)[:, None] >> np.arange(self.b, dtype=np.uint8) & 1
        return np.packbits(bits.reshape(-1), bitorder="little")

    def unpack(self, packed: np.ndarray, n: int) -> np.ndarray:
        """The first `n` integers (n,) uint8.

        Raises:
            ValueError: when the bytes hold fewer.
        """
        data = np.asarray(packed, dtype=np.uint8).reshape(-1)
        if not 0 <= n * self.b <= 8 * data.size:
            raise ValueError(f"{data.size} bytes do not hold {n} integers of {self.b} bits")
        bits = np.unpackbits(data, count=n * self.b, bitorder="little").reshape(n, self.b)
        return (bits << np.arange(self.b, dtype=np.uint8)).sum(axis=1, dtype=np.uint8)
