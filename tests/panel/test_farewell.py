"""The panel ends when its terminal goes, whatever state the terminal is in."""

import os
import pty
import select
import signal
import sys
import time

import pytest

START = """
import sys
sys.path.insert(0, {tests!r})
import panel_fakes as fakes
from veloxquant.panel.app import PanelApp
control = fakes.FakeControl(*fakes.serving(20))
PanelApp(lambda: control, fakes.FakeLibrary).run()
"""


@pytest.mark.parametrize(
    "reads", [True, False], ids=["terminal that reads", "terminal that stalls"]
)
@pytest.mark.parametrize("number", [signal.SIGTERM, None], ids=["SIGTERM", "closed"])
def test_the_panel_ends_with_its_terminal(home, reads, number):
    from pathlib import Path

    script = START.format(tests=str(Path(__file__).parent))
    pid, terminal = pty.fork()
    if pid == 0:
        env = os.environ | {"TERM": "xterm-256color", "VELOXQUANT_HOME": str(home)}
        os.execve(sys.executable, [sys.executable, "-P", "-c", script], env)
    try:
        seen, deadline = b"", time.monotonic() + 30
        while b"READY" not in seen:
            assert time.monotonic() < deadline, seen[-500:]
            if select.select([terminal], [], [], 0.1)[0]:
                seen += os.read(terminal, 65_536)
        if not reads:
            time.sleep(1.0)  # output piles up: that is the case
        if number is not None:
            os.kill(pid, number)
            if not reads:
                time.sleep(0.2)
        os.close(terminal)
        deadline = time.monotonic() + 15
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            assert time.monotonic() < deadline, "the panel is still there"
            time.sleep(0.05)
        pid = 0
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
