"""``python -m eval.data.reserve --data FOLDER`` writes the list of passages closed to training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from cag.errors import CagError
from cag.translate import reserved
from eval.data import TASKS
from eval.data.base import Question, Task
from eval.data.boolq import read_boolq
from eval.data.squad import read_squad

Read = Callable[[Path], list[Question]]

#: A window of an article is reported on, but training would meet the whole article.
_WHOLE: dict[str, Read] = {"covidqa": read_squad}
#: Not reported on yet, and to stay that way.
_UNTOUCHED: dict[str, Read] = {"squadshifts": partial(read_squad, first=1300)}
#: Open to training and choosing, even where a reserved part happens to hold the same passage.
_OPEN: dict[str, Read] = {
    "squadshifts": partial(read_squad, last=1300),
    "boolq": partial(read_boolq, last=2000),
}


def reserved_passages(root: Path) -> set[str]:
    """Every passage below the data folder `root` that is closed to training."""
    report = [task for task in TASKS.values() if task.role == "report"]
    closed = [replace(task, read=_WHOLE.get(task.name, task.read)) for task in report]
    closed += [replace(TASKS[name], read=read) for name, read in _UNTOUCHED.items()]
    opened = [replace(TASKS[name], read=read) for name, read in _OPEN.items()]
    return _passages(closed, root) - _passages(opened, root)


def _passages(tasks: list[Task], root: Path) -> set[str]:
    """Passages with their white space evened out, as `reserved` compares them."""
    texts = (t for task in tasks for q in task.questions(root) for t in q.passages)
    return {" ".join(text.split()) for text in texts}


def main(
    data: Annotated[Path, typer.Option(help="Folder with the data sets, one folder each.")],
    out: Annotated[Path, typer.Option(help="File to write.")] = reserved.FILE,
) -> None:
    """List the passages of every report split, so that `cag train` refuses them."""
    try:
        content = reserved.packed(reserved_passages(data))
    except CagError as error:
        typer.echo(f"eval.data.reserve: {error}", err=True)
        raise typer.Exit(2) from error
    out.write_bytes(content)
    typer.echo(f"wrote {len(content) // 8} hashes to {out}")


if __name__ == "__main__":
    typer.run(main)
