"""A run's figures for people: ``report.md`` and its plots."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval import plots
from eval.arms import ARMS
from eval.identity import OtherRun, read_config, write_json
from eval.summary import summarise_folder

_READING = """\
Brackets hold 95% intervals, from resampling questions in pairs; [?] where what is divided by may be
zero. *NLL* is that of the first accepted answer, in nats per token; *recovered* is the share of it
between no context (0) and native (1). *Retention* is the score as a share of native's. *KL* is
KL(native || arm) of the first token, in nats. *Tokens* pass the answering model's layers between
the passages and the first generated token; the prefix, the same in every prompt, is read beforehand
in every arm. *GMAC* are 10⁹ multiply-accumulates up to that token, translating included; what the
reference read at ingest is not. *ms* is the time to come by the context, with sources loaded."""

_CLOSED = """\
Choices are scored by the log-probability of the choice and its line end: per token (*accuracy*),
summed (*sum*), and by what the model writes (*written*). *Above chance* is accuracy less 1/k, and
*kept* that as a share of native's."""

_FREE = "*Above none* is F1 less that of no context."


def remake(folder: Path) -> dict[str, Any]:
    """Make ``metrics.json``, report and plots anew, from the logs alone.

    Raises
    ------
    OtherRun
        If the folder holds no run, or none of its logs: nothing is overwritten then.
    """
    metrics = summarise_folder(folder)
    if not any(found["tasks"] for found in metrics["pairs"].values()):
        raise OtherRun(
            f"there are no logs in '{folder}' to make a report from; nothing was changed"
        )
    write_json(folder / "metrics.json", metrics)
    write_report(folder)
    return metrics


def write_report(folder: Path) -> Path:
    """Write ``report.md`` and plots from ``config.json`` and ``metrics.json``."""
    config = read_config(folder / "config.json")
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    blocks = ["# Evaluation", *_settings(config, metrics)]
    for pair, found in metrics["pairs"].items():
        tasks = {task: figures for task, figures in found["tasks"].items() if figures["arms"]}
        blocks.append(f"## {pair}")
        if not tasks:
            blocks.append("Nothing is measured yet.")
            continue
        arms = _ordered({arm for figures in tasks.values() for arm in figures["arms"]})
        blocks += _draw(folder, pair, tasks, arms)
        for task, figures in tasks.items():
            blocks += _task(task, figures, config["tasks"][task])
        blocks += _routing(tasks)
        blocks += _translators(config["pairs"][pair]["translators"])
    path = folder / "report.md"
    path.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    return path


def command(config: Mapping[str, Any]) -> str:
    """The command that gives everything in a run's folder."""
    sessions = config["sessions"]

    def all_of(name: str) -> str:
        values = dict.fromkeys(value for session in sessions for value in session[name])
        return ",".join(_ordered(set(values)) if name == "arms" else values)

    parts = ["cag", "eval"]
    for name in ("pairs", "tasks", "arms"):
        parts += [f"--{name}", all_of(name)]
    parts += ["--n", str(config["n"]), "--seed", str(config["seed"])]
    parts += ["--data", sessions[-1]["data"], "--out", "FOLDER"]
    return shlex.join(parts)


def _ordered(arms: set[str]) -> list[str]:
    """As in the registry, and behind them those that it no longer knows."""
    return [a for a in ARMS if a in arms] + sorted(arms - set(ARMS))


# -- what was run --------------------------------------------------------------------------


def _settings(config: Mapping[str, Any], metrics: Mapping[str, Any]) -> Iterator[str]:
    yield f"```\n{command(config)}\n```"
    sessions = config["sessions"]
    commits = dict.fromkeys(
        f"{session['commit'][:12]}{' with changes' if session['modified'] else ''}"
        for session in sessions
        if session["commit"]
    )
    threads = sorted({session["threads"] for session in sessions})
    versions = ", ".join(f"{name} {version}" for name, version in config["versions"].items())
    lines = [
        f"- questions per task: {config['n']}, drawn with seed {config['seed']}",
        f"- {metrics['hours']:.2f} hours of measuring with {' or '.join(map(str, threads))} "
        "threads, all arms together",
        f"- {versions}; commit {', '.join(commits) or 'unknown'}",
    ]
    models = {}
    for pair in config["pairs"].values():
        for role in ("reference", "target"):
            models[pair[role]["name"]] = pair[role]
    for name, lm in models.items():
        lines.append(
            f"- {name}: {lm['parameters'] / 1e6:.0f} M parameters, {lm['dtype']} on "
            f"{lm['device']}, fingerprint {lm['fingerprint'][:12]}"
        )
    for name, task in config["tasks"].items():
        lines.append(
            f"- {name}: {task['questions']} questions of the *{task['role']}* split, "
            f"{task['file'] or 'generated'}, sha256 {task['sha256'][:12]}"
        )
    yield "\n".join(lines)
    yield _READING


def _translators(described: Mapping[str, Any]) -> Iterator[str]:
    if not described:
        return
    yield "### Translators"
    rows = []
    for name, translator in described.items():
        training = translator["training"]
        rows.append(
            [
                name,
                translator["kind"],
                f"{translator['parameters'] / 1e6:.1f}",
                f"{translator['macs_per_token'] / 1e6:.1f}",
                _number(training["passages"], 0),
                _number(training["minutes"], 1),
                _number(translator["recovered"], 3),
                translator["sha256"][:12],
            ]
        )
    heads = [
        "translator",
        "kind",
        "M parameters",
        "MMAC per token",
        "passages",
        "minutes",
        "recovered",
        "sha256",
    ]
    yield _table(heads, rows)
    yield "Passages and minutes are of training, *recovered* is what it measured on held-out text."


# -- what was found ------------------------------------------------------------------------


def _draw(folder: Path, pair: str, tasks: Mapping[str, Any], arms: Sequence[str]) -> Iterator[str]:
    native = {task: f for task, f in tasks.items() if "native" in f["arms"]}
    if native and len(arms) > 1:
        plots.plot_retention(native, arms, folder / pair / "retention.png")
        yield f"![Score as a share of native]({pair}/retention.png)"
    plots.plot_cost(tasks, arms, folder / pair / "cost.png")
    yield f"![Score against cost]({pair}/cost.png)"
    if any(figures.get("routing") for figures in tasks.values()):
        plots.plot_routing(tasks, folder / pair / "routing.png")
        yield f"![Use of the experts]({pair}/routing.png)"


def _task(task: str, figures: Mapping[str, Any], described: Mapping[str, Any]) -> Iterator[str]:
    closed = figures["score"] != "f1"
    yield f"### {task}"
    said = f"{figures['questions']} questions"
    if figures["questions"] + figures["skipped"] < described["questions"]:
        said += f" of {described['questions']}: the run is not finished"
    if figures["skipped"]:
        said += f"; {figures['skipped']} left out, too long for a model's window"
    if closed:
        said += (
            f"; choices: {' or '.join(map(str, figures['choices']))}; always the commonest answer "
            f"would score {figures['commonest_answer']:.3f}"
        )
    yield f"{said}. {_CLOSED if closed else _FREE}"
    yield _table(*(_closed_table if closed else _free_table)(figures["arms"]))
    yield from _controls(figures["controls"])
    yield from _comparisons(figures["comparisons"], closed)


def _free_table(arms: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    heads = ["arm", "F1", "EM", "above none"]
    rows = [
        [arm, _span(arms[arm], "f1"), _number(arms[arm]["em"]), _span(arms[arm], "gain")]
        for arm in _ordered(set(arms))
    ]
    return _with_common(heads, rows, arms)


def _closed_table(arms: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    heads = ["arm", "accuracy", "sum", "written", "above chance", "kept"]
    rows = []
    for arm in _ordered(set(arms)):
        found = arms[arm]
        rows.append(
            [
                arm,
                _span(found, "right_mean"),
                _number(found["right_sum"]),
                _number(found["right_generated"]),
                _span(found, "gain"),
                _span(found, "gain_retention"),
            ]
        )
    return _with_common(heads, rows, arms)


def _with_common(
    heads: list[str], rows: list[list[str]], arms: Mapping[str, Any]
) -> tuple[list[str], list[list[str]]]:
    """Columns that every kind of task has."""
    heads += ["NLL", "recovered", "retention", "agreement", "KL", "tokens", "GMAC", "ms"]
    for row in rows:
        found = arms[row[0]]
        row += [
            _number(found["nll"]), _span(found, "recovered"), _span(found, "retention"),
            _number(found.get("agreement")), _number(found["first_kl"]),
            _number(found["tokens"], 0), _number(found["macs"] / 1e9, 2), _number(found["ms"], 0),
        ]  # fmt: skip
    return heads, rows


def _controls(controls: Mapping[str, Any]) -> Iterator[str]:
    lines = []
    if wrong := controls.get("wrong_passage"):
        lines.append(
            "- The wrong passage is "
            + ("not better" if wrong["holds"] else "**BETTER**")
            + f" than no context by its score ({_span(wrong, 'difference', sign=True)}) and "
            + ("not better" if wrong["nll_holds"] else "**better**")
            + f" by its NLL (lower by {_span(wrong, 'nll_gain', sign=True)} nats)."
        )
    if replay := controls.get("replay_plain"):
        lines.append(
            "- A replay without injection "
            + ("equals" if replay["holds"] else "**DIFFERS FROM**")
            + f" native: {100 * replay['agreement']:.1f}% of the answers agree, NLLs differ by at "
            f"most {replay['largest_nll_difference']:.1e} nats."
        )
    if lines:
        yield "Controls:"
        yield "\n".join(lines)


def _comparisons(comparisons: Sequence[Mapping[str, Any]], closed: bool) -> Iterator[str]:
    if not comparisons:
        return
    yield "Arms against those they have to beat, question by question:"
    worth = "above chance" if closed else "above none"
    rows = [
        [c["arm"], c["against"], _span(c, "difference", sign=True), _span(c, "gain_ratio")]
        for c in comparisons
    ]
    score = "accuracy" if closed else "F1"
    yield _table(["arm", "against", f"{score} difference", f"ratio of {worth}"], rows)


def _routing(tasks: Mapping[str, Any]) -> Iterator[str]:
    routed = {task: f["routing"] for task, f in tasks.items() if f.get("routing")}
    if not routed:
        return
    yield "### Routing"
    rows = [
        [
            task,
            f"{found['passages']} ({found['tokens']:,})",
            " / ".join(f"{share:.2f}" for share in found["tokens_per_expert"]),
            " / ".join(f"{share:.2f}" for share in found["weight"]),
            f"{found['entropy']:.2f} of {found['most_entropy']:.2f}",
            _number(found["usage_entropy"], 2),
        ]
        for task, found in routed.items()
    ]
    heads = ["task", "passages (tokens)", "tokens that ran each expert", "share of the weights",
             "entropy per token (nats)", "evenness"]  # fmt: skip
    yield _table(heads, rows)


# -- Markdown ------------------------------------------------------------------------------


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _span(figures: Mapping[str, Any], name: str, *, sign: bool = False) -> str:
    """A figure and its interval."""
    value, interval = figures.get(name), figures.get(f"{name}_95")
    if value is None:
        return "-"
    plus = "+" if sign else ""
    if interval is None:
        return f"{value:{plus}.3f} [?]"
    return f"{value:{plus}.3f} [{interval[0]:{plus}.3f}, {interval[1]:{plus}.3f}]"
