"""The documented factory of quantizers."""

import importlib
from typing import Any

from veloxquant.core.abstractions import ArtifactStore, Quantizer
from veloxquant.core.constants import DEFAULT_SEED
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.core.registry import QuantizerRegistry

_HOMES = {
    "qjl": "qjl",
    "turboquant_mse": "turboquant_mse",
    "turboquant_prod": "turboquant_prod",
    "turboquant_prod_adaptive": "turboquant_prod",
    "turboquant_rvq": "turboquant_rvq",
    "polar": "polarquant",
    "rabitq": "rabitq",
    "kivi": "kivi",
    "comm_vq": "comm_vq",
}
"""Modules of this package that register a quantizer; imported when it is asked for."""


class QuantizerFactory:
    """Creates quantizers by name."""

    @staticmethod
    def create(
        method: str,
        d: int,
        b: int = 2,
        m: int | None = None,
        seed: int = DEFAULT_SEED,
        store: ArtifactStore | None = None,
        **kwargs: Any,
    ) -> Quantizer:
        """The quantizer registered as `method`.

        Args:
            method: "qjl", "turboquant_mse", "turboquant_prod", "turboquant_prod_adaptive",
                "turboquant_rvq", "polar", "rabitq", "comm_vq", "kivi", or a registered name.
            d: length of the vectors.
            b: bits a coordinate.
            m: rows of a sketch, `d` by default.
            seed: of all random matrices.
            store: where matrices and codebooks may lie; what is not there is made.
            **kwargs: of the quantizer itself.

        Raises:
            QuantizerConfigError: for a value out of range.
            KeyError: for an unknown method.
        """
        if not isinstance(d, int) or isinstance(d, bool) or d < 1:
            raise QuantizerConfigError(f"d={d!r}; give the length of the vectors")
        if store is not None and not isinstance(store, ArtifactStore):
            raise QuantizerConfigError(
                f"store={type(store).__name__}; give an ArtifactStore, such as "
                f"NpyArtifactStore(folder)"
            )
        if home := _HOMES.get(method):
            importlib.import_module(f"veloxquant.quantizers.{home}")
        kind = QuantizerRegistry.get(method)
        return kind(d=d, b=b, m=d if m is None else m, seed=seed, store=store, **kwargs)
