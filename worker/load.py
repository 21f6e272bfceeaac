"""Load a gated model with mlx-lm, in pieces that can be reported."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, load_tokenizer

from veloxquant.worker.faults import WorkerFault
from veloxquant.worker.gate import Gated

logger = logging.getLogger(__name__)

_PIECE_BYTES = 64 << 20


class Loaded(NamedTuple):
    """A model that is in memory. `context` is the longest text it was made for, if known."""

    model: Any
    tokenizer: Any
    config: dict[str, Any]
    weights: int
    vocab: int
    context: int | None


def load(gated: Gated, *, as_float32: bool, report: Callable[[int, int], None]) -> Loaded:
    """Load weights and tokenizer on this thread.

    Args:
        gated: a model that passed the gate.
        as_float32: compute in 32 bits, as the CPU backend needs for speed.
        report: gets bytes done and bytes in all.

    Raises:
        WorkerFault: `bad_model`, `unsupported` or `does_not_fit`.
    """
    with _faults(gated):
        model, config = load_model(gated.path, lazy=True, trust_remote_code=False)
        if as_float32:
            model.set_dtype(mx.float32)
        weights = _materialise(model, report)
        tokenizer = _tokenizer(gated, config.get("eos_token_id"))
    return Loaded(model, tokenizer, config, weights, _vocab(config, tokenizer), _context(config))


def read_tokenizer(gated: Gated) -> Any:
    """The tokenizer without the model.

    Raises:
        WorkerFault: `bad_model` or `unsupported`.
    """
    with _faults(gated):
        return _tokenizer(gated, None)


def _tokenizer(gated: Gated, eos: Any) -> Any:
    return load_tokenizer(gated.path, {"trust_remote_code": False}, eos_token_ids=eos)


@contextmanager
def _faults(gated: Gated) -> Iterator[None]:
    """What goes wrong with a model's files, as faults."""
    try:
        yield
    except MemoryError as error:
        raise WorkerFault("does_not_fit", "Memory ran out while the weights were read.") from error
    except ValueError as error:
        code = "unsupported" if "not supported" in str(error) else "bad_model"
        raise WorkerFault(code, _first_line(error)) from error
    except (RuntimeError, OSError, KeyError, TypeError, AttributeError) as error:
        logger.debug("Loading failed", exc_info=error)
        raise WorkerFault("bad_model", f"{gated.path.name}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:500]


def _materialise(model: Any, report: Callable[[int, int], None]) -> int:
    """Read the lazy weights piece by piece; returns their bytes."""
    arrays = [cast(mx.array, array) for _, array in tree_flatten(model.parameters())]
    total = sum(array.nbytes for array in arrays)
    done = 0
    report(0, total)
    piece: list[mx.array] = []
    for array in arrays:
        piece.append(array)
        done += array.nbytes
        if sum(a.nbytes for a in piece) >= _PIECE_BYTES:
            mx.eval(piece)
            piece = []
            report(done, total)
    mx.eval(piece)
    report(total, total)
    return total


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def _context(config: dict[str, Any]) -> int | None:
    value = _text_config(config).get("max_position_embeddings")
    return value if isinstance(value, int) and value > 0 else None


def _vocab(config: dict[str, Any], tokenizer: Any) -> int:
    value = _text_config(config).get("vocab_size")
    return value if isinstance(value, int) and value > 0 else len(tokenizer)
