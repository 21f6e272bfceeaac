"""The listening socket: bound by the supervisor before the model loads, kept over restarts."""

import contextlib
import errno
import ipaddress
import socket
import sys

from veloxquant.supervisor.failures import fault
from veloxquant.supervisor.messages import Fault

BACKLOG = 128
SEARCH = 100


class PortError(RuntimeError):
    """Raised when the port cannot be had; `fault` says why and what to do."""

    def __init__(self, why: Fault) -> None:
        super().__init__(why.detail)
        self.fault = why


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    It listens at once: on Linux two sockets that only bind could share the port. Requests that
    come while the model loads wait in the backlog.

    Raises:
        PortError: with `port_taken` or `usage`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "darwin" and _answers(host, port):
            # There a specific address may be bound over someone's wildcard.
            raise OSError(errno.EADDRINUSE, "address in use")
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise PortError(_why(host, port, error)) from error
    return sock


def next_free(host: str, port: int) -> int | None:
    """The first port after `port` that can be bound right now."""
    for candidate in range(port + 1, min(port + 1 + SEARCH, 65_536)):
        with contextlib.suppress(PortError):
            bind_probe(host, candidate)
            return candidate
    return None


def bind_probe(host: str, port: int) -> None:
    """Bind and let go at once; raises as `bind`, without looking for the owner."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(1)
        except OSError as error:
            raise PortError(fault("port_taken", str(error))) from error


def owner_of(port: int) -> str | None:
    """Name and process id of who listens on `port`, as far as the system tells us."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for found in psutil.net_connections(kind="tcp"):
            if found.status != psutil.CONN_LISTEN or not found.laddr or not found.pid:
                continue
            if found.laddr.port == port:
                return f"{psutil.Process(found.pid).name()} (pid {found.pid})"
    return None


def _why(host: str, port: int, error: OSError) -> Fault:
    if error.errno == errno.EADDRINUSE:
        owner = owner_of(port)
        why = fault("port_taken", f"{host}:{port} is used by {owner or 'another program'}")
        if free := next_free(host, port):
            why.hint = f"Choose another port (the next free one is {free}), or stop that program."
        return why
    if error.errno == errno.EACCES:
        return fault("usage", f"port {port} needs more rights; choose one above 1023")
    return fault("usage", f"cannot listen on {host}:{port}: {error.strerror or error}")


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), 0.2):
        return True
    return False
