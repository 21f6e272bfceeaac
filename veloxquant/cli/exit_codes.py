"""Exit codes of every command, and what the failures of other parts amount to."""

OK = 0
FAILED = 1
USAGE = 2
NOT_FOUND = 3
DOES_NOT_FIT = 4
BUSY = 5
NETWORK = 6
UNSUPPORTED = 7
INTERRUPTED = 130

MEANING = {
    OK: "ok",
    FAILED: "failed",
    USAGE: "the command or its settings cannot be understood",
    NOT_FOUND: "there is no such model, method or server",
    DOES_NOT_FIT: "it does not fit into memory",
    BUSY: "something is running already, or the port is taken",
    NETWORK: "the network or the server's answer failed",
    UNSUPPORTED: "this machine, model or method is not supported",
    INTERRUPTED: "interrupted",
}

OF_FAULT = {
    "usage": USAGE,
    "model_missing": NOT_FOUND,
    "not_running": NOT_FOUND,
    "bad_model": FAILED,
    "port_taken": BUSY,
    "already_running": BUSY,
    "busy": BUSY,
    "does_not_fit": DOES_NOT_FIT,
    "unsupported": UNSUPPORTED,
    "unreachable": NETWORK,
    "network": NETWORK,
}
"""Codes of `supervisor/failures.py` and of refused commands; anything else means FAILED."""


def of_fault(code: str) -> int:
    """Exit code for the code of a fault or of a refused command."""
    return OF_FAULT.get(code, FAILED)
