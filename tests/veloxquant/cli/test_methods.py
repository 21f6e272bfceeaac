import json
from collections.abc import Callable

from veloxquant.cache.table import TABLE
from veloxquant.config.kv_cache import EVICTION_STORAGE, METHOD_NAMES

Run = Callable[..., tuple[int, str, str]]
KEYS = {
    "name", "family", "serve_tier", "serve_tier_label", "maturity", "is_servable", "blurb",
    "config_fields", "field_schema", "coverage", "coverage_label", "paper_deviation", "is_adapted",
    "unsupported_reason", "docs_url", "capabilities",
}  # fmt: skip


def payload(run: Run, *words: str) -> dict:
    code, out, _ = run("methods", "--json", *words)
    assert code == 0
    return json.loads(out)


def test_json_has_the_documented_shape(run: Run) -> None:
    data = payload(run)
    assert (data["schema_version"], data["default_serve_method"]) == (1, "turboquant_rvq")
    assert {m["name"] for m in data["methods"]} == {*METHOD_NAMES, "fp16"}
    for method in data["methods"]:
        assert set(method) >= KEYS
        assert [f["name"] for f in method["field_schema"]] == method["config_fields"]
        for field in method["field_schema"]:
            assert set(field) == {"name", "type", "default", "optional", "help"}


def test_methods_with_kept_rows_say_which_forms_these_can_have(run: Run) -> None:
    forms = {m["name"]: m["capabilities"]["kept_row_forms"] for m in payload(run)["methods"]}
    assert forms["cam"] == list(EVICTION_STORAGE)
    assert forms["kivi"] == []
    _, out, _ = run("methods")
    footer = " ".join(out.splitlines()[-5:])
    assert all(name in footer for name, found in forms.items() if found)
    assert "kivi" not in footer


def test_filters(run: Run) -> None:
    ready = {name for name, row in TABLE.items() if row.is_ready}
    assert {m["name"] for m in payload(run, "--servable-only")["methods"]} == ready
    families = {m["family"] for m in payload(run, "--family", "eviction")["methods"]}
    assert families == {"eviction"}


def test_table_for_people(run: Run) -> None:
    code, out, _ = run("methods", "ls")
    assert code == 0
    assert "turboquant_rvq *" in out
    assert len(out.splitlines()) == len(TABLE) + 6


def test_the_star_is_explained_and_marks_what_up_would_take(run: Run) -> None:
    def starred() -> tuple[list[str], list[str]]:
        lines = run("methods")[1].splitlines()
        legends = [line for line in lines if line.startswith("* ")]
        return [line.split()[0] for line in lines if " * " in line], legends

    assert starred()[0] == ["turboquant_rvq"]
    assert "default of `vq up`" in starred()[1][0]
    assert run("config", "set", "server.method", "kivi")[0] == 0
    assert starred()[0] == ["kivi"]
    assert run("config", "set", "server.method", "auto")[0] == 0
    assert starred() == ([], [])
