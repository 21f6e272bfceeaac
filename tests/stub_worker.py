"""A worker without MLX: speaks the protocol and misbehaves on demand.

`python -P -m stub_worker --parent PID --link FD`. What it does comes from the file `stub.json` in
the working folder (the supervisor's state folder), read at each start:

    crash_after SECONDS      exit 70 that long after ready     crash_at_start   SIGSEGV itself
    ignore_term              SIGTERM does nothing              hold_gil         a regex, for minutes
    python_busy              a Python loop on the main thread  fork_child       a child that sleeps
    never_ready              stays in the stage `weights`      no_hello         never says anything
    lie_in_frames            announces a frame of 4 GiB        flood N          N lines on stdout
    big_line BYTES           one line of that length           fatal CODE       Fatal, then exit
    log_lines N              N records over the link           running N        requests in Stats
    silent                   no heartbeats after ready         slow_load S      seconds of loading
"""

import argparse
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from veloxquant.supervisor import failures
from veloxquant.supervisor.framing import HEADER, recv_frame, send_frame
from veloxquant.supervisor.messages import (
    Beat,
    Command,
    Done,
    Error,
    Fatal,
    Hello,
    Launch,
    Log,
    Progress,
    Ready,
    StageReport,
    Stats,
)


class Stub:
    def __init__(self, link: socket.socket, flags: dict) -> None:
        self.link = link
        self.flags = flags
        self.lock = threading.Lock()
        self.launch = None
        self.launched = threading.Event()

    def send(self, *messages) -> None:
        with self.lock:
            send_frame(self.link, list(messages))

    def read(self) -> None:
        """End of the link is the end of us, from whatever thread."""
        try:
            while messages := recv_frame(self.link):
                for message in messages:
                    self.take(message)
        finally:
            os._exit(75)

    def take(self, message) -> None:
        if isinstance(message, Launch):
            self.launch = message
            self.launched.set()
        elif isinstance(message, Command):
            if message.op == "audit":
                self.send(Done(message.id, {"nbytes": 42, "token": self.launch.token}))
            elif message.op == "cancel" and message.args.get("request") == "none":
                self.send(Error(message.id, "not_found", "no such request", "Look at the list."))
            else:
                self.send(Done(message.id))

    def beat(self) -> None:
        while True:
            time.sleep(0.25)
            self.send(Beat(time.monotonic()))

    def gauges(self) -> None:
        step = 0
        while True:
            time.sleep(0.25)
            step += 1
            self.send(
                Stats(
                    footprint=1000 + step,
                    running=self.flags.get("running", 0),
                    engine_step=step,
                    decode_tps=40.0,
                )
            )

    def run(self) -> None:
        flags = self.flags
        if flags.get("crash_at_start"):
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        if flags.get("no_hello"):
            time.sleep(3600)
        self.send(Hello("worker", "stub", os.getpid(), capabilities=["stack_dump"]))
        self.launched.wait()
        if code := flags.get("fatal"):
            self.send(Fatal(failures.fault(code, "as asked by the test")))
            os._exit(failures.FAILURES[code].exit_code)
        if flags.get("lie_in_frames"):
            with self.lock:
                self.link.sendall(HEADER.pack(0xFFFFFFFF) + b"x" * 1000)
            time.sleep(3600)
        self.send(Progress(StageReport("imports", "done", "none")))
        self.send(Progress(StageReport("weights", "now", "model", done=1, total=2)))
        time.sleep(flags.get("slow_load", 0))
        if flags.get("never_ready"):
            time.sleep(3600)
        self.send(Progress(StageReport("weights", "done", "model", done=2, total=2)))
        if not flags.get("silent"):
            threading.Thread(target=self.beat, daemon=True).start()
        spec = self.launch.spec
        server = socket.socket(fileno=self.launch.listen_fd)
        assert server.getsockname()[1] == spec.port
        if flags.get("fork_child"):
            child = subprocess.Popen(["/bin/sleep", "3600"])
            print(f"child {child.pid}", flush=True)
        self.send(
            Ready(spec.port, spec.model, spec.context, spec.method, layers=2,
                  compressed_layers=2, weights=1000)
        )  # fmt: skip
        threading.Thread(target=self.gauges, daemon=True).start()
        self.misbehave(flags)
        while True:
            time.sleep(3600)

    def misbehave(self, flags: dict) -> None:
        for n in range(flags.get("flood", 0)):
            print(f"flood {n:09d} {'x' * 90}")
        if size := flags.get("big_line"):
            sys.stdout.write("y" * size + "\nafter\n")
        sys.stdout.flush()
        for n in range(flags.get("log_lines", 0)):
            self.send(Log("info", "engine", f"record {n}"))
        if (seconds := flags.get("crash_after")) is not None:
            time.sleep(seconds)
            print("last words", file=sys.stderr, flush=True)
            os._exit(70)
        if flags.get("python_busy"):
            while True:
                sum(range(1000))
        if flags.get("hold_gil"):
            re.match(r"(a+)+$", "a" * 40 + "b")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--link", type=int, required=True)
    args = parser.parse_args()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != args.parent:
        os._exit(75)
    path = Path("stub.json")
    flags = json.loads(path.read_text()) if path.exists() else {}
    signal.signal(signal.SIGTERM, signal.SIG_IGN if flags.get("ignore_term") else signal.SIG_DFL)
    import faulthandler

    faulthandler.register(signal.SIGUSR1)
    stub = Stub(socket.socket(fileno=args.link), flags)
    threading.Thread(target=stub.read, daemon=True).start()
    stub.run()


if __name__ == "__main__":
    main()
