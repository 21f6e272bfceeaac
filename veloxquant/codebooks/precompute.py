"""Write the seeded matrices and codebooks of one head size to a folder."""

from collections.abc import Sequence

from veloxquant.artifacts import NpyArtifactStore
from veloxquant.codebooks.base import CodebookFactory
from veloxquant.codebooks.strategies import check_bits
from veloxquant.config.ranges import is_whole
from veloxquant.config.validate import MAX_SEED
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.math.rotation import make_jl_matrix, make_rotation_matrix

DISTRIBUTIONS = ("gaussian", "beta")
MAX_SIDE = 4096
"""Rows and columns of a matrix: what a head and its sketch may have, with room."""


def precompute(
    head_dim: int,
    bits: Sequence[int],
    jl_dim: int,
    seed: int,
    output_dir: str,
    distributions: Sequence[str] | None = None,
) -> None:
    """Write a rotation, a sketch, and one codebook for every width and distribution.

    Args:
        head_dim: length of the vectors, up to 4096.
        bits: widths of the codebooks.
        jl_dim: length of the sketch, up to 4096.
        seed: of the random matrices, as in a configuration.
        output_dir: folder of the `NpyArtifactStore`.
        distributions: of the codebooks, "gaussian" and "beta" by default.

    Raises:
        QuantizerConfigError: for a value out of range; nothing is written then.
    """
    names = DISTRIBUTIONS if distributions is None else distributions
    _check_integer("head_dim", head_dim, 1, MAX_SIDE)
    _check_integer("jl_dim", jl_dim, 1, MAX_SIDE)
    _check_integer("seed", seed, 0, MAX_SEED)
    for b in bits:
        check_bits(b)
    books = {(name, b): CodebookFactory.create(name, b, head_dim) for name in names for b in bits}  # pyright: ignore[reportArgumentType]
    store = NpyArtifactStore(output_dir)
    store.save_rotation_matrix(make_rotation_matrix(head_dim, seed), head_dim, seed)
    store.save_jl_matrix(make_jl_matrix(head_dim, jl_dim, seed), head_dim, jl_dim, seed)
    for (name, b), book in books.items():
        store.save_codebook(book.centroids_numpy(), name, b, head_dim)


def _check_integer(name: str, value: int, low: int, high: int) -> None:
    if not is_whole(value) or not low <= value <= high:
        raise QuantizerConfigError(
            f"{name}={value!r} is not possible; it must be an integer from {low} to {high}"
        )


def main() -> None:
    """Run the documented command line of this module."""
    from veloxquant.cli.precompute import main as command  # the table of commands has the flags

    command()
