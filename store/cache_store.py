"""Stored caches: one checksummed safetensors file each, named by what shaped it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from store.catalog import Catalog
from store.codec import get_codec
from store.errors import CacheMiss, StoreVersionError, ValueTooLarge
from store.files import TEMPORARY, abandoned, private_folder, write_atomically

FORMAT_VERSION = 1
Identity = dict[str, Any]


def cache_key(identity: Identity) -> str:
    """SHA-256 of an identity's canonical JSON: the same in every process."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class CacheHit:
    """A verified cache: its key, private tensors, length in tokens, and size on disk."""

    key: str
    tensors: dict[str, Tensor]
    tokens: int
    bytes: int


@dataclass(frozen=True)
class StoreStats:
    """What a store holds; sizes in bytes."""

    caches: int
    tokens: int
    bytes: int
    temporary_bytes: int
    quarantined: int
    evictions: int
    max_bytes: int | None
    codec: str


@dataclass(frozen=True)
class Problem:
    """A file or entry that is not as it should be."""

    path: str
    reason: str


@dataclass(frozen=True)
class GcReport:
    """What a collection removed."""

    caches: int
    temporary: int
    bytes: int


class CacheStore:
    """Content-addressed store of passages' KV caches.

    Parameters
    ----------
    folder
        Where it lives; created with mode 0700.
    max_bytes
        Cap on all caches together; the least recently used go first. None: no cap.
    codec
        How tensors are written; see `store.codec`.

    Raises
    ------
    StoreVersionError
        If the folder was written in another format. Nothing in it is touched.
    """

    def __init__(self, folder: Path, *, max_bytes: int | None = None, codec: str = "bf16") -> None:
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.codec = get_codec(codec)
        _check_version(self.folder)
        self._files = private_folder(self.folder / "kv")
        self._remove_temporary()
        self.catalog = Catalog(self.folder / "catalog")
        self._caches = self.catalog.table("caches")
        self._counters = self.catalog.table("counters")
        self._reconcile()

    # -- put and get -----------------------------------------------------------------------

    def put(
        self,
        identity: Identity,
        tensors: dict[str, Tensor],
        *,
        tokens: int,
    ) -> str:
        """Store the tensors of one cache; returns its key.

        Parameters
        ----------
        identity
            Everything that shaped the cache, as JSON.
        tensors
            Tensors with tokens in the second dimension from the end.
        tokens
            How many tokens they hold.

        Raises
        ------
        ValueTooLarge, StoreFull, NotFinite
            In each case nothing that was stored before is touched.
        ValueError
            If a tensor holds another number of tokens.
        """
        if any(tensor.shape[-2] != tokens for tensor in tensors.values()):
            raise ValueError(f"tensors of {tokens} tokens have shape (..., {tokens}, size)")
        identity = self._complete(identity)
        key = cache_key(identity)
        encoded = self.codec.encode({name: tensor.cpu() for name, tensor in tensors.items()})
        header: dict[str, Any] = {"identity": identity, "tokens": tokens}
        header["sha256"] = _digest(header, encoded)
        content = save(encoded, {"format": str(FORMAT_VERSION), "cag": json.dumps(header)})
        if self.max_bytes is not None and len(content) > self.max_bytes:
            raise ValueTooLarge(
                f"a cache of {len(content):,} bytes can never fit a store capped at "
                f"{self.max_bytes:,}; raise CAG_MAX_STORE_GB, or set CAG_CODEC=int8"
            )
        write_atomically(self._path(key), content)
        self._caches.set(key, {"bytes": len(content), "tokens": tokens, "used": time.time()})
        self._total += len(content)  # too much if the file was there; `_evict` counts anew
        self._uncounted += len(content)
        if self.max_bytes is not None and (
            self._total > self.max_bytes or self._uncounted > self.max_bytes // 50
        ):
            self._evict(key, self.max_bytes)
        return key

    def get(self, identity: Identity, *, dtype: torch.dtype | None = None) -> CacheHit:
        """The cache with exactly this identity, verified.

        Raises
        ------
        CacheMiss
            With the reason. A damaged file is moved to ``quarantine/``, so that the caller
            can recompute it.
        """
        identity = self._complete(identity)
        key = cache_key(identity)
        path = self._path(key)
        if not path.exists():
            raise CacheMiss("not stored")
        header, encoded = self._read(path)
        if header["identity"] != identity:
            raise self._quarantined(path, _difference(identity, header["identity"]))
        if header["sha256"] != _digest(header, encoded):
            raise self._quarantined(path, "checksum does not match")
        tensors = self.codec.decode(encoded, dtype)
        if any(tensor.shape[-2] != header["tokens"] for tensor in tensors.values()):
            raise self._quarantined(path, "token count does not match")
        size = _size(path)
        if size is None:
            raise CacheMiss("evicted while it was being read")
        entry = {"bytes": size, "tokens": header["tokens"], "used": time.time()}
        self._caches.set(key, entry)
        return CacheHit(key, tensors, header["tokens"], entry["bytes"])

    def touch(self, identity: Identity) -> None:
        """Note that a cache was used, though it was not read."""
        key = self.key(identity)
        if (entry := self._caches.get(key)) is not None:
            self._caches.set(key, {**entry, "used": time.time()})

    def has(self, identity: Identity) -> bool:
        """Whether a file for this identity exists; `get` is what verifies it."""
        return self._path(cache_key(self._complete(identity))).exists()

    def key(self, identity: Identity) -> str:
        """The key this store gives an identity."""
        return cache_key(self._complete(identity))

    def file(self, identity: Identity) -> Path:
        """Where the cache of an identity lies, whether it is there or not."""
        return self._path(self.key(identity))

    def delete(self, key: str) -> bool:
        """Remove a cache; says whether it was there."""
        self._caches.delete(key)
        path = self._path(key)
        existed = path.exists()
        path.unlink(missing_ok=True)
        return existed

    # -- housekeeping ----------------------------------------------------------------------

    @property
    def evictions(self) -> int:
        """How many caches ever had to leave for others."""
        return int(self._counters.get("evictions") or 0)

    def stats(self) -> StoreStats:
        """Counts and sizes, from the files themselves."""
        entries = dict(self._caches.items())
        quarantine = self.folder / "quarantine"
        return StoreStats(
            caches=sum(1 for _ in self._cache_files()),
            tokens=sum(entry["tokens"] for entry in entries.values()),
            bytes=sum(_size(path) or 0 for path in self._cache_files()),
            temporary_bytes=sum(_size(path) or 0 for path in self._temporary_files()),
            quarantined=sum(1 for _ in quarantine.iterdir()) if quarantine.exists() else 0,
            evictions=self.evictions,
            max_bytes=self.max_bytes,
            codec=self.codec.name,
        )

    def verify(self) -> list[Problem]:
        """Check every file and entry; reads all data, changes nothing."""
        problems = []
        keys = set()
        for path in sorted(self._files.rglob("*")):
            if path.is_dir() or path.name.startswith(TEMPORARY):
                continue
            reason = self._fault(path)
            keys.add(path.stem)
            if reason:
                problems.append(Problem(str(path.relative_to(self.folder)), reason))
        for key in self._caches.keys():  # noqa: SIM118
            if key not in keys:
                problems.append(Problem(f"catalog entry {key[:12]}", "its file is missing"))
        if foreign := self.catalog.foreign_rows():
            problems.append(Problem("catalog", f"{foreign} rows are not text and are ignored"))
        return problems

    def gc(self, keep: set[str] | None = None) -> GcReport:
        """Remove what nobody needs: temporary files whose writer is gone, damaged files.

        With `keep` also all caches that are not among these keys.
        """
        freed = temporary = caches = 0
        for path in list(self._temporary_files()):
            if abandoned(path):
                freed, temporary = freed + (_size(path) or 0), temporary + 1
                path.unlink(missing_ok=True)
        for path in list(self._cache_files()):
            if keep is not None and path.stem not in keep:
                freed, caches = freed + (_size(path) or 0), caches + 1
                self.delete(path.stem)
        for folder in (self.folder / "quarantine", *self.folder.glob("catalog.broken-*")):
            freed += sum(_size(path) or 0 for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder, ignore_errors=True)
        for key in self._caches.keys():  # noqa: SIM118
            if not self._path(key).exists():
                self._caches.delete(key)
        return GcReport(caches, temporary, freed)

    def close(self) -> None:
        """Close the catalog."""
        self.catalog.close()

    # -- inside ----------------------------------------------------------------------------

    def _complete(self, identity: Identity) -> Identity:
        identity = json.loads(json.dumps(identity))  # as it comes back from a file
        return {**identity, "codec": self.codec.name, "format": FORMAT_VERSION}

    def _path(self, key: str) -> Path:
        return self._files / key[:2] / f"{key}.safetensors"

    def _cache_files(self) -> Iterator[Path]:
        for path in self._files.glob("??/*.safetensors"):
            if not path.name.startswith(TEMPORARY):
                yield path

    def _temporary_files(self) -> Iterator[Path]:
        return self._files.rglob(f"{TEMPORARY}*")

    def _remove_temporary(self) -> None:
        for path in list(self._temporary_files()):
            if abandoned(path):
                path.unlink(missing_ok=True)

    def _read(self, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        try:
            header = _header(path)
            with safe_open(path, "pt") as file:
                return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except CacheMiss as miss:
            raise self._quarantined(path, miss.reason) from None
        except (SafetensorError, OSError, RuntimeError) as error:
            if not path.exists():
                raise CacheMiss("evicted while it was being read") from None
            raise self._quarantined(path, f"unreadable: {error}") from None

    def _fault(self, path: Path) -> str | None:
        if path.suffix != ".safetensors":
            return "not a cache; it was not opened"
        try:
            header = _header(path)
            with safe_open(path, "pt") as file:
                encoded = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (CacheMiss, SafetensorError, OSError, RuntimeError) as error:
            return f"unreadable: {error}"
        if cache_key(header["identity"]) != path.stem:
            return "belongs to another identity"
        return None if header["sha256"] == _digest(header, encoded) else "checksum does not match"

    def _quarantined(self, path: Path, reason: str) -> CacheMiss:
        folder = private_folder(self.folder / "quarantine")
        with contextlib.suppress(FileNotFoundError):  # another reader was faster
            path.replace(folder / path.name)
        self._caches.delete(path.stem)
        return CacheMiss(reason)

    def _evict(self, keep: str, limit: int) -> None:
        """Count what all processes have stored, and make room if it is too much."""
        entries = sorted(self._caches.items(), key=lambda item: item[1]["used"])
        self._total, self._uncounted = sum(entry["bytes"] for _, entry in entries), 0
        for key, entry in entries:
            if self._total <= limit:
                return
            if key != keep:
                self.delete(key)
                self._total -= entry["bytes"]
                self._counters.set("evictions", self.evictions + 1)

    def _reconcile(self) -> None:
        """Enter files that the catalog does not know: it was lost, or a writer was killed."""
        known = set(self._caches.keys())
        for path in self._cache_files():
            if path.stem in known:
                continue
            try:
                header = _header(path)
            except CacheMiss:
                continue
            stat = path.stat()
            entry = {"bytes": stat.st_size, "tokens": header["tokens"], "used": stat.st_mtime}
            self._caches.set(path.stem, entry)
        self._total, self._uncounted = sum(e["bytes"] for _, e in self._caches.items()), 0


def _header(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        if metadata.get("format") != str(FORMAT_VERSION):
            raise CacheMiss(f"format {metadata.get('format')}, this version reads {FORMAT_VERSION}")
        header = json.loads(metadata["cag"])
        missing = {"identity", "tokens", "sha256"} - set(header)
        if missing:
            raise CacheMiss(f"metadata lacks {', '.join(sorted(missing))}")
        return header
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CacheMiss(f"unreadable: {error}") from None


def _size(path: Path) -> int | None:
    """Bytes of a file, or None if it has just gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _digest(header: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Checksum of everything in a file but the checksum itself."""
    covered = {name: value for name, value in header.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(covered, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _difference(wanted: Identity, found: Identity) -> str:
    for name in sorted({*wanted, *found}):
        if wanted.get(name) != found.get(name):
            return f"{name} is {found.get(name)!r} in the file, {wanted.get(name)!r} was asked for"
    return "identity does not match"


def _check_version(folder: Path) -> None:
    marker = folder / "store.json"
    if marker.exists():
        try:
            found = json.loads(marker.read_text())["format"]
        except (ValueError, KeyError, TypeError):
            found = "unreadable"
        if found != FORMAT_VERSION:
            raise StoreVersionError(
                f"the store in '{folder}' has format {found}, this version reads {FORMAT_VERSION}; "
                "use the cag version that wrote it, or another CAG_HOME and ingest again"
            )
        return
    private_folder(folder)
    write_atomically(marker, json.dumps({"format": FORMAT_VERSION}).encode())
