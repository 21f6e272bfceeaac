"""The closed set of commands: arguments, who may ask, time limits, and one answer per id."""

import asyncio
import collections
import logging
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

from veloxquant.supervisor.controller import Controller
from veloxquant.supervisor.effects import RefusedError
from veloxquant.supervisor.messages import (
    MAX_MESSAGE_BYTES,
    Accepted,
    CancelArgs,
    Command,
    Done,
    Error,
    Gap,
    Hello,
    Log,
    LogsArgs,
    Message,
    Op,
    ProtocolError,
    StartArgs,
    StopArgs,
    args_of,
    encode,
    plain,
)

log = logging.getLogger(__name__)

READ_ONLY: frozenset[Op] = frozenset({"status", "subscribe", "logs", "audit"})
MAX_GRACE = 600.0
DEFAULT_GRACE = 10.0
MARGIN = 10.0
AUDIT_SECONDS = 60.0
LEAVE_SECONDS = 0.2
REMEMBERED = 256
MAX_LOG_ANSWER_CHARS = 96 << 10  # at worst six bytes each on the wire
_LEVELS = ("debug", "info", "warning", "error")

Reply = Callable[[Message], None]


class ServerFacts(Protocol):
    """What `status` says about the control server."""

    @property
    def viewers(self) -> int:
        """Number of connected viewers."""
        ...

    def hello(self) -> Hello:
        """The supervisor's hello."""
        ...


class Commands:
    """Answers commands; a repeated id gets the answer of the first one."""

    def __init__(self, controller: Controller, leave: Callable[[], None], facts: ServerFacts):
        self._controller = controller
        self._leave = leave
        self._facts = facts
        self._born = time.monotonic()
        self._answers: collections.OrderedDict[str, asyncio.Future[Message]] = (
            collections.OrderedDict()
        )

    async def answer(self, command: Command, hello: Hello, reply: Reply) -> None:
        """Accept, carry out, answer; every command ends with `Done` or `Error`."""
        if hello.read_only and command.op not in READ_ONLY:
            text = "this viewer may only watch"
            reply(Error(command.id, "read_only", text, "Connect without --read-only."))
            return
        reply(Accepted(command.id))
        if known := self._answers.get(command.id):
            reply(await asyncio.shield(known))
            return
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers[command.id] = future
        while len(self._answers) > REMEMBERED:
            self._answers.popitem(last=False)
        result = await self._safely(command, hello.name)
        if (size := len(encode(result))) > MAX_MESSAGE_BYTES:
            result = Error(
                command.id, "too_large", f"the answer has {size:,} bytes", "Ask for less."
            )
        future.set_result(result)
        reply(result)

    async def _safely(self, command: Command, by: str) -> Message:
        try:
            return Done(command.id, await self._do(command, by))
        except RefusedError as refused:
            return Error(command.id, refused.code, str(refused), refused.hint)
        except ProtocolError as error:
            return Error(command.id, "usage", str(error), "Look at the command's arguments.")
        except TimeoutError:
            return Error(command.id, "timeout", f"`{command.op}` took too long", "See the log.")
        except Exception as error:  # task boundary: the viewer must get an answer
            log.exception("command %s failed", command.op)
            return Error(command.id, "internal", f"fault of the supervisor: {error!r}")

    async def _do(self, command: Command, by: str) -> dict[str, Any]:
        controller = self._controller
        match command.op:
            case "start":
                args = args_of(command, StartArgs)
                return {"state": plain(await controller.start(args.spec, by))}
            case "stop":
                grace = _grace(args_of(command, StopArgs))
                async with asyncio.timeout(grace + MARGIN):
                    return {"state": plain(await controller.stop(grace, by))}
            case "restart":
                async with asyncio.timeout(DEFAULT_GRACE + 2 * MARGIN):
                    return {"state": plain(await controller.restart(DEFAULT_GRACE, by))}
            case "status":
                return self._status()
            case "logs":
                return self._logs(args_of(command, LogsArgs))
            case "audit":
                return await controller.ask_worker("audit", {}, AUDIT_SECONDS)
            case "drain":
                grace = _grace(args_of(command, StopArgs))
                return await controller.ask_worker("drain", {"grace": grace}, grace + MARGIN)
            case "cancel":
                request = args_of(command, CancelArgs).request
                return await controller.ask_worker("cancel", {"request": request}, MARGIN)
            case "shutdown":
                async with asyncio.timeout(DEFAULT_GRACE + MARGIN):
                    await controller.stop(DEFAULT_GRACE, by)
                # A moment later, so that the answer arrives.
                asyncio.get_running_loop().call_later(LEAVE_SECONDS, self._leave)
                return {"pid": os.getpid()}
            case _:
                raise RefusedError("usage", f"`{command.op}` is not answered here")

    def _status(self) -> dict[str, Any]:
        controller, hello = self._controller, self._facts.hello()
        hub, machine, journal = controller.hub, controller.machine, controller.journal
        token = controller.paths.token
        return {
            "state": plain(machine.state(time.monotonic())),
            "stats": plain(hub.history.latest),
            "summary": hub.history.summary(),
            "base_url": controller.base_url,
            "token_file": str(token) if controller.base_url and token.exists() else None,
            "barred": machine.spec is not None and journal.barred(machine.spec),
            "history": [plain(record) | {"last_lines": []} for record in journal.records[-10:]],
            "supervisor": {
                "pid": os.getpid(),
                "version": hello.version,
                "epoch": hub.epoch,
                "uptime": time.monotonic() - self._born,
                "viewers": self._facts.viewers,
            },
        }

    def _logs(self, args: LogsArgs) -> dict[str, Any]:
        lowest = _LEVELS.index(args.level)
        lines: list[dict[str, Any]] = []
        chars = 0
        for event in reversed(self._controller.hub.logs()):
            if len(lines) >= max(0, args.last) or chars > MAX_LOG_ANSWER_CHARS:
                break
            body = event.body
            if isinstance(body, Gap):
                body = Log("warning", "logs", f"--- {body.count} lines were dropped here ---")
            if not isinstance(body, Log) or _LEVELS.index(body.level) < lowest:
                continue
            if args.grep.lower() not in body.text.lower():
                continue
            chars += len(body.text)
            lines.append({"seq": event.seq, "t": event.t} | plain(body))
        return {"lines": lines[::-1], "dropped": self._controller.hub.dropped_logs}


def _grace(args: StopArgs) -> float:
    if not 0.0 <= args.grace <= MAX_GRACE:
        raise RefusedError(
            "usage", f"grace={args.grace!r} is not possible", f"Give 0 to {MAX_GRACE:.0f} seconds."
        )
    return args.grace
