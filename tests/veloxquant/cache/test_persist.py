"""Saved caches of whole models: they go on as if nothing had happened, or say what is wrong."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cache_lab import READY, before_checksums, small_config

from tests.architectures import feed, prompt, tiny, uncompiled
from veloxquant.cache.builder import new_caches, plan_model
from veloxquant.cache.digests import text_checksum
from veloxquant.cache.persist import FORMAT_VERSION, load_caches, save_caches
from veloxquant.cache.probe import ModelPlan
from veloxquant.cache.table import MethodRow, row_of
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import SnapKVOptions
from veloxquant.core.exceptions import CacheStateError
from veloxquant.methods.fp16 import Fp16KVCache

KIVI = KVCacheConfig(method="kivi", residual_length=32)


@pytest.fixture(autouse=True)
def plain_graphs() -> Iterator[None]:
    with uncompiled():
        yield


def go_on(model: Any, caches: list[Any], token: int, count: int) -> list[int]:
    """Greedy tokens after `token`."""
    out = []
    for _ in range(count):
        token = int(mx.argmax(feed(model, [token], caches)[-1]).item())
        out.append(token)
    return out


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [leaf for item in tree for leaf in leaves(item)]
    return [tree]


def ours(caches: list[Any]) -> list[Any]:
    flat = [c for one in caches for c in getattr(one, "caches", [one])]
    return [c for c in flat if hasattr(c, "compact_state")]


def check_round_trip(model: Any, config: KVCacheConfig, file: Path) -> None:
    plan = plan_model(model, config)
    caches = new_caches(plan, config)
    tokens = prompt(75)
    for piece in (tokens[:40], tokens[40:]):
        feed(model, piece, caches)
    first = go_on(model, caches, 9, 3)
    written = save_caches(file, caches, config)
    before = sum(c.nbytes for c in caches)
    assert 0 < written <= before
    assert [p.name for p in file.parent.iterdir()] == [file.name]
    loaded = load_caches(file, plan, config)
    assert sum(c.nbytes for c in loaded) <= before
    assert [type(c) for c in loaded] == [type(c) for c in caches]
    assert [c.offset for c in ours(loaded)] == [78] * plan.compressed
    file.unlink()  # nothing is read from the disk any more
    # Far enough that blocks fill and windows move after the load, too.
    assert go_on(model, loaded, first[-1], 24) == go_on(model, caches, first[-1], 24)
    for mine, other in zip(ours(loaded), ours(caches), strict=True):
        assert mine.offset == other.offset
        assert mine.size() == other.size()


@pytest.mark.parametrize("row", READY, ids=lambda row: row.name)
def test_generation_goes_on_from_a_file(row: MethodRow, tmp_path: Path) -> None:
    check_round_trip(tiny("llama"), small_config(row), tmp_path / "cache.safetensors")


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("gemma3", "kivi"),
        ("qwen3_next", "kivi_sink"),
        ("lfm2", "snapkv"),
        ("falcon_h1", "streaming_llm"),
        ("llama4", "turboquant_rvq"),
        ("gemma2", "kivi"),
        ("deepseek_v32", "kivi"),
        ("mamba2", "kivi"),
    ],
)
def test_the_models_own_caches_are_saved_beside_ours(
    name: str, method: str, tmp_path: Path
) -> None:
    check_round_trip(tiny(name), small_config(row_of(method)), tmp_path / "cache")


def test_sixteen_bit_caches_keep_their_type(tmp_path: Path) -> None:
    check_round_trip(tiny("llama", dtype="bfloat16"), KIVI, tmp_path / "cache")


@pytest.mark.parametrize("row", READY, ids=lambda row: row.name)
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_caches_that_saw_nothing_can_be_saved(name: str, row: MethodRow, tmp_path: Path) -> None:
    model, config = tiny(name), small_config(row)
    plan = plan_model(model, config)
    assert save_caches(tmp_path / "empty", new_caches(plan, config), config) == 0
    loaded = load_caches(tmp_path / "empty", plan, config)
    fresh = new_caches(plan, config)
    tokens = prompt(20)
    assert mx.array_equal(feed(model, tokens, loaded), feed(model, tokens, fresh)).item()


class Saved:
    """A good file and what it needs to be loaded."""

    def __init__(self, folder: Path) -> None:
        self.model = tiny("llama")
        self.plan: ModelPlan = plan_model(self.model, KIVI)
        self.caches = new_caches(self.plan, KIVI)
        feed(self.model, prompt(40), self.caches)
        self.file = folder / "good.safetensors"
        save_caches(self.file, self.caches, KIVI)

    def head(self, **changes: Any) -> Path:
        """The same arrays under another head; None removes an entry."""
        arrays, metadata = mx.load(str(self.file), return_metadata=True)  # type: ignore[misc]
        old = before_checksums(metadata)  # type: ignore[arg-type]
        head = {**json.loads(old["veloxquant_cache"]), **changes}
        head = {k: v for k, v in head.items() if v is not None}
        bad = self.file.with_name("bad.safetensors")
        mx.save_safetensors(str(bad), arrays, {"veloxquant_cache": json.dumps(head)})  # type: ignore[arg-type]
        return bad

    def refused(self, file: Path, config: KVCacheConfig = KIVI) -> str:
        with pytest.raises(CacheStateError) as caught:
            load_caches(file, self.plan, config)
        text = str(caught.value)
        assert file.name in text
        assert "\n" not in text
        return text


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.7, 0.999])
def test_a_file_cut_short_is_refused(saved: Saved, share: float) -> None:
    whole = saved.file.read_bytes()
    saved.file.write_bytes(whole[: int(share * len(whole))])
    assert "damaged or not a saved cache" in saved.refused(saved.file)


@pytest.mark.parametrize("content", [b"hello", b"\0" * 64, b"\xff" * 64, b'{"version": 1}'])
def test_a_file_of_another_kind_is_refused(saved: Saved, content: bytes) -> None:
    saved.file.write_bytes(content)
    assert "damaged or not a saved cache" in saved.refused(saved.file)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"format": "mlx"},
        {"veloxquant_cache": "no json"},
        {"veloxquant_cache": "[]"},
        {"veloxquant_cache": "7"},
        {"veloxquant_cache": "{}"},
    ],
)
def test_safetensors_that_we_did_not_write_are_refused(
    saved: Saved, metadata: dict[str, str]
) -> None:
    mx.save_safetensors(str(saved.file), {"a": mx.zeros(4)}, metadata)
    assert "no cache that save_caches wrote" in saved.refused(saved.file)


def test_another_version_method_or_setting_is_refused(saved: Saved) -> None:
    text = saved.refused(saved.head(version=FORMAT_VERSION + 1))
    assert f"has format {FORMAT_VERSION + 1}; this version reads {FORMAT_VERSION}" in text
    text = saved.refused(saved.file, small_config(row_of("fp16")))
    assert "saved with method 'kivi', asked for 'fp16'" in text
    other = KVCacheConfig(method="kivi", bit_width_inlier=4, residual_length=32)
    text = saved.refused(saved.file, other)
    assert "bit_width_inlier=2, asked for bit_width_inlier=4" in text
    assert "which settings" in saved.refused(saved.head(settings=None))


def test_options_are_settings_however_they_were_given(tmp_path: Path) -> None:
    model = tiny("llama")
    options = SnapKVOptions(snap_budget=48, snap_obs_window=8)
    config = KVCacheConfig(method="snapkv", options=options)
    plan = plan_model(model, config)
    save_caches(tmp_path / "a", new_caches(plan, config), config)
    again = KVCacheConfig(method="snapkv").with_fields(snap_budget=48, snap_obs_window=8)
    load_caches(tmp_path / "a", plan, again)


def test_a_window_of_vecinfer_is_a_setting_even_of_the_documented_length(tmp_path: Path) -> None:
    model = tiny("llama")
    none, asked = KVCacheConfig("vecinfer"), KVCacheConfig("vecinfer", residual_length=128)
    plan = plan_model(model, none)
    save_caches(tmp_path / "a", new_caches(plan, none), none)
    load_caches(tmp_path / "a", plan, none)
    with pytest.raises(CacheStateError, match="residual_length=0, asked for residual_length=128"):
        load_caches(tmp_path / "a", plan, asked)


def broken_trees(tree: list[Any]) -> list[Any]:
    return [
        None,
        7,
        [],
        tree[:1],
        [{"{": {}} for _ in tree],
        [{"{": {"state": None}} for _ in tree],
        [{"{": {"state": [1, 2, 3]}} for _ in tree],
        [{"$": "no such array"} for _ in tree],
        [{"?": 1} for _ in tree],
        [{"{": {"state": {"$": "0.state.5.0.3.packed"}}} for _ in tree],
    ]


def test_a_tree_that_does_not_fit_is_refused(saved: Saved) -> None:
    _, metadata = mx.load(str(saved.file), return_metadata=True)  # type: ignore[misc]
    tree = json.loads(metadata["veloxquant_cache"])["tree"]  # type: ignore[index]
    for bad in broken_trees(tree):
        saved.refused(saved.head(tree=bad))


@pytest.mark.parametrize("method", ["kivi", "fp16"])
def test_a_file_of_another_model_is_refused(method: str, tmp_path: Path) -> None:
    config = small_config(row_of(method))
    model, other = tiny("llama"), tiny("qwen3")
    caches = new_caches(plan_model(model, config), config)
    feed(model, prompt(40), caches)
    save_caches(tmp_path / "a", caches, config)
    with pytest.raises(
        CacheStateError, match=r"does not fit the caches of this model|another model"
    ):
        load_caches(tmp_path / "a", plan_model(other, config), config)
    with pytest.raises(CacheStateError, match="holds 2 layers, this model has 3"):
        load_caches(tmp_path / "a", plan_model(tiny("gemma3"), config), config)


def test_a_file_without_checksums_is_read_as_ever(saved: Saved) -> None:
    other = load_caches(saved.head(), saved.plan, KIVI)
    assert go_on(saved.model, other, 5, 6) == go_on(saved.model, saved.caches, 5, 6)


def test_a_changed_array_is_named(saved: Saved) -> None:
    arrays, metadata = mx.load(str(saved.file), return_metadata=True)  # type: ignore[misc]
    bad = saved.file.with_name("bad.safetensors")
    for path, array in arrays.items():
        words = array.reshape(-1).view(mx.uint8)
        words[words.size // 2] = words[words.size // 2] ^ 1
        flipped = words.view(array.dtype).reshape(array.shape)
        # The second has the same bytes: only its shape is another one.
        for other in (flipped, array[None]):
            mx.save_safetensors(str(bad), {**arrays, path: other}, metadata)  # type: ignore[arg-type]
            assert f"is damaged: array {path!r} is not what was written" in saved.refused(bad)
        rest = {k: a for k, a in arrays.items() if k != path}
        mx.save_safetensors(str(bad), rest, metadata)  # type: ignore[arg-type]
        assert f"is damaged: array {path!r}" in saved.refused(bad)


def test_a_changed_description_is_refused(saved: Saved) -> None:
    arrays, metadata = mx.load(str(saved.file), return_metadata=True)  # type: ignore[misc]
    assert isinstance(metadata, dict)
    text = metadata["veloxquant_cache"]
    head = json.loads(text)
    unlisted = json.dumps({k: v for k, v in head.items() if k != "crc32"})
    bad = saved.file.with_name("bad.safetensors")
    for given in (
        {**metadata, "veloxquant_cache": text.replace("40", "41")},
        {"veloxquant_cache": text},
        {"veloxquant_cache": unlisted, "veloxquant_cache_crc32": text_checksum(unlisted)},
    ):
        mx.save_safetensors(str(bad), arrays, given)  # type: ignore[arg-type]
        assert "is damaged: its description is not what was written" in saved.refused(bad)


def test_no_flipped_bit_of_a_file_is_taken_for_truth(saved: Saved) -> None:
    whole = saved.file.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    held, _ = mx.load(str(saved.file), return_metadata=True)  # type: ignore[misc]
    draw = random.Random(0)
    places = [draw.randrange(start, len(whole)) for _ in range(60)]
    places += [draw.randrange(8, start) for _ in range(60)]
    bad = saved.file.with_name("bad.safetensors")
    refused = 0
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= 1 << draw.randrange(8)
        bad.write_bytes(changed)
        try:
            loaded = load_caches(bad, saved.plan, KIVI)
        except CacheStateError:
            refused += 1
            continue
        # Blanks between the words of the file's index mean nothing.
        again = saved.file.with_name("again.safetensors")
        save_caches(again, loaded, KIVI)
        back, _ = mx.load(str(again), return_metadata=True)  # type: ignore[misc]
        assert all(mx.array_equal(back[k], held[k]).item() for k in held)
    assert refused > 110


def test_a_file_that_is_not_there_is_named(saved: Saved, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no saved cache at"):
        load_caches(tmp_path / "nothing", saved.plan, KIVI)
    with pytest.raises(FileNotFoundError, match="no saved cache at"):
        load_caches(tmp_path, saved.plan, KIVI)


def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = saved.file.read_bytes()
    write = mx.save_safetensors

    def cut_short(file: str, *args: Any) -> None:
        write(file, *args)
        whole = Path(file).read_bytes()
        Path(file).write_bytes(whole[: len(whole) // 2])

    def fail(file: str, *args: Any) -> None:
        write(file, *args)
        raise RuntimeError("no space left on the device")

    for broken, words in ((fail, "no space left"), (cut_short, "only a part")):
        monkeypatch.setattr(mx, "save_safetensors", broken)
        with pytest.raises(OSError, match=words):
            save_caches(saved.file, saved.caches, KIVI)
        assert saved.file.read_bytes() == good
        assert list(saved.file.parent.iterdir()) == [saved.file]


def test_a_folder_that_is_not_there_is_an_os_error(saved: Saved, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot save the cache to"):
        save_caches(tmp_path / "no" / "such", saved.caches, KIVI)


def test_a_cache_with_something_unknown_in_it_is_refused(saved: Saved, tmp_path: Path) -> None:
    class Odd:
        state = (mx.zeros(2), object())

    with pytest.raises(CacheStateError, match=r"cannot save a object at 0\.state\.1"):
        save_caches(tmp_path / "odd", [Odd()], KIVI)
    assert not (tmp_path / "odd").exists()


def test_saving_does_not_disturb_and_can_be_repeated(saved: Saved) -> None:
    other = load_caches(saved.file, saved.plan, KIVI)
    save_caches(saved.file, saved.caches, KIVI)
    save_caches(saved.file, saved.caches, KIVI)
    assert leaves([c.offset for c in other]) == [40, 40]
    assert go_on(saved.model, saved.caches, 5, 6) == go_on(saved.model, other, 5, 6)


@pytest.mark.parametrize("method", ["kivi", "snapkv", "xkv", "fp16"])
def test_files_that_nobody_could_load_are_not_written(tmp_path: Path, method: str) -> None:
    from mlx_lm.models.cache import save_prompt_cache

    model, config = tiny("llama"), small_config(row_of(method))
    plan = plan_model(model, config)
    caches = new_caches(plan, config)
    feed(model, prompt(20), caches)
    path = tmp_path / "prompt.safetensors"
    with pytest.raises(ValueError, match="save_caches"):
        save_prompt_cache(str(path), caches)
    assert not path.exists()
    with pytest.raises(CacheStateError, match="load_caches"):
        type(caches[0]).from_state(caches[0].state)
    twins = new_caches(plan, config)
    for twin, cache in zip(twins, caches, strict=True):
        twin.state = cache.state
    assert [twin.offset for twin in twins] == [20] * len(caches)
    assert mx.array_equal(feed(model, [5], twins), feed(model, [5], caches)).item()


@pytest.mark.parametrize("method", ["kivi", "fp16"])
def test_a_batch_is_saved_row_by_row(tmp_path: Path, method: str) -> None:
    from mlx_lm.models.cache import save_prompt_cache

    model, config = tiny("llama"), small_config(row_of(method))
    plan = plan_model(model, config)
    rows = [new_caches(plan, config) for _ in range(2)]
    for i, caches in enumerate(rows):
        feed(model, prompt(20 + i), caches)
    batch: list[Any] = [type(pair[0]).merge(pair) for pair in zip(*rows, strict=True)]
    path = tmp_path / "prompt.safetensors"
    with pytest.raises(ValueError, match="save_caches"):
        save_prompt_cache(str(path), batch)
    with pytest.raises(CacheStateError, match="row by row"):
        save_caches(path, batch, config)
    assert not path.exists()
    save_caches(path, [cache.extract(1) for cache in batch], config)
    assert leaves([cache.offset for cache in load_caches(path, plan, config)]) == [21, 21]
    twins: list[Any] = [
        type(pair[0]).merge(pair)
        for pair in zip(*(new_caches(plan, config) for _ in rows), strict=True)
    ]
    for twin, cache in zip(twins, batch, strict=True):
        twin.state = cache.state
    assert twins[0].offset.tolist() == [20, 21]


def test_fp16_takes_pairs_and_no_other_state() -> None:
    pair = (mx.ones((1, 2, 3, 4)), mx.zeros((1, 2, 3, 4)))
    cache = Fp16KVCache()
    cache.state = pair
    assert (cache.offset, len(cache.state), len(cache.compact_state())) == (3, 3, 2)
    with pytest.raises(CacheStateError, match="format 2"):
        cache.state = (*pair, 2)
    assert all(mx.array_equal(a, b) for a, b in zip(cache.compact_state(), pair, strict=True))
    cache.state = Fp16KVCache().state
    assert cache.empty()
