"""The crash journal: what was launched, how it ended, and that it was given up.

It outlives the supervisor and reboots. Files are replaced whole (temporary file, fsync, rename);
one that cannot be read is set aside as `.corrupt-<n>`. A worker that a killed supervisor left
behind is recognised by process id, start time and command line together, never by the id alone.
"""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from veloxquant.config.files import set_aside
from veloxquant.core.whole_files import write_file
from veloxquant.supervisor.messages import Fault, LaunchSpec

KEPT = 50
MAX_BYTES = 4 << 20
START_TIME_SLACK = 0.05
_CLEAN = frozenset({"stopped"})


class Record(msgspec.Struct, omit_defaults=True):
    """One process that was started. Times are wall clock; `end` is None while it runs."""

    launch: str
    spec: LaunchSpec
    spec_hash: str
    boot: str
    pid: int
    pid_start: float
    command: list[str]
    start: float
    group: int = 0
    end: float | None = None
    outcome: str = ""
    reason: Fault | None = None
    last_lines: list[str] = []
    given_up: bool = False
    seen: bool = False


class _Content(msgspec.Struct):
    version: int = 1
    records: list[Record] = []


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file so that it is never seen half-written, and outlives a crash of the machine.

    Its mode is 0600.

    Raises:
        OSError: when it cannot be written; the old content is still there.
    """
    write_file(path, data, mode=0o600)
    folder = os.open(path.parent, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.fsync(folder)
    os.close(folder)


def boot_id() -> str:
    """What changes when the machine restarts."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=2).stdout.strip()
    return "unknown"


def spec_hash(spec: LaunchSpec) -> str:
    """Short name of a specification."""
    return hashlib.sha256(msgspec.json.encode(spec, order="sorted")).hexdigest()[:16]


class Journal:
    """Records of launches, newest last. `notices` are sentences for the user about the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.notices: list[str] = []
        self.records = self._read()
        self.boot = boot_id()

    def began(self, spec: LaunchSpec, pid: int, group: int, command: list[str]) -> Record:
        """A process was started."""
        record = Record(
            launch=os.urandom(6).hex(),
            spec=spec,
            spec_hash=spec_hash(spec),
            boot=self.boot,
            pid=pid,
            pid_start=_start_time(pid) or 0.0,
            command=command,
            start=time.time(),
            group=group,
        )
        self.records = [*self.records, record][-KEPT:]
        return record

    def ended(
        self, record: Record, outcome: str, reason: Fault | None, last_lines: list[str]
    ) -> None:
        """It ended: `outcome` is a word, `stopped` means that it was asked to."""
        record.end, record.outcome, record.reason = time.time(), outcome, reason
        record.last_lines = last_lines[-20:]

    def gave_up(self, reason: Fault) -> None:
        """The newest launch is not tried again by itself, by this supervisor or another."""
        if self.records:
            self.records[-1].given_up = True
            self.records[-1].reason = reason

    def acknowledge(self) -> None:
        """A user's command starts anew: what was given up no longer counts."""
        for record in self.records:
            record.given_up, record.seen = False, True

    def adopt(self) -> tuple[Fault | None, list[str]]:
        """Close what a lost supervisor left open; kill its worker if that still lives.

        Returns:
            The fault to show as the present state, if the newest launch ended badly, and
            sentences about what was found.
        """
        found: list[str] = []
        for record in self.records:
            if record.end is not None:
                continue
            if record.boot != self.boot:
                outcome, text = "reboot", "the machine restarted while the server ran"
            else:
                outcome, text = "lost", "the supervisor ended while the server ran"
                if kill_left_over(record):
                    text += f"; its worker (pid {record.pid}) was still there and was ended"
            self.ended(record, outcome, Fault("orphaned", f"{text[0].upper()}{text[1:]}."), [])
            found.append(text)
        if not self.records:
            return None, found
        last = self.records[-1]
        if last.given_up or (self.barred(last.spec) and not last.seen):
            return last.reason, found
        return None, found

    def barred(self, spec: LaunchSpec) -> bool:
        """Whether this specification must not be started without a user's command.

        It was given up, the machine restarted under it, or it ended badly twice in a row.
        """
        name = spec_hash(spec)
        ends = [r for r in self.records if r.spec_hash == name and r.end is not None]
        if ends and not ends[-1].seen and (ends[-1].given_up or ends[-1].outcome == "reboot"):
            return True
        return len(ends) >= 2 and all(r.outcome not in _CLEAN for r in ends[-2:])

    def content(self) -> bytes:
        """The file's bytes."""
        return msgspec.json.format(msgspec.json.encode(_Content(records=self.records)), indent=1)

    def save(self) -> None:
        """Write the file.

        Raises:
            OSError: when it cannot be written.
        """
        write_atomic(self._path, self.content())

    def _read(self) -> list[Record]:
        try:
            if self._path.stat().st_size > MAX_BYTES:
                raise msgspec.DecodeError(f"larger than {MAX_BYTES} bytes")
            return msgspec.json.decode(self._path.read_bytes(), type=_Content).records
        except FileNotFoundError:
            return []
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            aside = set_aside(self._path)
            self.notices.append(f"the journal could not be read ({error}); kept as {aside.name}")
        except OSError as error:
            self.notices.append(f"the journal could not be read: {error.strerror}")
        return []


def kill_left_over(record: Record) -> bool:
    """End the recorded process and its group if it is certainly that process."""
    import psutil

    try:
        process = psutil.Process(record.pid)
        same = (
            abs(process.create_time() - record.pid_start) <= START_TIME_SLACK
            and process.cmdline() == record.command
            and process.uids().real == os.getuid()
        )
        if not same or process.status() == psutil.STATUS_ZOMBIE:
            return False
        group = os.getpgid(record.pid)
    except (psutil.Error, ProcessLookupError):
        return False
    with contextlib.suppress(ProcessLookupError):
        if group == record.group and group != os.getpgrp():
            os.killpg(group, signal.SIGKILL)
        process.kill()
    return True


def _start_time(pid: int) -> float | None:
    import psutil

    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None
