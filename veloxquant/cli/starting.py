"""Follow a start: stages to stderr, the base URL to stdout, or the reason why not."""

import asyncio
from typing import TYPE_CHECKING, Any

from veloxquant.cli import exit_codes
from veloxquant.cli.control import call, failed, refused
from veloxquant.cli.output import (
    CliError,
    clean,
    envelope,
    gib,
    is_terminal,
    result,
    rewrite,
    talk,
)

if TYPE_CHECKING:
    from veloxquant.supervisor.messages import StageReport

PATIENCE = 5
"""Tries to reach a supervisor that went away while the server started."""
FINAL = ("ready", "busy", "failed", "stopped")


def wait_until_ready(as_json: bool) -> int:
    """Wait for the server that starts now; prints its base URL.

    Raises:
        CliError: when it does not start.
    """
    state = asyncio.run(_follow())
    if state["phase"] not in ("ready", "busy"):
        raise failed(state.get("reason"))
    status = call("status")
    data = summary(status)
    if as_json:
        result(envelope(data, state.get("warnings", [])))
    else:
        if data["calibration"]:
            talk(clean(f"calibration: {data['calibration']}"))
        for warning in state.get("warnings", []):
            talk(f"warning: {clean(warning)}")
        if data["api_key"]:
            talk(f"The API key is in {status.get('token_file')}.")
        result(str(data["base_url"]))
    return exit_codes.OK


def summary(status: dict[str, Any]) -> dict[str, Any]:
    """What a caller needs to use the server."""
    state = status["state"]
    spec = state.get("spec") or {}
    return {
        "base_url": status.get("base_url"),
        "model": spec.get("name") or spec.get("model"),
        "method": spec.get("method"),
        "context": spec.get("context"),
        "port": state.get("port"),
        "pid": state.get("pid"),
        "phase": state["phase"],
        "calibration": state.get("calibration", ""),
        "api_key": bool(spec.get("api_key")),
        "token_file": status.get("token_file") if spec.get("api_key") else None,
    }


async def _follow() -> dict[str, Any]:
    """The final state of the start that is under way, as a dict."""
    import msgspec

    from veloxquant.supervisor.client import (
        CommandError,
        ControlClient,
        LinkChange,
        NotConnectedError,
    )
    from veloxquant.supervisor.messages import Event, Progress, Snapshot, State

    lines = StageLines()
    try:
        async with ControlClient(role="cli", name="vq up") as client:
            async for item in client.events():
                body = item.body if isinstance(item, Event) else None
                state = item.state if isinstance(item, Snapshot) else body
                if isinstance(item, LinkChange) and item.attempt >= PATIENCE:
                    raise NotConnectedError(item.reason)
                if isinstance(body, Progress):
                    lines.show(body.report)
                if isinstance(state, State):
                    for report in [] if not lines and state.phase in FINAL else state.stages:
                        lines.show(report)
                    if state.phase == "backoff" and state.reason:
                        lines.close()
                        lines = StageLines()  # the next try is told anew
                        wait = f" in {state.retry_in:.1f} s" if state.retry_in else ""
                        talk(clean(f"warning: {state.reason.message} Trying again{wait}."))
                    if state.phase in FINAL:
                        return msgspec.to_builtins(state)
    except (CommandError, NotConnectedError) as error:
        raise refused(error) from error
    finally:
        lines.close()
    raise CliError("The supervisor closed the connection.", "Look at `vq logs`.")


class StageLines:
    """One line a stage: when it has ended, or on a terminal rewritten as it goes on."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}
        self._live = is_terminal()
        self._open = ""
        self._weights: int | None = None

    def __bool__(self) -> bool:
        """Whether any stage was shown."""
        return bool(self._told)

    def show(self, report: "StageReport") -> None:
        """Tell of a stage unless that was told already."""
        has_ended = report.state != "now"
        if report.stage == "weights":
            self._weights = report.total or self._weights
        line = f"{report.state} {report.detail} {'' if has_ended else report.done or ''}"
        if report.state == "next" or self._told.get(report.stage) == line:
            return
        if not (has_ended or self._live):
            return
        self._told[report.stage] = line
        words = [f"{report.state:6}", f"{report.stage:8}", report.detail.replace("\n", " ")]
        if not has_ended and report.total:
            words.append(_progress(report))
        elif report.stage == "weights" and self._weights:
            words.append(gib(self._weights))
        if report.seconds is not None:
            words.append(f"{report.seconds:.1f} s")
        if self._open not in ("", report.stage):
            self.close()
        text = clean(" ".join(word for word in words if word))
        if self._live:
            rewrite(text, end=has_ended)
            self._open = "" if has_ended else report.stage
        else:
            talk(text)

    def close(self) -> None:
        """End the line that is being rewritten, before anything else is said."""
        if self._open:
            self._open = ""
            rewrite(None, end=True)


def _progress(report: "StageReport") -> str:
    done, total = report.done or 0, report.total or 0
    if report.stage == "weights":
        return f"{gib(done)} of {gib(total)}"
    return f"{done:,} of {total:,}"
