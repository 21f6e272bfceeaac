"""Asking a model to repeat a prompt it has read, piece by piece, to see what it needs for that.

Source: KVzip (arXiv 2505.23416), section 3: pieces of 2,048 tokens, the request of each piece but
the first quoting the 8 tokens before it.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from veloxquant.core.exceptions import CacheStateError

PIECE = 2048
QUOTED = 8
FIRST_REQUEST = "\n\nRepeat the previous context exactly."
NEXT_REQUEST = "\n\nRepeat the part of the previous context exactly, starting with"
_MARK = "\x02context\x03"


class Probed(Protocol):
    """A cache whose rows can be scored by a repetition."""

    offset: int

    @property
    def rows(self) -> int:
        """Rows held."""
        ...

    def begin_probe(self, start: int, stop: int) -> None:
        """Score rows [start, stop) by what comes."""
        ...

    def end_probe(self) -> None:
        """Take back what came, all of it stored."""
        ...

    def prune(self) -> None:
        """Give up the rows beyond the budget."""
        ...


def compress(
    model: Any,
    caches: Sequence[Any],
    ours: Sequence[Probed],
    context_ids: Sequence[int],
    tokenizer: Any,
) -> None:
    """Repeat the context piece by piece and let `ours` prune.

    Args:
        model: an mlx-lm model.
        caches: all its caches.
        ours: those of them that score.
        context_ids: what the caches hold.
        tokenizer: the model's tokenizer.

    Raises:
        CacheStateError: when the caches do not hold the context, or others cannot be rewound.
    """
    total = len(context_ids)
    scoring = {id(c) for c in ours}
    others = [c for c in caches if id(c) not in scoring]
    if not total or any(c.rows != total or c.offset != total for c in ours):
        raise CacheStateError(
            f"the caches must hold exactly the {total} tokens to repeat; they hold "
            f"{sorted({c.rows for c in ours})}"
        )
    if not all(c.is_trimmable() for c in others):
        raise CacheStateError(
            "this model has caches that cannot be rewound, so its prompt cannot be repeated; "
            "use kvzip_probe='context'"
        )
    answer = answer_tokens(tokenizer)
    for start in range(0, total, PIECE):
        stop = min(start + PIECE, total)
        probe = [*request_tokens(tokenizer, context_ids, start), *answer]
        probe.extend(context_ids[start:stop])
        for cache in ours:
            cache.begin_probe(start, stop)
        try:
            mx.eval(model(mx.array([probe]), cache=list(caches)))
        finally:
            for cache in ours:
                cache.end_probe()
        for cache in others:
            cache.trim(len(probe))
    for cache in ours:
        cache.prune()


def request_tokens(tokenizer: Any, context_ids: Sequence[int], start: int) -> list[int]:
    """What asks for the piece that begins at `start`."""
    if not start:
        return _plain(tokenizer, FIRST_REQUEST)
    return [*_plain(tokenizer, NEXT_REQUEST), *context_ids[max(0, start - QUOTED) : start]]


def answer_tokens(tokenizer: Any) -> list[int]:
    """What ends the user's turn and starts the answer; a line break without a chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        return _plain(tokenizer, "\n")
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], add_generation_prompt=True, tokenize=False
    )
    return _plain(tokenizer, turn.rsplit(_MARK, 1)[-1])


def _plain(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text in the middle of a sequence."""
    return list(tokenizer.encode(text, add_special_tokens=False))
