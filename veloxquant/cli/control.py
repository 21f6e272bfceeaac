"""The command line's calls to the supervisor; refusals become `CliError`."""

from typing import TYPE_CHECKING, Any

from veloxquant.cli import exit_codes
from veloxquant.cli.output import CliError

if TYPE_CHECKING:
    from veloxquant.supervisor.messages import Op


def is_running() -> bool:
    """Whether a supervisor listens; never starts one."""
    from veloxquant.supervisor.launch import is_running as listens
    from veloxquant.supervisor.paths import find

    return listens(find())


def call(op: "Op", args: dict[str, Any] | None = None, *, start: bool = False) -> dict[str, Any]:
    """Run one command of the supervisor; with `start` it is started when it does not run.

    Raises:
        CliError: when it is refused or the supervisor cannot be reached.
    """
    from veloxquant.supervisor.client import CommandError, NotConnectedError, run_command

    try:
        return run_command(op, args or {}, start=start)
    except (CommandError, NotConnectedError) as error:
        raise refused(error) from error


def refused(error: Exception) -> CliError:
    """A `CommandError` or `NotConnectedError` for people."""
    from veloxquant.supervisor.client import CommandError

    if not isinstance(error, CommandError):
        return CliError(
            f"The supervisor cannot be reached: {error}.", "`vq doctor` says what is wrong.",
            exit_codes.NETWORK, "unreachable",
        )  # fmt: skip
    code = exit_codes.of_fault(error.code)
    return CliError(error.message, error.hint, code, error.code)


def failed(fault: dict[str, Any] | None) -> CliError:
    """The fault of a server that did not start."""
    fault = fault or {}
    message = str(fault.get("message") or "The server did not start.")
    if detail := fault.get("detail"):
        message = f"{message} {detail}"
    code = str(fault.get("code", "crashed"))
    return CliError(message, str(fault.get("hint", "")), exit_codes.of_fault(code), code)


def peek() -> dict[str, Any] | None:
    """What is running, or None without a supervisor; starts nothing."""
    if not is_running():
        return None
    try:
        return call("status")
    except CliError as error:
        if error.code == "unreachable":  # it left between the two
            return None
        raise


def running_server() -> dict[str, Any]:
    """Status of a server that answers requests.

    Raises:
        CliError: NOT_FOUND when there is none, BUSY while it starts.
    """
    status = peek()
    phase = status["state"].get("phase", "stopped") if status else "stopped"
    if status is None or phase in ("stopped", "failed"):
        raise CliError(
            "No server is running.", "Start one with `vq up`.", exit_codes.NOT_FOUND, "not_running"
        )
    if phase not in ("ready", "busy"):
        raise CliError(
            f"The server is not ready: {phase}.", "Wait for it: `vq status --watch`.",
            exit_codes.BUSY, "busy",
        )  # fmt: skip
    return status
