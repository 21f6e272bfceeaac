"""What the documented name of the baseline, fp16, leaves open: the bits that its rows have here."""

from veloxquant.config.kv_cache import BASELINE
from veloxquant.planning.model_shape import Backend


def baseline_note(method: str, backend: Backend) -> str:
    """How uncompressed rows are held, where the method's name says otherwise; else empty.

    The server computes in 32 bits on the CPU backend, whose arithmetic in 16 bits is slow, and
    uncompressed rows are those that the model computes.
    """
    wide = method == BASELINE and backend == "cpu"
    return "held in 32 bits on this machine" if wide else ""
