import subprocess
import sys

import pytest


def run(body: str) -> subprocess.CompletedProcess[str]:
    script = "from veloxquant.worker.deadman import *\nimport os, re, signal, time\n" + body
    return subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=20
    )


@pytest.mark.parametrize(
    "busy",
    [
        "time.sleep(30)",
        # holds the interpreter for minutes: no Python thread runs meanwhile
        "re.match('(a+)+$', 'a' * 40 + 'b')",
    ],
)
def test_a_process_that_is_not_fed_ends_even_while_c_code_holds_the_interpreter(busy: str) -> None:
    done = run(f"DeadMan(0.3)\n{busy}")
    assert done.returncode == 1
    assert "Timeout" in done.stderr


def test_feeding_keeps_it_alive() -> None:
    done = run(
        "d = DeadMan(0.4)\n"
        "for _ in range(8): time.sleep(0.1); d.feed()\n"
        "d.allow(30); time.sleep(0.5); d.disarm()"
    )
    assert done.returncode == 0, done.stderr


def test_stacks_are_shown_on_request() -> None:
    done = run("show_stacks_on_request()\nos.kill(os.getpid(), signal.SIGUSR1)")
    assert done.returncode == 0
    assert "most recent call first" in done.stderr
