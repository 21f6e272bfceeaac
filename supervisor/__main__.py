"""Entry of the daemon: `python -P -m veloxquant.supervisor [--detach] [--idle SECONDS]`.

`--ready-fd` is written one line to: `ok`, `taken PID`, or `error SENTENCE`. `--worker-module`
runs another module or file in the worker's place and exists for tests.
"""

import argparse
import asyncio
import contextlib
import importlib.metadata
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence

from veloxquant.supervisor.effects import Limits
from veloxquant.supervisor.lock import InstanceLock, LockTakenError
from veloxquant.supervisor.paths import Paths, UnsafeFolderError, find, prepare
from veloxquant.supervisor.policy import Policy
from veloxquant.supervisor.process import WORKER_MODULE

IDLE_SECONDS = 60.0
STOP_GRACE = 10.0
CHECK_SECONDS = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the supervisor until it is idle or told to leave.

    Returns:
        0 after a good life or when another one runs already, 1 when it cannot run.
    """
    args = _parser().parse_args(argv)
    if args.detach:
        _detach()
    os.umask(0o077)
    try:
        paths = prepare(find())
        lock = InstanceLock(paths.lock)
        lock.take()
    except LockTakenError as taken:
        _tell(args.ready_fd, f"taken {taken.pid or 0}")
        return 0
    except (UnsafeFolderError, OSError) as error:
        _tell(args.ready_fd, f"error {error}")
        return 1
    os.chdir(paths.state)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        return asyncio.run(_serve(paths, args))
    finally:
        lock.release()


async def _serve(paths: Paths, args: argparse.Namespace) -> int:
    from veloxquant.supervisor.controller import Controller
    from veloxquant.supervisor.server import ControlServer

    leaving = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, leaving.set)
    controller = Controller(
        paths,
        module=args.worker_module,
        policy=Policy()._replace(base=args.backoff),
        limits=Limits()._replace(silent=args.silent, dead=args.dead),
    )
    server = ControlServer(controller, leaving.set, importlib.metadata.version("veloxquant"))
    controller.open()
    try:
        await server.open()
    except OSError as error:
        _tell(args.ready_fd, f"error cannot listen on {paths.socket}: {error.strerror}")
        await controller.close(0.0)
        return 1
    _tell(args.ready_fd, "ok")
    while not leaving.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CHECK_SECONDS):
                await leaving.wait()
        await server.heal()
        if server.viewers or not controller.is_idle:
            server.last_seen = time.monotonic()
        elif time.monotonic() - server.last_seen > args.idle:
            leaving.set()
    await controller.close(STOP_GRACE)
    await server.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="veloxquant-supervisor", description="Run and watch the server."
    )
    parser.add_argument("--detach", action="store_true", help="leave the terminal and the caller")
    parser.add_argument("--idle", type=float, default=IDLE_SECONDS, help="leave after seconds idle")
    parser.add_argument("--ready-fd", type=int, default=-1, help="tell the caller here")
    tests = parser.add_argument_group("for tests")
    tests.add_argument("--worker-module", default=WORKER_MODULE)
    tests.add_argument("--backoff", type=float, default=Policy().base)
    tests.add_argument("--silent", type=float, default=Limits().silent)
    tests.add_argument("--dead", type=float, default=Limits().dead)
    return parser


def _detach() -> None:
    """Become a process of our own session that nobody waits for; before any thread exists."""
    if os.fork():
        os._exit(0)
    os.setsid()


def _tell(fd: int, line: str) -> None:
    if fd < 0:
        if line != "ok":
            print(line, file=sys.stderr)  # noqa: T201 - started by hand, without a caller
        return
    with contextlib.suppress(OSError):
        os.write(fd, f"{line}\n".encode())
        os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
