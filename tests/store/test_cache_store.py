"""A cache comes back as it was put or not at all, whatever happens to disk and process."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from store import CacheMiss, CacheStore, StoreFull, StoreVersionError, ValueTooLarge, cache_key

ROOT = Path(__file__).parents[2]
TOKENS = 8
SIZE = 5000  # a little more than the file of one cache


def identity(n: int) -> dict[str, Any]:
    return {"model": "tiny", "passage": n, "ids": [1, 2, n]}


def tensors(n: int, tokens: int = TOKENS) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(n)
    return {name: torch.randn(2, 2, tokens, 16, generator=numbers) for name in ("keys", "values")}


def put(store: CacheStore, *numbers: int) -> list[Path]:
    keys = [store.put(identity(n), tensors(n), tokens=TOKENS) for n in numbers]
    return [store.folder / "kv" / key[:2] / f"{key}.safetensors" for key in keys]


def holds(store: CacheStore, n: int) -> bool:
    got = store.get(identity(n)).tensors
    return all(torch.equal(got[name], tensor) for name, tensor in tensors(n).items())


def reopened(store: CacheStore, **options: Any) -> CacheStore:
    store.close()
    return CacheStore(store.folder, codec="fp32", **options)


def temporary(store: CacheStore) -> list[Path]:
    return list((store.folder / "kv").rglob(".tmp*"))


def snapshot(folder: Path) -> dict[Path, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def child(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CacheStore]:
    store = CacheStore(tmp_path / "store", codec="fp32")
    yield store
    store.close()


# -- put and get ---------------------------------------------------------------------------


def test_what_was_put_is_what_one_gets(store: CacheStore) -> None:
    (path,) = put(store, 1)
    hit = store.get(identity(1))
    assert holds(store, 1)
    assert hit.tokens == TOKENS
    assert (hit.key, hit.bytes) == (path.stem, path.stat().st_size)
    assert store.get(identity(1), dtype=torch.float16).tensors["keys"].dtype == torch.float16


def test_what_was_not_put_is_a_miss(store: CacheStore) -> None:
    put(store, 1)
    assert not store.has(identity(2))
    with pytest.raises(CacheMiss, match="not stored"):
        store.get(identity(2))


def test_another_codec_is_another_cache(store: CacheStore) -> None:
    put(store, 1)
    store.close()
    with pytest.raises(CacheMiss, match="not stored"):
        CacheStore(store.folder, codec="int8").get(identity(1))


def test_keys_do_not_depend_on_the_process() -> None:
    script = (
        "from store import cache_key\n"
        "names = {'model', 'passage', 'ids', 'dtype', 'prefix'}\n"
        "print(cache_key({name: [len(name), 'é'] for name in names}), list(names))"
    )
    outputs = [child(script, PYTHONHASHSEED=seed).stdout.split(" ", 1) for seed in ("1", "2")]
    (key, order), (other_key, other_order) = outputs
    assert order != other_order  # the seeds made a difference
    assert key == other_key
    names = ("ids", "dtype", "prefix", "model", "passage")
    assert key == cache_key({name: [len(name), "é"] for name in names})


def test_returned_tensors_are_private(store: CacheStore) -> None:
    put(store, 1)
    for tensor in store.get(identity(1)).tensors.values():
        tensor.zero_()
    assert holds(store, 1)
    assert store.verify() == []


# -- crashes and damage --------------------------------------------------------------------


def test_killed_before_the_rename_the_old_entry_stays(store: CacheStore) -> None:
    put(store, 1)
    script = (
        "import os, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from store import CacheStore\n"
        "store = CacheStore(Path(sys.argv[1]), codec='fp32')\n"
        "Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"store.put({identity(1)!r}, {{'keys': torch.zeros(1, 1, 1, 4)}}, tokens=1)\n"
    )
    assert child(script, str(store.folder)).returncode == -signal.SIGKILL
    assert len(temporary(store)) == 1
    assert holds(store, 1)
    again = reopened(store)
    assert not temporary(again)
    assert holds(again, 1)


def test_the_temporary_file_of_a_living_writer_stays(store: CacheStore) -> None:
    (path,) = put(store, 1)
    living = path.with_name(f".tmp-{os.getpid()}-abc")
    living.touch()
    assert temporary(reopened(store)) == [living]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, 1000),
    "empty": lambda path: os.truncate(path, 0),
    "flipped in the header": lambda path: flip(path, 20),
    "flipped in a tensor": lambda path: flip(path, -1),
    "not a cache": lambda path: path.write_text("hello"),
}
CHECKSUM, UNREADABLE = "checksum does not match", "unreadable"


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_miss_and_set_aside(store: CacheStore, damage: str) -> None:
    path, other = put(store, 1, 2)
    untouched = other.read_bytes()
    DAMAGE[damage](path)
    with pytest.raises(CacheMiss) as miss:
        store.get(identity(1))
    assert miss.value.reason.startswith(CHECKSUM if "tensor" in damage else UNREADABLE)
    assert [file.name for file in (store.folder / "quarantine").iterdir()] == [path.name]
    assert not store.has(identity(1))
    assert other.read_bytes() == untouched
    assert holds(store, 2)
    put(store, 1)
    assert holds(store, 1)


def test_no_flipped_bit_gives_other_tensors(store: CacheStore) -> None:
    (path,) = put(store, 1)
    whole = path.read_bytes()
    for offset in range(0, len(whole), 61):
        path.write_bytes(whole)
        flip(path, offset)
        try:
            assert holds(store, 1)
        except CacheMiss:
            assert not path.exists()


def test_a_bit_flipped_in_the_description_is_a_miss(store: CacheStore) -> None:
    (path,) = put(store, 1)
    flip(path, path.read_bytes().index(b"tokens"))
    with pytest.raises(CacheMiss):
        store.get(identity(1))


def test_a_file_of_another_identity_is_a_miss(store: CacheStore) -> None:
    path, other = put(store, 1, 2)
    shutil.copy(path, other)
    with pytest.raises(CacheMiss, match=r"ids is \[1, 2, 1\] in the file, \[1, 2, 2\] was asked"):
        store.get(identity(2))
    assert (store.folder / "quarantine" / other.name).exists()
    assert holds(store, 1)


def test_verify_finds_damage_and_changes_nothing(store: CacheStore) -> None:
    paths = put(store, 1, 2, 3, 4, 5)
    assert store.verify() == []
    flip(paths[0], -1)
    os.truncate(paths[1], 1000)
    shutil.copy(paths[4], paths[2])
    paths[3].unlink()
    (store.folder / "kv" / "stray.pkl").touch()
    before = snapshot(store.folder / "kv")
    found = {problem.path: problem.reason for problem in store.verify()}
    where = [str(path.relative_to(store.folder)) for path in paths]
    assert found.pop(where[0]) == CHECKSUM
    assert found.pop(where[1]).startswith(UNREADABLE)
    assert found.pop(where[2]) == "belongs to another identity"
    assert found.pop(f"catalog entry {paths[3].stem[:12]}") == "its file is missing"
    assert found.pop("kv/stray.pkl") == "not a cache; it was not opened"
    assert not found
    assert snapshot(store.folder / "kv") == before


@pytest.mark.parametrize("lost", [True, False])
def test_a_lost_or_broken_catalog_is_rebuilt_from_the_files(store: CacheStore, lost: bool) -> None:
    put(store, 1, 2)
    stats = store.stats()
    store.close()
    catalog = store.folder / "catalog"
    if lost:
        shutil.rmtree(catalog)
    else:
        (catalog / "cache.db").write_bytes(b"no database" * 1000)
    again = reopened(store)
    assert again.stats() == stats
    assert again.verify() == []
    assert holds(again, 1)
    assert holds(again, 2)


# -- limits --------------------------------------------------------------------------------


@pytest.mark.parametrize("reopen", [False, True])
def test_the_least_recently_used_goes_first(tmp_path: Path, reopen: bool) -> None:
    store = CacheStore(tmp_path / "store", codec="fp32", max_bytes=3 * SIZE)
    put(store, 0, 1, 2)
    store.get(identity(0))
    if reopen:
        store = reopened(store, max_bytes=3 * SIZE)
    put(store, 3)
    assert [n for n in range(4) if store.has(identity(n))] == [0, 2, 3]
    assert store.stats().evictions == 1
    assert store.stats().bytes <= 3 * SIZE


def test_a_cache_larger_than_the_cap_is_refused(tmp_path: Path) -> None:
    store = CacheStore(tmp_path / "store", codec="fp32", max_bytes=2 * SIZE)
    put(store, 1, 2)
    with pytest.raises(ValueTooLarge, match="capped at 10,000"):
        store.put(identity(3), tensors(3, tokens=20), tokens=20)
    assert holds(store, 1)
    assert holds(store, 2)
    assert not temporary(store)


def test_a_file_larger_than_the_cap_is_refused(tmp_path: Path) -> None:
    store = CacheStore(tmp_path / "store", codec="fp32", max_bytes=2 * SIZE)
    put(store, 1)
    with pytest.raises(ValueTooLarge):
        store.put(identity(3), tensors(3, tokens=19), tokens=19)
    assert holds(store, 1)


def test_a_file_that_lost_its_entry_counts_against_the_cap(tmp_path: Path) -> None:
    """As after a kill between the rename and the entry."""
    store = CacheStore(tmp_path / "store", codec="fp32", max_bytes=3 * SIZE)
    _, path = put(store, 1, 2)
    store.catalog.table("caches").delete(path.stem)
    store = reopened(store, max_bytes=3 * SIZE)
    put(store, 3, 4, 5)
    assert store.stats().bytes <= 3 * SIZE


def test_a_full_disk_loses_nothing(store: CacheStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, 1)
    before = snapshot(store.folder / "kv")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for n in (1, 2):
        with pytest.raises(StoreFull, match="cag store gc"):
            put(store, n)
    assert snapshot(store.folder / "kv") == before
    assert holds(store, 1)


# -- the folder ----------------------------------------------------------------------------


@pytest.mark.parametrize("marker", ['{"format": 99}', "{}", "no json"])
def test_another_format_is_refused_and_left_alone(store: CacheStore, marker: str) -> None:
    (path,) = put(store, 1)
    store.close()
    (store.folder / "store.json").write_text(marker)
    path.with_name(".tmp-0-abc").touch()
    before = snapshot(store.folder)
    with pytest.raises(StoreVersionError, match="this version reads 1"):
        CacheStore(store.folder)
    assert snapshot(store.folder) == before


def test_only_the_owner_can_enter(store: CacheStore) -> None:
    (path,) = put(store, 1)
    flip(path, -1)
    with pytest.raises(CacheMiss):
        store.get(identity(1))
    folders = [store.folder, *(path for path in store.folder.rglob("*") if path.is_dir())]
    assert {"kv", "catalog", "quarantine"} <= {folder.name for folder in folders}
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}


def test_gc_removes_only_what_nothing_refers_to(store: CacheStore) -> None:
    paths = put(store, 1, 2, 3)
    size = paths[2].stat().st_size
    paths[0].with_name(".tmp-999999999-abc").write_bytes(b"half")
    alive = paths[0].with_name(f".tmp-{os.getpid()}-abc")
    alive.write_bytes(b"another writer is at work")
    report = store.gc(keep={paths[0].stem, paths[1].stem})
    assert (report.caches, report.temporary, report.bytes) == (1, 1, size + 4)
    assert not store.has(identity(3))
    assert holds(store, 1)
    assert holds(store, 2)
    assert alive.exists()
    assert store.gc().caches == 0
    assert store.verify() == []


def test_gc_empties_the_quarantine(store: CacheStore) -> None:
    (path,) = put(store, 1)
    flip(path, -1)
    with pytest.raises(CacheMiss):
        store.get(identity(1))
    assert store.stats().quarantined == 1
    assert store.gc().bytes > 0
    assert store.stats().quarantined == 0


def test_what_another_process_stores_counts_for_the_cap(store: CacheStore) -> None:
    (path,) = put(store, 1)
    size = path.stat().st_size
    mine, other = (CacheStore(store.folder, codec="fp32", max_bytes=60 * size) for _ in range(2))
    put(other, *range(2, 60))
    put(mine, *range(60, 63))
    assert mine.stats().bytes <= 60 * size


def test_a_file_that_goes_while_it_is_read_is_a_miss(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1)
    read = CacheStore._read

    def evicting(self: CacheStore, path: Path) -> Any:
        found = read(self, path)
        path.unlink()
        return found

    monkeypatch.setattr(CacheStore, "_read", evicting)
    with pytest.raises(CacheMiss, match="evicted"):
        store.get(identity(1))
