"""Errors and link changes of the supervisor's client, translated for the panel."""

import pytest

from veloxquant.panel.control import SupervisorControl
from veloxquant.panel.ports import CommandFailed
from veloxquant.panel.state import LinkNews
from veloxquant.supervisor.client import CommandError, LinkChange, NotConnectedError


class Client:
    def __init__(self, *items, error=None):
        self.items, self.error, self.connects = items, error, 0

    async def connect(self):
        self.connects += 1
        if self.error:
            raise self.error

    async def command(self, op, args):
        if self.error:
            raise self.error
        return {"op": op, "args": args}

    async def events(self):
        for item in self.items:
            yield item


def control_of(*items, error=None):
    control = SupervisorControl()
    control._client = Client(*items, error=error)
    return control


@pytest.mark.parametrize(
    ("error", "code"),
    [(CommandError("usage", "no", "do"), "usage"), (NotConnectedError("down"), "not_connected")],
)
async def test_errors_are_translated(error, code):
    for call in (control_of(error=error).connect(), control_of(error=error).command("stop", {})):
        with pytest.raises(CommandFailed) as raised:
            await call
        assert raised.value.code == code
        assert raised.value.hint


async def test_commands_pass_through():
    assert await control_of().command("stop", {"grace": 1}) == {"op": "stop", "args": {"grace": 1}}


async def test_a_supervisor_that_stays_away_is_started_again():
    changes = [LinkChange(False, "gone", attempt=n) for n in range(5)]
    control = control_of(*changes, LinkChange(True))
    seen = [item async for item in control.events()]
    assert seen[0] == LinkNews(False, "gone")
    assert seen[-1] == LinkNews(True, "")
    assert control._client.connects == 2, "from the third failed try on"
