"""Keys that come while a screen is still being made."""

import asyncio

import panel_fakes as fakes
import pytest
from textual import events
from textual.widgets import Input

from veloxquant.panel.app import PanelApp


@pytest.mark.parametrize("seconds", [0.0, 0.02])
async def test_a_second_area_key_is_not_text_of_the_first_one(seconds: float) -> None:
    control = fakes.FakeControl()
    app = PanelApp(lambda: control, fakes.FakeLibrary)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("2")
        await pilot.pause(0.2)
        app.post_message(events.Key("5", "5"))
        await asyncio.sleep(seconds)
        app.post_message(events.Key("6", "6"))
        for _ in range(50):
            await pilot.pause(0.05)
            if type(app.screen).__name__ == "ProfileScreen":
                break
        assert type(app.screen).__name__ == "ProfileScreen"
        await pilot.press("5")
        await pilot.pause()
        assert [field.value for field in app.screen.query(Input)] == [""]
