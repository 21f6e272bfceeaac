"""Rows of one head of qfilters."""

from dataclasses import dataclass

import mlx.core as mx

from veloxquant.methods.functional.rows import HeadState


@dataclass
class QFiltersState(HeadState):
    """Rows of one head with their projections on `filter_dir`, None until it is known."""

    scores: mx.array | None = None
    filter_dir: mx.array | None = None
    recent: int = 0
    calib_tokens: int = 128
    sign: int = 1
