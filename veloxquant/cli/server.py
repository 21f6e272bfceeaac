"""`vq status`, `stop`, `restart`, `logs`, `shutdown`: the server that runs, from outside."""

import argparse
import asyncio
import json
import time
from collections.abc import Coroutine
from typing import Any

from veloxquant.cli import exit_codes
from veloxquant.cli.control import call, is_running, peek, refused
from veloxquant.cli.log_file import last_lines
from veloxquant.cli.output import CliError, clean, envelope, gib, result, talk
from veloxquant.cli.starting import wait_until_ready
from veloxquant.config.settings import load_settings

RUNNING = ("ready", "busy", "stopping")
SHUTDOWN_SECONDS = 10.0
_PLAIN = {"kv_fp16": "kv_uncompressed", "fp16": "uncompressed"}
LEVELS = ("debug", "info", "warning", "error")


def _no_server(as_json: bool) -> int:
    if as_json:
        result(envelope({"phase": "stopped", "supervisor": None}))
    else:
        result("stopped: no server is running")
    return exit_codes.OK


def status(args: argparse.Namespace) -> int:
    """Say what is running; with --watch one line a change."""
    if args.watch:
        return _watch(args.json)
    found = peek()
    if found is None:
        return _no_server(args.json)
    if args.json:
        result(envelope(_status_data(found)))
        return _status_code(found["state"])
    state = found["state"]
    result(sentence(state, found.get("base_url")))
    if state["phase"] in RUNNING and (stats := found.get("stats")):
        result(gauges(stats, found.get("summary")))
    if told := state.get("calibration"):
        result(clean(f"calibration: {told}"))
    for warning in state.get("warnings", []):
        talk(f"warning: {clean(warning)}")
    for line in state.get("last_lines", []) if state["phase"] in ("failed", "crashed") else ():
        talk(f"  {clean(line)}")
    return _status_code(state)


def _status_code(state: dict[str, Any]) -> int:
    return exit_codes.FAILED if state["phase"] == "failed" else exit_codes.OK


def _status_data(found: dict[str, Any]) -> dict[str, Any]:
    """The status without local paths."""
    spec = dict(found["state"].get("spec") or {})
    if spec:
        spec["model"] = spec.get("name") or spec["model"].rpartition("/")[2]
    hidden = ("token_file", "history")
    kept = {key: _plainly(value) for key, value in found.items() if key not in hidden}
    state = found["state"] | {"spec": spec or None}
    return kept | {"state": state, "phase": state["phase"]}


def _plainly(data: Any) -> Any:
    """Data for JSON with the bytes of uncompressed caches named so: not all have 16 bits."""
    if isinstance(data, dict):
        return {_PLAIN.get(key, key): _plainly(value) for key, value in data.items()}
    return [_plainly(item) for item in data] if isinstance(data, list) else data


def sentence(state: dict[str, Any], base_url: str | None = None) -> str:
    """The state in one line that starts with its word."""
    spec = state.get("spec") or {}
    name = spec.get("name") or str(spec.get("model", "")).rpartition("/")[2]
    what = f"{name} / {spec.get('method', '')}" if spec else "no server is running"
    words = [f"{state['phase']}: {what}"]
    if base_url:
        words.append(base_url)
    if state.get("pid"):
        words.append(f"pid {state['pid']}")
    if state.get("restarts"):
        words.append(f"restarts {state['restarts']}")
    if state.get("unresponsive"):
        words.append("does not answer at the moment")
    if state.get("retry_in"):
        words.append(f"starts again in {state['retry_in']:.1f} s")
    if reason := state.get("reason"):
        words.append(" ".join(t for t in (reason.get("message"), reason.get("detail")) if t))
    return clean("   ".join(words))


def gauges(stats: dict[str, Any], summary: dict[str, Any] | None = None) -> str:
    """The gauges in one line; with the `summary` of the run also the most that its caches held.

    An idle server holds no cache, so that what it holds now tells nothing of its requests.
    """

    def cache(name: str) -> str:
        peak = (summary or {}).get(f"peak_kv_{name}", 0)
        most = f" (peak {gib(peak)})" if peak > stats[f"kv_{name}"] else ""
        return f"{name} {gib(stats[f'kv_{name}'])}{most}"

    return (
        f"memory {gib(stats['footprint'])} of {gib(stats['limit'])}   "
        f"kv {cache('claimed')} {cache('resident')}   "
        f"decode {stats['decode_tps']:.1f} tok/s   prefill {stats['prefill_tps']:.0f} tok/s   "
        f"running {stats['running']} waiting {stats['waiting']} done {stats['done']} "
        f"failed {stats['failed']}"
    )


def _watch(as_json: bool) -> int:
    if not is_running():
        return _no_server(as_json)
    return _until_interrupted(_stream(as_json))


def _until_interrupted(work: Coroutine[Any, Any, None]) -> int:
    """Run something endless; ctrl-C is its normal end and needs no word."""
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    return exit_codes.OK


async def _stream(as_json: bool) -> None:
    import msgspec

    from veloxquant.supervisor.client import (
        CommandError,
        ControlClient,
        LinkChange,
        NotConnectedError,
    )
    from veloxquant.supervisor.messages import Event, Log, Progress, Request, Snapshot, State, Stats

    last_gauges = ""
    try:
        async with ControlClient(role="cli", name="vq status") as client:
            async for item in client.events():
                if isinstance(item, LinkChange):
                    if not item.up:
                        talk(f"warning: the supervisor went away: {clean(item.reason)}")
                        return
                    continue
                bodies = [item.state, item.stats] if isinstance(item, Snapshot) else []
                bodies = [item.body] if isinstance(item, Event) else bodies
                for body in bodies:
                    if body is None:
                        continue
                    data = msgspec.to_builtins(body)
                    if as_json:
                        result(envelope(_plainly(data)))
                    elif isinstance(body, State):
                        result(sentence(data))
                    elif isinstance(body, Stats):
                        line = gauges(msgspec.structs.asdict(body))
                        if line != last_gauges:
                            last_gauges = line
                            result(line)
                    elif isinstance(body, Progress):
                        report = body.report
                        result(clean(f"{report.state}: {report.stage} {report.detail}".rstrip()))
                    elif isinstance(body, Request):
                        result(clean(f"request: {body.id} {body.state} {body.detail}".rstrip()))
                    elif isinstance(body, Log) and body.level in ("warning", "error"):
                        result(clean(f"{body.level}: {body.text}"))
    except (CommandError, NotConnectedError) as error:
        raise refused(error) from error


def stop(args: argparse.Namespace) -> int:
    """Stop the server and wait until no process of it is left."""
    if not is_running():
        return _no_server(args.json)
    if args.grace < 0:
        raise CliError("--grace cannot be negative.", "", exit_codes.USAGE, "usage")
    answer = call("stop", {"grace": args.grace})
    if args.json:
        result(envelope({"phase": answer["state"]["phase"]}))
    else:
        result(sentence(answer["state"]))
    return exit_codes.OK


def restart(args: argparse.Namespace) -> int:
    """Stop the server, start it with the same settings, and wait until it is ready."""
    if not is_running():
        raise CliError(
            "No server is running.", "Start one with `vq up`.", exit_codes.NOT_FOUND, "not_running"
        )
    call("restart")
    return wait_until_ready(args.json)


def shutdown(args: argparse.Namespace) -> int:
    """Stop the server and the supervisor, and wait until both have ended."""
    if not is_running():
        return _no_server(args.json)
    phase = shut_down()
    if args.json:
        result(envelope({"phase": phase}))
    elif phase == "stopped":
        result("stopped: server and supervisor")
    else:
        result("stopping: the server has ended, the supervisor is about to")
    return exit_codes.OK


def shut_down() -> str:
    """Stop server and supervisor and wait for both; `stopping` when the latter still ends.

    Raises:
        CliError: when the supervisor refuses or cannot be reached.
    """
    from veloxquant.supervisor.launch import has_left

    pid = call("shutdown").get("pid")
    return "stopped" if pid and has_left(pid, SHUTDOWN_SECONDS) else "stopping"


def logs(args: argparse.Namespace) -> int:
    """Show the newest lines, and go on with new ones when asked to."""
    args.level = args.level or load_settings().value("logs.level")
    if not is_running():
        return _last_log(args)
    answer = call("logs", {"last": args.last, "level": args.level, "grep": args.grep})
    for line in answer["lines"]:
        result(json.dumps(line, ensure_ascii=False) if args.json else _log_line(line))
    if answer.get("dropped"):
        talk(f"note: {answer['dropped']} older lines are not kept any more")
    if args.follow:
        shown = max((line.get("seq", -1) for line in answer["lines"]), default=-1)
        return _until_interrupted(_follow(args, shown))
    return exit_codes.OK


def _last_log(args: argparse.Namespace) -> int:
    """What the file says that the last supervisor left."""
    from veloxquant.supervisor.paths import find

    path = find().log / "server.log"
    lines = last_lines(path, args.last, LEVELS[LEVELS.index(args.level) :], args.grep)
    if not lines:
        raise CliError(
            "No supervisor is running, and the last one left no such lines.",
            "Start a server with `vq up`.", exit_codes.NOT_FOUND, "not_running",
        )  # fmt: skip
    talk("note: no supervisor is running; these are the last lines of its log file")
    for line in lines:
        text = f"{line['time']} {line['level'].upper():7} {line['source']:10} {clean(line['text'])}"
        result(json.dumps(line, ensure_ascii=False) if args.json else text)
    return exit_codes.OK


def _log_line(line: dict[str, Any]) -> str:
    wall = line.get("wall") or time.time()
    clock = time.strftime("%H:%M:%S", time.localtime(wall)) + f".{int(wall % 1 * 1000):03}"
    text = clean(str(line["text"])).replace("\n", "\n             ")
    return f"{clock} {str(line['level']).upper():7} {line['source']:10} {text}"


async def _follow(args: argparse.Namespace, shown: int) -> None:
    from veloxquant.supervisor.client import (
        CommandError,
        ControlClient,
        LinkChange,
        NotConnectedError,
    )
    from veloxquant.supervisor.messages import Event, Gap, Log, Snapshot

    try:
        async with ControlClient(role="cli", name="vq logs") as client:
            async for item in client.events():
                if isinstance(item, LinkChange) and not item.up:
                    talk(f"warning: the supervisor went away: {clean(item.reason)}")
                    return
                # a snapshot repeats the ring; what was printed already is skipped by number
                events = item.logs if isinstance(item, Snapshot) else [item]
                for event in events:
                    if not isinstance(event, Event) or event.seq <= shown:
                        continue
                    body = event.body
                    if isinstance(body, Gap) and body.kind == "log":
                        talk(f"note: {body.count} lines were dropped, this reader was too slow")
                    if not isinstance(body, Log):
                        continue
                    shown = event.seq
                    if LEVELS.index(body.level) < LEVELS.index(args.level):
                        continue
                    if args.grep and args.grep.lower() not in body.text.lower():
                        continue
                    line = {
                        "seq": event.seq, "t": event.t, "wall": body.wall, "level": body.level,
                        "source": body.source, "request": body.request, "text": body.text,
                    }  # fmt: skip
                    result(json.dumps(line, ensure_ascii=False) if args.json else _log_line(line))
    except (CommandError, NotConnectedError) as error:
        raise refused(error) from error
