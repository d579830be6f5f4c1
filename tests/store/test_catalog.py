"""The catalog holds JSON and nothing else."""

from __future__ import annotations

import pickle
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diskcache
import pytest

from store import Catalog

KEY = "passages\x1fplanted"


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    catalog = Catalog(tmp_path / "catalog")
    yield catalog
    catalog.close()


@pytest.mark.parametrize("in_file", [False, True])
def test_a_planted_pickle_is_never_opened(catalog: Catalog, tmp_path: Path, in_file: bool) -> None:
    table, sprung = catalog.table("passages"), tmp_path / "sprung"
    table.set("honest", 1)
    pickled: bytes | None = pickle.dumps(Trap(sprung))
    filename = None
    if in_file:
        filename = "planted.val"
        (catalog.folder / filename).write_bytes(pickled or b"")
        pickled = None
    columns = "key, raw, store_time, access_time, size, mode, filename, value"
    with sqlite3.connect(catalog.folder / "cache.db") as database:
        database.execute(
            f"INSERT INTO Cache({columns}) VALUES (?, 1, 0, 0, 0, 4, ?, ?)",
            (KEY, filename, pickled),
        )
    database.close()
    assert table.get("planted") is None
    assert "planted" not in table
    assert dict(table.items()) == {"honest": 1}
    assert catalog.foreign_rows() == 1
    assert not sprung.exists()
    with diskcache.Cache(str(catalog.folder)) as plain:  # which does spring the trap
        plain.get(KEY)
    assert sprung.exists()


@pytest.mark.parametrize("value", [None, 0, 1.5, "é\x1f", [1, [2]], {"a": {"b": [True]}}])
def test_json_comes_back_also_after_reopening(catalog: Catalog, value: Any) -> None:
    catalog.table("t").set("k", value)
    assert catalog.table("t").get("k") == value
    catalog.close()
    assert Catalog(catalog.folder).table("t").get("k") == value


def test_what_is_not_json_is_refused(catalog: Catalog) -> None:
    table = catalog.table("t")
    table.set("k", 1)
    with pytest.raises(TypeError):
        table.set("k", {1, 2})
    assert table.get("k") == 1


def test_tables_do_not_mix(catalog: Catalog) -> None:
    names = ("a", "ab", "b")
    for name in names:
        for key in ("b", "k"):
            catalog.table(name).set(key, name + key)
    catalog.table("ab").delete("k")
    found = {name: dict(catalog.table(name).items()) for name in names}
    assert found == {"a": {"b": "ab", "k": "ak"}, "ab": {"b": "abb"}, "b": {"b": "bb", "k": "bk"}}
    assert [len(catalog.table(name)) for name in (*names, "none")] == [2, 1, 2, 0]


def test_delete_says_whether_it_was_there(catalog: Catalog) -> None:
    catalog.table("t").set("k", 1)
    assert catalog.table("t").delete("k")
    assert not catalog.table("t").delete("k")


def test_a_transaction_is_all_or_nothing(catalog: Catalog) -> None:
    table = catalog.table("t")
    table.set("old", 1)
    with pytest.raises(ZeroDivisionError), catalog.transaction():
        table.set("new", 1)
        table.set("old", 2)
        _ = 1 / 0
    assert dict(table.items()) == {"old": 1}
    with catalog.transaction():
        table.set("new", 1)
        table.delete("old")
    assert dict(table.items()) == {"new": 1}


@pytest.mark.parametrize("damage", ["garbage", "truncated", "zeroed"])
def test_a_corrupt_database_is_set_aside(catalog: Catalog, damage: str) -> None:
    for n in range(200):
        catalog.table("t").set(f"k{n}", "x" * 200)
    catalog.close()
    file = catalog.folder / "cache.db"
    data = file.read_bytes()
    half = len(data) // 2
    damaged = {
        "garbage": b"?" * half,
        "truncated": data[:half],
        "zeroed": data[:half] + bytes(half),
    }
    file.write_bytes(damaged[damage])
    again = Catalog(catalog.folder)
    assert again.rebuilt
    (aside,) = catalog.folder.parent.glob("catalog.broken-*/cache.db")
    assert aside.stat().st_size >= len(damaged[damage])
    assert len(again.table("t")) == 0
    again.table("t").set("k", 1)
    again.close()
    assert not Catalog(catalog.folder).rebuilt
