"""Departures from the documents are told whole, and no setting is idle without being told of."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import veloxquant
from veloxquant.cache.builder import KVCacheFactory
from veloxquant.config import options
from veloxquant.config.kv_cache import FIELD_OWNER, KVCacheConfig
from veloxquant.core.exceptions import QuantizerConfigError

TABLE: list[dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "departures.toml").read_text(encoding="utf-8")
)["departure"]
IDLE = {name for entry in TABLE for name in entry.get("idle", ())}
REFUSED = {"amc_calib_variance": 1.0, "amc_gamma": 0.5, "amc_threshold_window": 32}
"""Settings that only a part reads that is not served: any value but the default is refused."""
OTHERS = {
    "h2o_rope_base": 500.0, "keyformer_rope_base": 500.0, "pyramid_backend": "auto",
    "snap_backend": "reference", "snap_batched_scoring": False, "tova_backend": "reference",
}  # fmt: skip


def test_every_departure_says_what_and_why() -> None:
    for entry in TABLE:
        assert all(entry.get(key, "").strip() for key in ("name", "documented", "ours", "why"))
    names = [entry["name"] for entry in TABLE]
    assert len(names) == len(set(names))


def test_settings_that_nothing_reads_are_told_of() -> None:
    library = Path(veloxquant.__file__).parent
    files = [f for f in library.rglob("*.py") if f.relative_to(library).parts[0] != "config"]
    words = {w for f in files for w in re.findall(r"\w+", f.read_text(encoding="utf-8"))}
    assert set(FIELD_OWNER) - words - set(REFUSED) == IDLE


def config_with(field: str, value: Any) -> KVCacheConfig:
    owner = getattr(options, FIELD_OWNER[field])
    method = {"SnapKVOptions": "snapkv", "PyramidKVOptions": "pyramidkv"}.get(
        FIELD_OWNER[field], field.split("_")[0]
    )
    return KVCacheConfig(method=method, head_dim=64, options=owner(**{field: value}))


@pytest.mark.parametrize("field", sorted(IDLE))
def test_what_is_called_accepted_and_checked_is(field: str) -> None:
    KVCacheFactory.create(config_with(field, OTHERS[field]))
    with pytest.raises(QuantizerConfigError, match=f"{field}='blue' is not possible"):
        KVCacheFactory.create(config_with(field, "blue"))


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_other_settings_that_nothing_reads_are_refused(field: str) -> None:
    with pytest.raises(QuantizerConfigError, match=f"{field}=.* is not possible"):
        KVCacheFactory.create(config_with(field, REFUSED[field]))
