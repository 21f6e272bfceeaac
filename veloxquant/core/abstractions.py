"""Interfaces that the parts of the library are written against; none of them needs MLX.

Arrays are `Any`: `mx.array` on the device path, `np.ndarray` in calibration. `d` is the length of
one vector, `batch` the number of vectors.
"""

from abc import ABC, abstractmethod
from typing import Any

from veloxquant.core.context import EncodedVector, QuantizationContext, TransformResult


class Quantizer(ABC):
    """Encode vectors compactly and compute with the encoded form."""

    @abstractmethod
    def encode(self, x: Any) -> EncodedVector:
        """Encode `x`, shape (batch, d)."""

    @abstractmethod
    def decode(self, ev: EncodedVector) -> Any:
        """Rebuild approximate vectors, shape (batch, d)."""

    @abstractmethod
    def estimate_inner_product(self, q: Any, ev: EncodedVector) -> Any:
        """Estimate the inner products of a query with encoded keys.

        Args:
            q: query, shape (d,) or (1, d).
            ev: encoded keys.

        Returns:
            One estimate per key, shape (batch,).
        """


class Preconditioner(ABC):
    """Turn vectors into a basis that quantizes well, and back."""

    @abstractmethod
    def apply(self, x: Any) -> Any:
        """Transform `x`, shape (batch, d)."""

    @abstractmethod
    def apply_inverse(self, y: Any) -> Any:
        """Undo `apply`, shape (batch, d)."""


class Codebook(ABC):
    """Map values to indices of representative values, and back."""

    @abstractmethod
    def quantize(self, y: Any) -> Any:
        """Index of the nearest entry for each element of `y`."""

    @abstractmethod
    def dequantize(self, idx: Any) -> Any:
        """Entries at `idx`, in the shape of `idx`."""


class KVCache(ABC):
    """Cache of one attention head that is fed vector by vector and computes its own attention.

    A cache is true even while it is empty, so that `if cache` asks whether there is one; its
    length is the number of tokens it holds.
    """

    @abstractmethod
    def append_key(self, k: Any) -> None:
        """Append a key, shape (d,)."""

    @abstractmethod
    def append_value(self, v: Any) -> None:
        """Append a value, shape (d,)."""

    @abstractmethod
    def attend(self, q: Any) -> Any:
        """Attention output for the query `q`; both have shape (d,)."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes held now."""

    def reset(self) -> None:
        """Drop all tokens and keep configuration and calibration.

        Raises:
            NotImplementedError: unless the class overrides it. Caches that own their tokens do;
                a wrapper for which the word means something else need not.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot be emptied; build a new cache instead"
        )

    def append(self, k: Any, v: Any) -> None:
        """Append a key and its value, each of shape (d,)."""
        self.append_key(k)
        self.append_value(v)

    def __len__(self) -> int:
        """Tokens held.

        Raises:
            NotImplementedError: unless the class overrides it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not count its tokens")

    def __bool__(self) -> bool:
        return True


class Transform(ABC):
    """Reversible transform of a batch of vectors into angles and a radius."""

    @abstractmethod
    def forward(self, x: Any) -> TransformResult:
        """Transform `x`, shape (batch, d)."""

    @abstractmethod
    def inverse(self, result: TransformResult) -> Any:
        """Rebuild the vectors, shape (batch, d)."""


class QuantizationHandler(ABC):
    """One stage of a chain; it works on the context and passes it to the next stage."""

    _next: "QuantizationHandler | None" = None

    @property
    def handler_name(self) -> str:
        """Name of the stage in events and error messages: its class name."""
        return type(self).__name__

    def set_next(self, handler: "QuantizationHandler") -> "QuantizationHandler":
        """Link `handler` behind this stage and return it, so that calls can be chained."""
        self._next = handler
        return handler

    @abstractmethod
    def handle(self, ctx: QuantizationContext) -> QuantizationContext:
        """Do this stage's work, then let `_pass_on` run the rest of the chain."""

    def _pass_on(self, ctx: QuantizationContext) -> QuantizationContext:
        """Run the next stage if there is one."""
        return ctx if self._next is None else self._next.handle(ctx)


class InnerProductStrategy(ABC):
    """A way to estimate inner products from the encoded form."""

    @abstractmethod
    def estimate(self, q: Any, encoded: EncodedVector) -> Any:
        """Estimates for the query `q`, shape (d,): one per encoded vector, shape (batch,)."""


class CodebookStrategy(ABC):
    """A way to choose the entries of a scalar codebook."""

    @abstractmethod
    def compute_centroids(self, b: int, d: int) -> Any:
        """Entries of a `b`-bit codebook for vectors of length `d`: shape (2^b,), ascending."""


class ArtifactStore(ABC):
    """Load and save precomputed matrices and codebooks."""

    @abstractmethod
    def load_rotation_matrix(self, d: int, seed: int) -> Any:
        """Rotation matrix of shape (d, d).

        Raises:
            ArtifactNotFoundError: when it was never saved.
        """

    @abstractmethod
    def save_rotation_matrix(self, Pi: Any, d: int, seed: int) -> None:
        """Save the rotation matrix `Pi` of shape (d, d)."""

    @abstractmethod
    def load_codebook(self, distribution: str, b: int, d: int) -> Any:
        """Codebook of shape (2^b,) for a distribution name such as "gaussian" or "beta".

        Raises:
            ArtifactNotFoundError: when it was never saved.
        """

    @abstractmethod
    def save_codebook(self, cb: Any, distribution: str, b: int, d: int) -> None:
        """Save the codebook `cb`."""

    @abstractmethod
    def load_jl_matrix(self, d: int, m: int, seed: int) -> Any:
        """Johnson-Lindenstrauss sketch of shape (m, d).

        Raises:
            ArtifactNotFoundError: when it was never saved.
        """

    @abstractmethod
    def save_jl_matrix(self, S: Any, d: int, m: int, seed: int) -> None:
        """Save the sketch `S` of shape (m, d)."""

    @abstractmethod
    def exists(self, artifact_type: str, **kwargs: Any) -> bool:
        """Whether an artifact is there and can be loaded.

        Args:
            artifact_type: "rotation", "codebook" or "jl".
            **kwargs: the arguments of the matching load method.
        """


class QuantizationObserver(ABC):
    """Receive the events of a pipeline: times, sizes, distortion."""

    @abstractmethod
    def on_event(self, event: Any) -> None:
        """Handle one event."""
