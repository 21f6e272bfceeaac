"""Follow a start: stages to stderr, the base URL to stdout, or the reason why not."""

import asyncio
from typing import Any

from veloxquant.cli import exit_codes
from veloxquant.cli.control import call, failed, refused
from veloxquant.cli.output import CliError, clean, envelope, gib, result, talk

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

    told: dict[str, str] = {}
    try:
        async with ControlClient(role="cli", name="vq up") as client:
            async for item in client.events():
                body = item.body if isinstance(item, Event) else None
                state = item.state if isinstance(item, Snapshot) else body
                if isinstance(item, LinkChange) and item.attempt >= PATIENCE:
                    raise NotConnectedError(item.reason)
                if isinstance(body, Progress):
                    _tell(told, body.report)
                if isinstance(state, State):
                    for report in [] if not told and state.phase in FINAL else state.stages:
                        _tell(told, report)
                    if state.phase == "backoff" and state.reason:
                        wait = f" in {state.retry_in:.1f} s" if state.retry_in else ""
                        talk(clean(f"warning: {state.reason.message} Trying again{wait}."))
                    if state.phase in FINAL:
                        return msgspec.to_builtins(state)
    except (CommandError, NotConnectedError) as error:
        raise refused(error) from error
    raise CliError("The supervisor closed the connection.", "Look at `vq logs`.")


def _tell(told: dict[str, str], report: Any) -> None:
    """One line a stage when it starts or turns to something else, and one when it ends."""
    line = f"{report.state} {report.detail}"
    if report.state == "next" or told.get(report.stage) == line:
        return
    told[report.stage] = line
    words = [f"{report.state:6}", f"{report.stage:8}", report.detail]
    if report.state == "now" and report.total and report.stage == "weights":
        words.append(gib(report.total))
    if report.seconds is not None:
        words.append(f"{report.seconds:.1f} s")
    talk(clean(" ".join(word for word in words if word)))
