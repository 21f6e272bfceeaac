"""Frames of the worker link: four bytes of length, big-endian, then one JSON frame.

The length is checked before anything is allocated. `FrameDecoder` is pure; the two readers are
thin. The worker uses this module too, so it imports nothing but the messages.
"""

import asyncio
import socket
import struct
from collections.abc import Sequence
from typing import Any

from veloxquant.supervisor.messages import (
    MAX_MESSAGE_BYTES,
    Message,
    ProtocolError,
    decode,
    encode,
)

HEADER = struct.Struct(">I")


class TruncatedError(ProtocolError):
    """Raised when a stream ends inside a frame, as it does when the sender is killed."""


def pack(message: Message | Sequence[Message]) -> bytes:
    """One message, or a batch, as a frame.

    Raises:
        ProtocolError: when it is larger than a frame may be.
    """
    body = encode(message if isinstance(message, Message) else list(message))
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"frame of {len(body)} bytes, limit {MAX_MESSAGE_BYTES}")
    return HEADER.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """Length that a header announces.

    Raises:
        ProtocolError: when it is nothing or more than a frame may be.
    """
    (length,) = HEADER.unpack(header)
    if not 0 < length <= MAX_MESSAGE_BYTES:
        raise ProtocolError(f"frame of {length} bytes announced, limit {MAX_MESSAGE_BYTES}")
    return length


class FrameDecoder:
    """Turns bytes, cut anywhere, into messages; holds at most one unfinished frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Messages that became complete with `data`.

        Raises:
            ProtocolError: for a bad length or body; the link is of no use afterwards.
        """
        self._buffer += data
        out: list[Any] = []
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            length = body_length(bytes(self._buffer[start : start + HEADER.size]))
            end = start + HEADER.size + length
            if len(self._buffer) < end:
                break
            out += decode(bytes(self._buffer[start + HEADER.size : end]))
            start = end
        del self._buffer[:start]
        return out

    @property
    def pending_bytes(self) -> int:
        """Bytes of the unfinished frame."""
        return len(self._buffer)


async def read_frame(reader: asyncio.StreamReader) -> list[Any]:
    """Messages of the next frame; an empty list at the end of the stream.

    Raises:
        ProtocolError: for a bad frame, or a stream that ends inside one.
    """
    try:
        header = await reader.readexactly(HEADER.size)
    except asyncio.IncompleteReadError as end:
        if end.partial:
            raise TruncatedError("the stream ended inside a frame") from end
        return []
    try:
        return decode(await reader.readexactly(body_length(header)))
    except asyncio.IncompleteReadError as end:
        raise TruncatedError("the stream ended inside a frame") from end


def recv_frame(sock: socket.socket) -> list[Any]:
    """Messages of the next frame of a blocking socket; an empty list at its end.

    Raises:
        ProtocolError: as `read_frame`.
        OSError: from the socket, time-outs included.
    """
    header = _recv_exactly(sock, HEADER.size, at_start=True)
    return decode(_recv_exactly(sock, body_length(header))) if header else []


def send_frame(sock: socket.socket, message: Message | Sequence[Message]) -> None:
    """Send one frame over a blocking socket."""
    sock.sendall(pack(message))


def _recv_exactly(sock: socket.socket, count: int, *, at_start: bool = False) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            if at_start and not data:
                return b""
            raise TruncatedError("the stream ended inside a frame")
        data += part
    return bytes(data)
