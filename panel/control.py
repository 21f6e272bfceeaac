"""The supervisor's client as the panel's `Control`; imported in a thread after the first paint."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp  # noqa: F401 - the client imports it when it connects, which would block drawing

from veloxquant.panel.ports import CommandFailed
from veloxquant.panel.state import LinkNews
from veloxquant.supervisor.client import (
    CommandError,
    ControlClient,
    LinkChange,
    NotConnectedError,
)

# tries after which a supervisor that has gone is started again
REVIVE_AFTER = 3
_LOST = "Run `vq doctor`; `vq panel` finds the server again."


class SupervisorControl:
    """Translates errors and link changes; holds nothing of its own."""

    def __init__(self) -> None:
        self._client = ControlClient(role="panel", name="vq panel")

    async def connect(self) -> None:
        """Find or start the supervisor.

        Raises:
            CommandFailed: when that is impossible, with the reason.
        """
        try:
            await self._client.connect()
        except CommandError as error:
            raise CommandFailed(error.code, error.message, error.hint) from error
        except (NotConnectedError, OSError) as error:
            raise CommandFailed("not_connected", str(error), _LOST) from error

    async def events(self) -> AsyncIterator[Any]:
        """`Snapshot`, `Event` and `LinkNews`, over reconnects; a dead supervisor is revived."""
        async for item in self._client.events():
            if not isinstance(item, LinkChange):
                yield item
                continue
            yield LinkNews(item.up, item.reason)
            if not item.up and item.attempt >= REVIVE_AFTER:
                try:
                    await self.connect()
                except CommandFailed as problem:
                    yield LinkNews(False, problem.message)

    async def command(self, op: Any, args: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send one command and wait for its end.

        Raises:
            CommandFailed: when it is refused or the link is down.
        """
        try:
            return await self._client.command(op, args)
        except CommandError as error:
            raise CommandFailed(error.code, error.message, error.hint) from error
        except NotConnectedError as error:
            text = f"The supervisor cannot be reached: {error}."
            raise CommandFailed("not_connected", text, "It is tried again by itself.") from error

    async def close(self) -> None:
        """Let go of the connection."""
        await self._client.close()
