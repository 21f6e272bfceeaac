"""Keys that reach the palette before its list is filled do nothing."""

import pytest

from veloxquant.panel.palette import Palette


@pytest.mark.parametrize("key", ["pagedown", "pageup", "home", "end"])
async def test_page_keys_on_an_empty_palette_do_nothing(key, make_app, until):
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.screen is not None, "a screen")
        app.action_command_palette()
        await until(pilot, lambda: isinstance(app.screen, Palette), "the palette")
        await pilot.press(key)
        await pilot.press("z", "z", "z", key)
        await pilot.resize_terminal(80, 3)
        await pilot.press(key)
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, Palette), "the palette gone")
