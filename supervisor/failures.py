"""Why a server failed: one table of codes, sentences, next steps and exit codes.

The worker leaves with the exit code of its failure; the supervisor reads it back from here, so
both agree even when the last message was lost.
"""

from typing import NamedTuple

from veloxquant.supervisor.messages import Fault


class Failure(NamedTuple):
    """One kind of failure. `heals` says whether starting again can help."""

    code: str
    exit_code: int
    message: str
    hint: str
    heals: bool


FAILURES: dict[str, Failure] = {
    f.code: f
    for f in (
        Failure("usage", 2, "The server was started with settings it cannot use.",
                "Correct the setting named below and start again.", False),
        Failure("model_missing", 3, "There is no such model on this machine.",
                "Pick one in Models, or run `vq models demo` for the small demo model.", False),
        Failure("bad_model", 4, "The model's files cannot be read.",
                "Delete and fetch the model again; the file is named below.", False),
        Failure("port_taken", 5, "The port is in use by another program.",
                "Choose another port (n takes the next free one), or stop that program.", False),
        Failure("does_not_fit", 6, "The model does not fit into the memory limit.",
                "Choose a smaller model, a shorter context, or raise the limit.", False),
        Failure("canary_failed", 7, "The trial token through the real cache failed.",
                "Choose another method for this model; fp16 always works.", False),
        Failure("unsupported", 8, "This model and method cannot work together.",
                "Choose another method; the reason is below.", False),
        Failure("internal", 70, "The server stopped because of a fault of its own.",
                "Start again; if it happens twice, look at the log.", True),
        Failure("orphaned", 75, "The server's supervisor went away.",
                "Start again.", True),
        Failure("killed", -9, "The server was killed (signal 9): possibly memory.",
                "Try a method that needs less memory, or a shorter context.", True),
        Failure("segfault", -11, "The server crashed (signal 11): possibly memory.",
                "Try a method that needs less memory, or a shorter context.", True),
        Failure("aborted", -6, "The server was aborted (signal 6): possibly GPU memory.",
                "Try a method that needs less memory, or a shorter context.", True),
        Failure("crash_loop", 0, "The server crashed again after five restarts in two minutes.",
                "Look at the last lines below, then start with other settings.", False),
        Failure("stalled", 0, "Starting made no progress for too long.",
                "Look at the log; a smaller model or method may help.", True),
        Failure("unresponsive", 0, "The server gave no sign of life for two minutes.",
                "It is started again by itself; look at the stack dump in the log.", True),
        Failure("crashed", 0, "The server ended without saying why.",
                "Look at the log; it is started again by itself.", True),
    )
}  # fmt: skip

_BY_EXIT = {f.exit_code: f for f in FAILURES.values() if f.exit_code != 0}


def fault(code: str, detail: str = "") -> Fault:
    """The fault of one code, with `detail` saying what exactly was wrong.

    Raises:
        KeyError: for a code that is not in the table.
    """
    known = FAILURES[code]
    return Fault(code=code, message=known.message, hint=known.hint, detail=detail)


def of_exit(status: int) -> Failure:
    """The failure that an exit status means; negative statuses are signals."""
    if known := _BY_EXIT.get(status):
        return known
    if status < 0:
        return FAILURES["crashed"]._replace(
            message=f"The server was ended by signal {-status}.", heals=True
        )
    return FAILURES["crashed"]
