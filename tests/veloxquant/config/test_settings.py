from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.config.settings import (
    SETTINGS,
    SettingError,
    load_settings,
    parse,
    save_setting,
    setting,
)

FILE = """# my settings
[server]   # keep this
port = 8100
foo = 1  # mine

[other]
x = "y"
"""


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VELOXQUANT_HOME", str(tmp_path))
    for entry in SETTINGS.values():
        monkeypatch.delenv(entry.variable, raising=False)
    return tmp_path


@pytest.fixture
def file(own_home: Path) -> Path:
    path = own_home / "config" / "config.toml"
    path.parent.mkdir()
    path.write_text(FILE)
    return path


def test_without_a_file_everything_is_default() -> None:
    settings = load_settings()
    assert {settings.origin(key) for key in SETTINGS} == {"default"}
    assert settings.notices == ()


def test_every_default_is_legal() -> None:
    for key, entry in SETTINGS.items():
        if entry.default is not None:
            save_setting(key, entry.default)
    assert {load_settings().origin(k) for k, e in SETTINGS.items() if e.default is not None} == {
        "config file"
    }


def test_flag_beats_environment_beats_file_beats_default(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def port(flags: dict | None = None) -> tuple:
        settings = load_settings(flags)
        return settings.value("server.port"), settings.origin("server.port")

    assert port() == (8100, "config file")
    monkeypatch.setenv("VELOXQUANT_SERVER_PORT", "8200")
    assert port() == (8200, "environment")
    assert port({"server.port": None}) == (8200, "environment")
    assert port({"server.port": 8300}) == (8300, "flag")


def test_saving_keeps_comments_unknown_keys_and_order(file: Path) -> None:
    save_setting("server.port", 9000)
    save_setting("models.folders", ["/a", "/b"])
    text = file.read_text()
    assert text.startswith(FILE.replace("8100", "9000").rstrip("\n"))
    settings = load_settings()
    assert settings.value("server.port") == 9000
    assert settings.value("models.folders") == ["/a", "/b"]
    assert settings.unknown == ("server.foo", "other.x")
    assert "config.toml: there is no setting 'server.foo'; known:" in settings.notices[0]
    assert settings.notices[0].endswith("; ignored")


def test_saving_none_goes_back_to_the_default(file: Path) -> None:
    save_setting("server.port", None)
    assert "port" not in file.read_text()
    assert "foo = 1  # mine" in file.read_text()
    assert load_settings().value("server.port") == 8000


def test_a_linked_file_stays_a_link(file: Path, tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.toml"
    file.rename(real)
    file.symlink_to(real)
    save_setting("server.port", 9001)
    assert file.is_symlink()
    assert "9001" in real.read_text()


@pytest.mark.parametrize("raw", [b"port = [", b"\xff\xfe", b"[a]\n[a]\n", b"x = " + b"[" * 50_000])
def test_an_unreadable_file_is_set_aside_once(file: Path, raw: bytes) -> None:
    file.write_bytes(raw)
    settings = load_settings()
    assert settings.value("server.port") == 8000
    assert "config.toml.corrupt-1" in settings.notices[0]
    assert (file.parent / "config.toml.corrupt-1").read_bytes() == raw
    assert load_settings().notices == ()
    file.write_bytes(raw)
    load_settings()
    assert (file.parent / "config.toml.corrupt-2").exists()


def test_saving_over_an_unreadable_file_keeps_it_aside(file: Path) -> None:
    file.write_text("not toml at all")
    save_setting("server.port", 9000)
    assert (file.parent / "config.toml.corrupt-1").read_text() == "not toml at all"
    assert load_settings().value("server.port") == 9000


@given(st.binary(max_size=120))
def test_any_bytes_load(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "config.toml"
    path.write_bytes(raw)
    assert set(load_settings(path=path).values) == set(SETTINGS)


def test_a_bad_value_is_named_and_the_default_used(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text('[server]\nport = "eighty"\nbatch = 0\n[memory]\nguard = "maybe"\n')
    monkeypatch.setenv("VELOXQUANT_LOOK_ASCII", "perhaps")
    settings = load_settings()
    assert [settings.value(k) for k in ("server.port", "server.batch", "memory.guard")] == [
        8000, 8, "ask",
    ]  # fmt: skip
    notices = "\n".join(settings.notices)
    assert "server.port='eighty'" in notices
    assert "at least 1 and at most 256" in notices
    assert "one of ask, refuse, off" in notices
    assert "VELOXQUANT_LOOK_ASCII" in notices


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("server.port", "8_100", 8100),
        ("server.api_key", "Yes", True),
        ("server.api_key", "0", False),
        ("memory.keep_free", "", None),
        ("models.folders", "/a, /b,", ["/a", "/b"]),
        ("memory.guard", "off", "off"),
    ],
)
def test_parse(key: str, text: str, value: object) -> None:
    assert parse(setting(key), text) == value


@pytest.mark.parametrize(
    ("key", "text"),
    [("server.port", "70000"), ("server.port", ""), ("server.api_key", "2"),
     ("memory.guard", "no"), ("memory.keep_free", "-1")],
)  # fmt: skip
def test_parse_refuses(key: str, text: str) -> None:
    with pytest.raises(SettingError, match=key):
        parse(setting(key), text)


def test_unknown_setting_names_the_near_ones() -> None:
    with pytest.raises(SettingError, match=r"server\.port"):
        setting("server.prot")
    with pytest.raises(SettingError):
        save_setting("no.such", 1)
    with pytest.raises(SettingError):
        save_setting("server.port", True)


@pytest.mark.parametrize(("text", "value"), [("0", 0.0), ("0.7", 0.7), ("2", 2.0)])
def test_a_number_may_be_written_with_or_without_a_point(text: str, value: float) -> None:
    found = parse(setting("chat.temperature"), text)
    assert (found, type(found)) == (value, float)
    save_setting("chat.temperature", int(value))
    assert load_settings().value("chat.temperature") == int(value)


@pytest.mark.parametrize("text", ["2.1", "-0.1", "nan", "inf", "warm", "true"])
def test_a_number_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="a number at least 0 and at most 2"):
        parse(setting("chat.temperature"), text)


@pytest.mark.parametrize(
    ("key", "text", "told"),
    [
        ("server.method", "snapkv2", "one of 45 names, such as snapkv"),
        ("server.method", "zz", "one of auto, fp16, turboquant_prod, "),
        ("look.theme", "nordic", "such as nord"),
        ("server.context", "1" + "0" * 30, "at most 1099511627775"),
        ("server.max_tokens", "1" + "0" * 30, "at most 1099511627775"),
        ("memory.keep_free", "9" * 30, "at most 1152921504606846975"),
        ("chat.temperature", "nan", "at least 0 and at most 2"),
    ],
)
def test_a_value_out_of_a_closed_set_is_refused_and_the_file_kept(
    key: str, text: str, told: str, file: Path
) -> None:
    with pytest.raises(SettingError, match=rf"{key}=.* it must be .*{told}"):
        parse(setting(key), text)
    with pytest.raises(SettingError):
        save_setting(key, "x" if SETTINGS[key].kind is str else -1)
    assert file.read_text() == FILE


def test_a_file_with_a_method_that_is_none_falls_back(file: Path) -> None:
    file.write_text('[server]\nmethod = "snapkv2"\n')
    settings = load_settings()
    assert settings.value("server.method") == SETTINGS["server.method"].default
    assert "such as snapkv" in settings.notices[0]


def test_every_method_that_can_be_started_can_be_the_usual_one() -> None:
    from veloxquant.cache.table import TABLE

    assert set(SETTINGS["server.method"].choices) == {"auto", *TABLE}
