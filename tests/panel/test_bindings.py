"""The key table: ids once, keys once an area, every action exists and is in the palette."""

import importlib
from collections import Counter

import pytest

from veloxquant.panel import bindings
from veloxquant.panel.app import PanelApp
from veloxquant.panel.commands import entries

SCREENS = {
    "first": ("first_look", "FirstLook"),
    "models": ("models", "ModelsScreen"),
    "fit": ("fit", "FitScreen"),
    "run": ("run", "RunScreen"),
    "chat": ("chat", "ChatScreen"),
    "logs": ("logs", "LogsScreen"),
    "profile": ("profile", "ProfileScreen"),
    "settings": ("settings", "SettingsScreen"),
}


def owner_of(area):
    if area == "app":
        return PanelApp
    module, name = SCREENS[area]
    return getattr(importlib.import_module(f"veloxquant.panel.screens.{module}"), name)


def test_ids_are_unique_and_well_formed():
    ids = [key.id for key in bindings.KEYS]
    assert len(ids) == len(set(ids))
    assert all(area in {*SCREENS, "app"} for area in (key.area for key in bindings.KEYS))


@pytest.mark.parametrize("area", SCREENS)
def test_a_key_means_one_thing_in_an_area(area):
    keys = Counter(
        part for key in bindings.KEYS if key.area in (area, "app") for part in key.keys.split(",")
    )
    assert [key for key, count in keys.items() if count > 1] == []


@pytest.mark.parametrize("key", bindings.KEYS, ids=lambda key: key.id)
def test_every_action_exists_and_is_in_the_palette(key):
    verb = key.id.split(".", 1)[1]
    owner = owner_of(key.area)
    if not verb.startswith("go_"):
        assert callable(getattr(owner, f"action_{verb}"))
    assert any(found.id == key.id for _, found in entries())
    assert key.help


def test_no_key_of_terminal_multiplexers_or_flow_control():
    taken = {"ctrl+a", "ctrl+b", "ctrl+s"}
    assert not any(taken & set(key.keys.split(",")) for key in bindings.KEYS)


def test_areas_have_their_digits_and_screens():
    assert [digit for _, digit, _ in bindings.AREAS] == list("1234567")
    assert {name for name, _, _ in bindings.AREAS} | {"first"} == set(PanelApp.MODES)


@pytest.mark.parametrize(
    ("keys", "shown"), [("ctrl+q", "^q"), ("slash", "/"), ("plus,equals_sign", "+"), ("G,f", "G")]
)
def test_names_of_keys(keys, shown):
    assert bindings.name_of(keys) == shown
