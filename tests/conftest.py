"""Settings every test needs before anything else is imported."""

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, ClassVar

import pytest

from veloxquant.core.blas import preload_openblas

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

preload_openblas()


# ---- helpers beside the tests ----------------------------------------------------------------


class BesideTests:
    """Finds the helpers that tests import by name.

    The folder itself must not be on the path: `tests/veloxquant` would hide the package.
    """

    FILES: ClassVar = {
        path.stem: path
        for path in (
            Path(__file__).with_name("architectures.py"),
            Path(__file__).with_name("cache_lab.py"),
            Path(__file__).with_name("tiny_model.py"),
            Path(__file__).parent / "worker" / "fake_supervisor.py",
        )
    }

    @classmethod
    def find_spec(cls, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Where a helper is; None for every other module."""
        del path, target
        file = cls.FILES.get(name)
        return importlib.util.spec_from_file_location(name, file) if file else None


sys.meta_path.append(BesideTests)


# ---- several workers of pytest ---------------------------------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the end-to-end tests on one worker: they share a server, and two would be too much.

    The mark `xdist_group` would say so, but with pytest 9.2 xdist 3.8 does not see it.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class OneServerAtATime(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = nodeid.startswith("tests/end_to_end/")
            return "end_to_end" if shared else super()._split_scope(nodeid)

    return OneServerAtATime(config, log)


# ---- supervised processes -------------------------------------------------------------------

STUB_WORKER = Path(__file__).with_name("stub_worker.py")
HOME_VARIABLE = "VELOXQUANT_HOME"


def processes_of(home: Path) -> dict[int, str]:
    """Living processes that were started with this state folder, without ourselves."""
    wanted = f"{HOME_VARIABLE}={home}".encode()
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if wanted in environment:
            found[int(entry.name)] = command
    return found


def children_of_ours() -> set[str]:
    """Process ids of our direct children, zombies included."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return set()
    found: set[str] = set()
    for task in tasks.iterdir():
        with contextlib.suppress(OSError):  # a thread that ended meanwhile
            found.update((task / "children").read_text().split())
    return found


class Supervised:
    """What a supervisor with the stub worker and a state folder of its own needs."""

    def __init__(self, home: Path, model: Path) -> None:
        self.home, self.model = home, model

    def stub(self, **flags: Any) -> None:
        """What the stub worker does from its next start on; see `stub_worker.py`."""
        folder = self.home / "state"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "stub.json").write_text(json.dumps(flags))

    def spec(self, port: int = 0, **fields: Any) -> dict[str, Any]:
        """A specification that the supervisor accepts, on a port that is free now."""
        if not port:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
        return {"model": str(self.model), "method": "kivi", "port": port} | fields

    def processes(self) -> dict[int, str]:
        """Processes of this state folder that live."""
        return processes_of(self.home)

    def gone_within(self, seconds: float) -> float | None:
        """Seconds until no process of this folder lives, None when some still do."""
        start = time.monotonic()
        while self.processes():
            if time.monotonic() - start > seconds:
                return None
            time.sleep(0.005)
        return time.monotonic() - start


class Daemon(Supervised):
    """A supervisor as a process of its own."""

    _process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *args: str) -> str:
        """Start the supervisor in the foreground, as our child; what it tells us."""
        told, tell = os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "veloxquant.supervisor", "--ready-fd", str(tell)),
                *("--worker-module", str(STUB_WORKER), "--idle", "30", *args),
            ],
            pass_fds=(tell,),
            stderr=subprocess.DEVNULL,
        )
        os.close(tell)
        with os.fdopen(told) as answer:
            return answer.read().strip()

    def kill(self) -> None:
        """SIGKILL, and reap."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)

    def end(self, seconds: float = 15.0) -> int:
        """SIGTERM, wait, and return the exit status."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
        return self._process.wait(seconds)

    def wait(self, seconds: float = 15.0) -> int:
        """Wait until it leaves by itself."""
        assert self._process is not None
        return self._process.wait(seconds)


class InProcess(Supervised):
    """A supervisor inside the test's event loop: real workers and sockets, no start-up cost."""

    _server: Any = None

    async def open(self, *, base: float = 0.01, silent: float = 10.0, dead: float = 120.0) -> Any:
        """Serve the control socket; the controller is returned."""
        from veloxquant.supervisor.controller import Controller
        from veloxquant.supervisor.effects import Limits
        from veloxquant.supervisor.paths import find, prepare
        from veloxquant.supervisor.policy import Policy
        from veloxquant.supervisor.server import ControlServer

        self.left = asyncio.Event()
        self.controller = Controller(
            prepare(find()),
            module=str(STUB_WORKER),
            policy=Policy(base=base),
            limits=Limits(silent=silent, dead=dead),
        )
        self._server = ControlServer(self.controller, self.left.set, "test")
        self.controller.open()
        await self._server.open()
        return self.controller

    async def close(self) -> None:
        """Stop the worker and the server."""
        if self._server is not None:
            await self.controller.close(0.0)
            await self._server.close()
            self._server = None


@pytest.fixture(scope="session")
def living() -> Callable[[Path], dict[int, str]]:
    """Tells which processes of a state folder live, for fixtures that outlast a test."""
    return processes_of


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder of its own; fails when a process that used it outlives the test."""
    folder = tmp_path / "home"
    monkeypatch.setenv(HOME_VARIABLE, str(folder))
    yield folder
    deadline = time.monotonic() + 3.0
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"processes outlived the test: {left}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model to the supervisor."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.fixture
def daemon(home: Path, model: Path) -> Iterator[Daemon]:
    """A supervisor process that is not started yet; ended after the test."""
    made = Daemon(home, model)
    yield made
    if made._process is not None:
        made.end()


@pytest.fixture
async def supervisor(home: Path, model: Path) -> AsyncIterator[InProcess]:
    """A supervisor in this event loop that is not open yet; closed after the test."""
    made = InProcess(home, model)
    yield made
    await made.close()


@pytest.fixture(autouse=True)
def no_child_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked `fault` leave no child process of ours, not even a zombie."""
    if request.node.get_closest_marker("fault") is None:
        yield
        return
    before = children_of_ours()
    yield
    assert children_of_ours() <= before, "a child process was left behind"
