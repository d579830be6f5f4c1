"""Loaded models, one copy of each per process."""

from __future__ import annotations

import threading
from pathlib import Path

from cag.lm.loading import LM, dtype_named, load_lm
from cag.lm.pull import resolve
from cag.retrieval import Embedder
from cag.settings import Settings
from cag.translate import Translator, find_translator
from cag.translate.finding import Version, translator_version


class Models:
    """Loads language models, embedder and translators on first use; safe under threads."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()  # for the dictionaries
        self._locks: dict[tuple[str, ...], threading.Lock] = {}
        self._lms: dict[str, LM] = {}
        self._embedder: Embedder | None = None
        self._translators: dict[tuple[str, str], tuple[Version, Translator]] = {}
        self.loads = 0

    def add(self, lm: LM) -> None:
        """Use a model that is loaded already, under its name."""
        with self._lock:
            self._lms[lm.name] = lm

    @property
    def loaded(self) -> tuple[str, ...]:
        """Names of the loaded language models; never waits for one that is being loaded."""
        return tuple(self._lms)

    def lm(self, name: str) -> LM:
        """The language model of that name."""
        if (loaded := self._lms.get(name)) is not None:
            return loaded  # whatever else is being loaded
        with self._loading("lm", name):
            if name not in self._lms:
                folder = resolve(name, self._settings.home)
                lm = load_lm(
                    folder, name=name, dtype=self._settings.dtype, device=self._settings.device
                )
                with self._lock:
                    self._lms[name] = lm
                    self.loads += 1
            return self._lms[name]

    def embedder(self) -> Embedder:
        """The sentence embedder."""
        with self._loading("embedder"):
            if self._embedder is None:
                name = self._settings.embedder
                folder: Path = resolve(name, self._settings.home)
                self._embedder = Embedder(name, folder, self._settings.device)
            return self._embedder

    def translator(self, reference: str, target: str) -> Translator | None:
        """The translator of a pair, in the dtype that is fast here; None if there is none."""
        with self._loading("translator", reference, target):
            pair = (reference, target)
            version = translator_version(self._settings.home, reference, target)
            known, translator = self._translators.get(pair, (None, None))
            if version is None or version == known:  # it may be trained anew while this runs
                return translator if version else None
            device = self.lm(target).device
            dtype = dtype_named(self._settings.dtype, str(device))
            translator = find_translator(self._settings.home, reference, target, dtype)
            if translator is not None:
                self._translators[pair] = version, translator.to(device)
            return translator

    def _loading(self, *what: str) -> threading.Lock:
        """Held while one thing is loaded; others can be loaded and used meanwhile."""
        with self._lock:
            return self._locks.setdefault(what, threading.Lock())
