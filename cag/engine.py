"""`CAG`: ingest documents, ask questions, compare paths. Everything else calls this."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cag.answer import Answer, Comparison, Timings, Tokens, timed
from cag.compose import place_translated, read_natively, read_prefix, reuse_own
from cag.errors import CagError, ContextTooLong, EmptyQuestion, EmptyStore, TranslatorError
from cag.ingest import Ingestor, IngestReport, Progress, reference_identity, store_passages
from cag.library import Library, Passage
from cag.lm.cache import KV, Context
from cag.lm.counting import count_layer_tokens
from cag.lm.decode import Decoded, Generation, decode
from cag.lm.loading import LM
from cag.lm.prompt import DEFAULT_TEMPLATE, PASSAGE_FORMAT, Prompt, Template, build_prompt
from cag.models import Models
from cag.retrieval import Retriever, Source
from cag.settings import Settings
from cag.translate import Translator
from cag.translations import Translations
from store import CacheMiss, CacheStore, StoreError, WriteLock

MODES = ("translated", "direct", "own")


@dataclass
class Stream:
    """An answer while it is being written: iterate for text, then read `answer`."""

    answer: Answer
    _pieces: Iterator[str] = field(repr=False)

    def __iter__(self) -> Iterator[str]:
        return self._pieces


class CAG:
    """Cache-augmented generation over a store of documents.

    Parameters
    ----------
    settings
        Defaults to the environment's.
    models
        Share loaded models between engines.
    template
        The prompt around passages and question.
    store_folder
        Another place for the store than the settings' home.

    Examples
    --------
    >>> cag = CAG()
    >>> cag.ingest(["docs/"])
    >>> cag.ask("What is a passage?").answer
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        models: Models | None = None,
        template: Template = DEFAULT_TEMPLATE,
        store_folder: Path | None = None,
    ) -> None:
        self.settings = settings or Settings.from_environment()
        self.folder = store_folder or self.settings.store_folder
        self.models = models or Models(self.settings)
        self.template = template
        self.store = CacheStore(
            self.folder,
            max_bytes=self.settings.max_store_bytes,
            codec=self.settings.codec,
        )
        self.library = Library(self.store)
        self.translations = Translations(int(self.settings.keep_mb * 2**20))
        self._retriever: Retriever | None = None
        self._starts: dict[str, tuple[LM, Context]] = {}
        self._opening = threading.Lock()

    @property
    def retriever(self) -> Retriever:
        """Finds passages; loads the embedder on first use."""
        with self._opening:
            if self._retriever is None:
                self._retriever = Retriever(
                    self.folder / "vectors", self.library, self.models.embedder()
                )
            return self._retriever

    # -- documents -------------------------------------------------------------------------

    def ingest(
        self,
        paths: Sequence[str | Path],
        *,
        prune: bool = False,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> IngestReport:
        """Read documents once with the reference model and keep their caches.

        Parameters
        ----------
        paths
            Files and folders.
        prune
            Also forget documents under these folders whose files are gone.

        Raises
        ------
        IngestError
            If there was nothing to ingest.
        store.StoreLocked
            If another process is ingesting.
        """
        with self._ingestor(on_progress) as ingestor:
            return ingestor.run([Path(path) for path in paths], prune=prune)

    def ingest_texts(
        self,
        texts: Mapping[str, str],
        *,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> IngestReport:
        """Like `ingest`, of texts that are no files on this machine.

        Parameters
        ----------
        texts
            By name, for example an address. A text that is given again under its name replaces
            what was read before; headings are those of Markdown.
        """
        with self._ingestor(on_progress) as ingestor:
            return ingestor.run_texts(texts)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """While documents come and go: nobody else writes, and nothing of them stays behind."""
        with WriteLock(self.folder):
            self.retriever.refresh()
            try:
                yield
            finally:
                self.translations.clear()

    @contextlib.contextmanager
    def _ingestor(self, on_progress: Callable[[Progress], None]) -> Iterator[Ingestor]:
        with self._changing():
            yield Ingestor(
                self.library,
                self.retriever,
                lambda: self.models.lm(self.settings.reference),
                self.settings,
                on_progress,
            )

    def remove(self, document: str) -> int:
        """Forget a document and all its caches; returns how many passages it had.

        Raises
        ------
        CagError
            If no such document was ingested.
        """
        known = self.library.document(document) is not None
        path = document if known else str(Path(document).resolve())
        if self.library.document(path) is None:
            raise CagError(f"'{document}' is not in the store; `cag store list` shows what is")
        with self._changing():
            ids = self.library.remove(path)
            self.retriever.remove(ids)
            self.retriever.save()
        return len(ids)

    def retrieve(self, question: str, k: int | None = None) -> list[Source]:
        """The passages closest to a question, best first.

        Raises
        ------
        EmptyStore
            If nothing was ingested yet.
        EmptyQuestion
            If the question holds no text.
        """
        if not question.strip():
            raise EmptyQuestion("the question is empty; write what you want to know")
        if not len(self.library):
            raise EmptyStore("nothing was ingested yet; run `cag ingest PATH...` first")
        return self.retriever.search(question, self.settings.k if k is None else k)

    # -- questions -------------------------------------------------------------------------

    def ask(
        self,
        question: str,
        *,
        target: str | None = None,
        mode: str = "translated",
        k: int | None = None,
        sources: Sequence[Source] | None = None,
        refresh: float | None = None,
        generation: Generation | None = None,
    ) -> Answer:
        """Answer a question over the stored passages.

        Parameters
        ----------
        target
            Name of the model that answers.
        mode
            ``translated``, ``direct`` (the target reads the text) or ``own`` (the target's own
            stored cache).
        k
            How many passages to retrieve.
        sources
            Use these passages instead of retrieving, best first: in the prompt the best one
            stands last, next to the question.
        refresh
            Share of the passages' tokens, 0 to 1, that the target reads itself on the translated
            path: those of the sentences closest to the question.
        """
        stream = self.stream(
            question,
            target=target,
            mode=mode,
            k=k,
            sources=sources,
            refresh=refresh,
            generation=generation,
        )
        for _ in stream:
            pass
        return stream.answer

    def stream(
        self,
        question: str,
        *,
        target: str | None = None,
        mode: str = "translated",
        k: int | None = None,
        sources: Sequence[Source] | None = None,
        refresh: float | None = None,
        generation: Generation | None = None,
    ) -> Stream:
        """Like `ask`, but gives the text piece by piece."""
        if mode not in MODES:
            raise CagError(f"unknown mode '{mode}'; use one of: {', '.join(MODES)}")
        if not question.strip():
            raise EmptyQuestion("the question is empty; write what you want to know")
        lm = self.models.lm(target or self.settings.target)
        if generation is None:
            stop = self.template.stop
            generation = Generation(max_tokens=self.settings.max_tokens, stop=stop)
        # loading is not part of answering, nor is what all questions have in common
        start = self._start(lm)
        if sources is None and len(self.library):
            _ = self.retriever
        if mode == "translated":
            with contextlib.suppress(TranslatorError):
                self.models.translator(self.settings.reference, lm.name)
        started = time.perf_counter()
        timings = Timings()
        with timed(timings, "retrieve"):
            found = self.retrieve(question, k) if sources is None else list(sources)
        share = self.settings.refresh if refresh is None else refresh
        if not 0 <= share <= 1:
            raise CagError(f"refresh is {share}; give a share between 0 and 1")
        answer = Answer(question, "", mode, None, lm.name, None, found, timings=timings)
        texts = [passage.text for passage in _in_prompt(found)]
        prompt = build_prompt(lm, self.template, texts, question)
        _check_window(lm, prompt, generation.max_tokens)
        answer.tokens = Tokens(
            prefix=len(prompt.prefix), passage=len(prompt.passage_ids), suffix=len(prompt.suffix)
        )
        return Stream(answer, self._write(lm, prompt, answer, generation, share, start, started))

    def compare(
        self, question: str, *, target: str | None = None, k: int | None = None
    ) -> Comparison:
        """Answer on both paths over the same passages."""
        found = Timings()
        if len(self.library):
            _ = self.retriever  # loading is not part of answering
        with timed(found, "retrieve"):
            sources = self.retrieve(question, k)
        answers = [
            self.ask(question, target=target, mode=mode, sources=sources)
            for mode in ("translated", "direct")
        ]
        for answer in answers:  # found once for both, and in neither's time to the first token
            answer.timings.retrieve = found.retrieve
        return Comparison(*answers)

    # -- inside ----------------------------------------------------------------------------

    def _write(
        self,
        lm: LM,
        prompt: Prompt,
        answer: Answer,
        generation: Generation,
        refresh: float,
        context: Context,
        started: float,
    ) -> Iterator[str]:
        timings, result = answer.timings, Decoded()
        with count_layer_tokens(lm) as counted:
            self._extend(lm, context, prompt, answer, refresh)
        begun = time.perf_counter()
        pieces = decode(lm, context, prompt.suffix, generation, result)
        held = ""  # white space that may turn out to be the end
        while True:
            with count_layer_tokens(lm, counted):
                piece = next(pieces, None)
            if piece is None:
                break
            text = held + (piece if answer.answer else piece.lstrip())
            shown = text.rstrip()
            held = text[len(shown) :]
            answer.answer += shown
            if shown:
                yield shown
        answer.finish, answer.first_logits = result.finish, result.first_logits
        answer.tokens.generated = len(result.ids)
        answer.tokens.target_forward = counted.tokens
        timings.prefill += 1e3 * result.first_token_seconds
        timings.first_token = 1e3 * (begun - started + result.first_token_seconds)
        timings.total = 1e3 * (begun - started + result.seconds)
        rest = result.seconds - result.first_token_seconds
        timings.tokens_per_second = len(result.ids) / rest if rest > 0 and result.ids else 0.0

    def _extend(
        self, lm: LM, context: Context, prompt: Prompt, answer: Answer, refresh: float
    ) -> None:
        """Put the passages behind the prefix, on the path that `answer.path` names."""
        if answer.path == "own":
            ids = [passage.id for passage in _in_prompt(answer.sources)]
            missed = reuse_own(
                lm, context, prompt, self.store, answer.timings,
                on_used=lambda count, key: self.library.note_own(ids[:count], key),
            )  # fmt: skip
            if missed:
                answer.reason = f"{len(missed)} passages were read and stored first ({missed[0]})"
            return
        if answer.path == "translated":
            passages = _in_prompt(answer.sources)
            load = partial(self._load, answer)
            try:
                translator = self._translator(lm, answer, passages)
                if passages:
                    kv, answer.tokens.kept = self.translations.of(
                        lm, translator, prompt, passages, load, answer.timings
                    )
            except (CagError, StoreError) as error:
                answer.path, answer.reason = "fallback", str(error)
                answer.translator = None  # it fits, but got no caches
            else:
                if answer.tokens.kept:  # what is asked about most must not go first
                    for passage in passages:
                        self.store.touch(passage.identity)
                if passages:
                    texts = [passage.text for passage in passages]
                    place_translated(lm, context, prompt, texts, kv, answer.timings, refresh)
                answer.tokens.refreshed = round(refresh * answer.tokens.passage)
                return
        read_natively(lm, context, prompt, answer.timings)

    def _start(self, lm: LM) -> Context:
        """A context that holds the prefix, which a model reads only once."""
        known, start = self._starts.get(lm.name, (None, None))
        if known is not lm or start is None:
            start = read_prefix(lm, self.template)
            self._starts[lm.name] = lm, start
        return start.fork()

    def _translator(self, lm: LM, answer: Answer, passages: Sequence[Passage]) -> Translator:
        """The translator that fits target and passages, or the reason why there is none."""
        answer.reference = self._reference_name(passages)
        translator = self.models.translator(answer.reference, lm.name)
        if translator is None and answer.reference == lm.name:
            raise TranslatorError(
                f"'{lm.name}' is the model that read the passages, so there is nothing to "
                "translate; mode 'own' keeps and reuses its own caches"
            )
        if translator is None:
            raise TranslatorError(
                f"no translator from '{answer.reference}' to '{lm.name}'; train one with "
                f"`cag train {answer.reference} {lm.name} --data FILES`"
            )
        for passage in passages:
            translator.check_models(passage.identity["model"], lm)
        shortfall = translator.report.shortfall(self.settings.min_retention)
        if shortfall:
            raise TranslatorError(f"the translator is not good enough: {shortfall}")
        answer.translator = f"{answer.reference}--{lm.name} ({translator.kind})"
        return translator

    def _reference_name(self, passages: Sequence[Passage]) -> str:
        """Name of the model that read the passages."""
        for passage in passages:
            row = self.library.document(passage.document)
            if row is not None:
                return str(row["settings"]["reference"])
        return self.settings.reference

    def _load(self, answer: Answer, passages: Sequence[Passage]) -> list[KV]:
        """Stored reference caches; one that is missing or damaged is made again."""
        caches = []
        for passage in passages:
            try:
                with timed(answer.timings, "load"):
                    hit = self.store.get(passage.identity)
            except CacheMiss as miss:
                self._read_again(passage, miss.reason)
                answer.reason = f"passage {passage.id} was read again ({miss.reason})"
                with timed(answer.timings, "load"):
                    hit = self.store.get(passage.identity)
            caches.append(KV(hit.tensors["keys"], hit.tensors["values"]))
        return caches

    def _read_again(self, passage: Passage, why: str) -> None:
        lm = self.models.lm(self._reference_name([passage]))
        ids = lm.encode(PASSAGE_FORMAT.format(text=passage.text))
        if reference_identity(lm, ids) != passage.identity:
            raise TranslatorError(
                f"the cache of passage {passage.id} cannot be used ({why}) and '{lm.name}' is no "
                "longer the model that made it; run `cag ingest` again"
            )
        store_passages(lm, self.store, [(passage, ids)], batch=1)
        # with another codec than at ingest it has a key of its own
        self.library.note_own([passage.id], self.store.key(passage.identity))


def _in_prompt(sources: Sequence[Source]) -> list[Passage]:
    """Passages as they stand in the prompt: far from the question most is lost."""
    return [source.passage for source in reversed(sources)]


def _check_window(lm: LM, prompt: Prompt, max_tokens: int) -> None:
    needed = len(prompt.ids) + max_tokens
    if needed > lm.spec.window:
        raise ContextTooLong(
            f"prompt and answer need {needed} tokens, '{lm.name}' reads at most "
            f"{lm.spec.window}; retrieve fewer passages (--k) or ask a shorter question"
        )
