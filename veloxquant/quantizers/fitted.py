"""Constants of fitted codecs: from a text of calibration instead of the first tokens."""

from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx

from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.base import Codec, FittedCodec, Packed
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.sizes import CodecSpec


def for_batch(given: Packed, batch: int) -> Packed:
    """Constants of one sequence, (1, H, ...), for each of `batch` sequences."""
    return {name: mx.broadcast_to(a, (batch, *a.shape[1:])) for name, a in given.items()}


def fit_side(spec: CodecSpec, side: str, rows: mx.array) -> dict[str, mx.array]:
    """Constants of a format for rows (H, N, D), under names that begin with `side`.

    Empty for formats that fit nothing to a text.
    """
    if not spec.fit_tokens:
        return {}
    codec = cast(FittedCodec, codec_for(spec, rows.shape[-1]))
    return {f"{side}_{name}": a for name, a in codec.fit(rows[None]).items()}


def given_codec(
    spec: CodecSpec, dim: int, heads: int, side: str, artifacts: Mapping[str, Any] | None
) -> Codec | None:
    """A codec of its own with the constants that `fit_side` found; None without any.

    Raises:
        QuantizerConfigError: when they are for other heads or another format, or are damaged:
            what reads them believes them.
    """
    prefix = f"{side}_"
    given = {
        name.removeprefix(prefix): mx.array(a)
        for name, a in (artifacts or {}).items()
        if name.startswith(prefix)
    }
    if not given or not spec.fit_tokens:
        return None
    shared = cast(FittedCodec, codec_for(spec, dim))
    wanted = {n: a.shape for n, a in shared.fit(mx.zeros((1, heads, spec.fit_tokens, dim))).items()}
    found = {name: a.shape for name, a in given.items()}
    if found != wanted:
        raise QuantizerConfigError(
            f"calibrated constants of {side}s have shapes {found}; this layer needs {wanted}"
        )
    for name, limit in shared.limits.items():
        if name in given and cast(int, given[name].max().item()) >= limit:
            raise QuantizerConfigError(
                f"calibrated constants of {side}s are damaged: {name!r} points to a place over "
                f"{limit}; fit them again"
            )
    return type(shared)(dim, spec, given)  # type: ignore[call-arg]
