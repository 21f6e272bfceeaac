"""Latents of each token by itself, the leading ones at more bits.

The basis holds the strongest directions of the first rows, not centred: what a projection of the
hidden state would be. Codes and scales belong to one token, so tokens are read and cut one by one.
"""

from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np

from veloxquant.kernels.native import MAX_DIM, NativeRun
from veloxquant.quantizers.base import Codec, Packed, Shared
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.latent import Directions, basis_of, directions, project, projecting
from veloxquant.quantizers.specs.latent import LatentSpec


def second_moments(x: mx.array) -> np.ndarray:
    """Second moments (B, H, D, D) of rows (B, H, n, D), in fp64."""
    rows = np.array(x.astype(mx.float32), dtype=np.float64)
    return rows.swapaxes(-1, -2) @ rows / rows.shape[2]


class LatentCodec(Shared):
    """`basis` (D, r) of `basis_of`, and the arrays of both formats with their number in front.

    `moments` gives the second moments of rows to expect, those of the first ones if left out.
    """

    def __init__(
        self,
        dim: int,
        spec: LatentSpec,
        moments: Callable[[mx.array], np.ndarray] | None = None,
    ) -> None:
        self.dim, self.spec = dim, spec
        self.moments = moments or second_moments
        self.parts: list[tuple[Codec, int, int]] = [
            (codec_for(one, high - low), low, high) for one, low, high in spec.parts(dim)
        ]
        self.axes = {
            f"{i}.{name}": axis
            for i, (codec, _, _) in enumerate(self.parts)
            for name, axis in codec.axes.items()
        }

    def fit(self, x: mx.array) -> Packed:
        """Strongest directions of (B, H, fit_tokens, D); waits for the rows once."""
        vectors = directions(self.moments(x))[..., : self.spec.kept(self.dim)]
        return {"basis": basis_of(vectors, x.dtype)}

    def encode(self, x: mx.array) -> Packed:
        """Fit to these rows and pack them; a store keeps the basis instead."""
        fitted = self.fit(x)
        return {**self.encode_fitted(x, fitted), **fitted}

    def encode_fitted(self, x: mx.array, fitted: Packed) -> Packed:
        """Pack (B, H, n, D)."""
        return self.pack(project(x, projecting(fitted["basis"])).astype(x.dtype))

    def pack(self, latents: mx.array) -> Packed:
        """Pack latents (B, H, n, r)."""
        return {
            f"{i}.{name}": mx.contiguous(a)
            for i, (codec, low, high) in enumerate(self.parts)
            for name, a in codec.encode(latents[..., low:high]).items()
        }

    def _sides(self, packed: Packed) -> Iterator[tuple[Codec, Packed, int, int]]:
        for i, (codec, low, high) in enumerate(self.parts):
            prefix = f"{i}."
            part = {n.removeprefix(prefix): a for n, a in packed.items() if n.startswith(prefix)}
            yield codec, part, low, high

    def latents(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Latents (B, H, T, r) as their codes give them back."""
        parts = [codec.decode(part, dtype) for codec, part, _, _ in self._sides(packed)]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        rows = Directions(packed["basis"]).unrotate(self.latents(packed, mx.float32))
        return rows.astype(dtype)

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """Products of projected queries with latents."""
        latents = Directions(packed["basis"]).rotate_query(q)
        parts = [c.scores(latents[..., low:high], p) for c, p, low, high in self._sides(packed)]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """Sums of latents as sums of rows."""
        sums = [codec.mix(w, part) for codec, part, _, _ in self._sides(packed)]
        return Directions(packed["basis"]).unrotate(mx.concatenate(sums, axis=-1))

    def native(self, packed: Packed, start: int, stop: int) -> tuple[NativeRun, ...] | None:
        """Both formats, each in its own directions."""
        runs = []
        for codec, part, low, high in self._sides(packed):
            run = codec.native(part, start, stop)
            if not isinstance(run, NativeRun) or run.width > MAX_DIM:
                return None
            basis = Directions(packed["basis"][..., low:high])
            runs.append(run._replace(basis=basis, dim=high - low))
        return tuple(runs)
