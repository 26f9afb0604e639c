"""The cache lies beside the user's data, never in them, wherever the command runs."""

from __future__ import annotations

import pytest

from medfed.config.compose import build, described
from medfed.standalone.errors import ConfigError
from tests.datamodules.test_account import folders

ROOTS = {
    "data in data": ("data", None, "data_cache"),
    "data at cache": ("data/cache", None, "data/cache_cache"),
    "data below": ("data/cases", None, "data/cache"),
    "data elsewhere": ("scans", None, "data/cache"),
    "all here": (".", None, "../{}_cache"),
    "chosen beside": ("data", "mine", "mine"),
}


def keys_of(path, more):
    run = ["partition=round_robin", "partition.num_clients=1", f"data.path={path}"]
    return [*run, *more]


@pytest.mark.parametrize("name", ROOTS)
def test_the_cache_lies_beside_the_data(name, tmp_path, monkeypatch):
    place, cache, expected = ROOTS[name]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    data = (tmp_path / "here" / place).resolve()
    _, keys, _ = folders(data)
    more = [*keys, *([f"data.cache={cache}"] if cache else [])]
    before = sorted(data.rglob("*"))
    for _ in range(2):  # the second command finds the data as the first
        module = build(described(keys_of(place, more)).data)
        store = module.build_cache(workers=1)
        assert store.arrays("c3")["label"].any()
    assert sorted(p for p in data.rglob("*") if "mine" not in p.parts) == before
    assert module.caches.resolve() == (tmp_path / "here" / expected.format("here")).resolve()
    assert any(module.caches.iterdir())


def test_a_cache_chosen_in_the_data_is_refused(tmp_path):
    _, keys, _ = folders(tmp_path / "d")
    asked = [*keys, f"data.cache={tmp_path}/d/c0/cache"]
    with pytest.raises(ConfigError, match="lies in the data"):
        _ = build(described(keys_of(tmp_path / "d", asked)).data).caches
