"""What is reported on can be neither trained on nor chosen by."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from conftest import TEXT
from typer import Typer
from typer.testing import CliRunner

from cag.errors import CagError, IngestError, ReservedPassage
from cag.translate import reserved
from cag.translate.examples import read_examples
from eval.data import TASKS
from eval.data.reserve import main
from eval.data.synthetic import read_synthetic

NOWHERE = Path("/nowhere")

#: Passages that the shipped list holds and that belong to nobody.
RESERVED = sorted({q.passages[0] for q in TASKS["synthetic"].questions(NOWHERE)})
FREE = sorted({q.passages[0] for q in read_synthetic(NOWHERE, seed=1)})


def jsonl(path: Path, passages: list[str]) -> str:
    rows = [{"question": "what", "answer": "that", "passage": text} for text in passages]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_the_shipped_list_holds_every_passage_of_a_report_split() -> None:
    assert len(RESERVED) == 250
    assert all(map(reserved.holds, RESERVED))
    assert not any(map(reserved.holds, FREE))


def test_reserved_passages_are_refused_with_their_number_and_file(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "x.jsonl", [FREE[0], RESERVED[0], FREE[1], RESERVED[1], FREE[2]])
    with pytest.raises(ReservedPassage) as caught:
        read_examples(source)
    message = str(caught.value)
    assert isinstance(caught.value, CagError) and "\n" not in message
    assert f"2 of the 5 passages of '{source}'" in message
    assert "report split" in message and "FILE[0:1000]" in message


def test_reserved_passages_are_left_out_on_request(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "x.jsonl", [FREE[0], RESERVED[0], FREE[1]])
    assert [e.text for e in read_examples(source, drop_reserved=True)] == FREE[:2]
    only = jsonl(tmp_path / "y.jsonl", RESERVED[:2])
    with pytest.raises(IngestError, match="no passages to train on"):
        read_examples(only, drop_reserved=True)


@pytest.mark.parametrize(
    ("part", "refused"),
    [("[0:2]", False), ("[3:]", False), ("[:3]", True), ("[2:3]", True), ("", True)],
)
def test_only_the_slice_counts(part: str, refused: bool, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "x.jsonl", [*FREE[:2], RESERVED[0], *FREE[2:4]]) + part
    if refused:
        with pytest.raises(ReservedPassage):
            read_examples(source)
    else:
        assert {example.text for example in read_examples(source)} < set(FREE)


def squad(passage: str) -> dict[str, Any]:
    qas = [{"id": "q", "question": "Q?", "answers": [{"text": "a", "answer_start": 0}]}]
    return {"data": [{"paragraphs": [{"context": passage, "qas": qas}]}]}


def pubmedqa(passage: str) -> dict[str, Any]:
    half = passage.index("Every")
    contexts = [passage[: half - 1], passage[half:]]
    return {"1": {"QUESTION": "Q?", "CONTEXTS": contexts, "final_decision": "yes"}}


@pytest.mark.parametrize("form", [squad, pubmedqa])
def test_every_format_is_checked(form: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(form(FREE[0])), encoding="utf-8")
    assert read_examples(str(path))[0].text == FREE[0]
    path.write_text(json.dumps(form(RESERVED[0])), encoding="utf-8")
    with pytest.raises(ReservedPassage, match="1 of the 1 passages"):
        read_examples(str(path))


def test_plain_text_is_checked_and_other_text_is_free(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text(RESERVED[0], encoding="utf-8")
    with pytest.raises(ReservedPassage):
        read_examples(str(path))
    path.write_text(TEXT * 4, encoding="utf-8")
    assert read_examples(str(path))


@pytest.mark.parametrize("change", [" {} ", "\n{}\n\n", "\u00a0{}\u2028"])
def test_white_space_makes_no_difference(change: str) -> None:
    changed = change.format(RESERVED[0]).replace(" was ", " \t was\n")
    assert changed.split() == RESERVED[0].split()
    with pytest.raises(ReservedPassage, match="1 of the 2"):
        reserved.check([FREE[0], changed], "x.json")


@pytest.mark.parametrize("text", ["", " ", "\ud800", RESERVED[0][:-1], RESERVED[0].upper()])
def test_other_text_passes(text: str) -> None:
    reserved.check([text], "x.json")


def test_the_list_depends_on_the_texts_alone() -> None:
    assert reserved.packed(RESERVED) == reserved.packed([*RESERVED[::-1], f" {RESERVED[0]}\n"])
    assert len(reserved.packed(RESERVED)) == 8 * len(RESERVED)


def test_the_list_is_in_the_package() -> None:
    """Without it, an installed `cag train` would not start; with an empty one, nothing is kept."""
    root = Path(__file__).parents[2]
    packaging = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    patterns = packaging["setuptools"]["package-data"]["cag"]
    assert reserved.FILE in {path for p in patterns for path in (root / "cag").glob(p)}


# -- writing the list ----------------------------------------------------------------------


def paragraphs(name: str, count: int) -> dict[str, Any]:
    """A SQuAD file of `count` passages, `name` and a number."""
    articles = [article for i in range(count) for article in squad(f"{name} {i}")["data"]]
    for i, article in enumerate(articles):
        article["paragraphs"][0]["qas"][0]["id"] = f"{name}{i}"
    return {"data": articles}


def strategyqa(fact: str) -> list[dict[str, Any]]:
    return [{"qid": fact, "question": "Q?", "answer": True, "facts": [fact, f"{fact} too"]}]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with a small version of every data set."""
    shared = "a boolq passage of rows 0-1999"
    boolq = [f"boolq {i}" for i in range(1999)] + [shared, shared, "boolq report"]
    shifts = paragraphs("shift", 1303)
    shifts["data"][1301]["paragraphs"][0]["context"] = shared
    article = " ".join(f"word{i}" for i in range(2000)) + " a"
    hotpotqa = {
        "_id": "h",
        "question": "Q?",
        "answer": "a",
        "para_a": ["one", " and"],
        "para_b": ["two"],
        "distractors": [["T", ["three"], 1.0]],
    }
    pubmed = {
        str(i): {"QUESTION": "Q?", "CONTEXTS": ["abstract", str(i)], "final_decision": "no"}
        for i in range(3)
    }
    contents: dict[str, Any] = {
        TASKS["xquad"].file: paragraphs("xquad", 2),
        TASKS["squadshifts"].file: shifts,
        TASKS["covidqa"].file: squad(article),
        TASKS["pubmedqa"].file: pubmed,
        "pubmedqa/test_ground_truth.json": {"1": "no"},
        TASKS["hotpotqa"].file: [hotpotqa],
        TASKS["strategyqa"].file: strategyqa("dev fact"),
        "strategyqa/train.json": strategyqa("train fact"),
    }
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "boolq").mkdir()
    jsonl(tmp_path / TASKS["boolq"].file, boolq)
    text = (tmp_path / TASKS["boolq"].file).read_text(encoding="utf-8")
    (tmp_path / TASKS["boolq"].file).write_text(text.replace('"that"', "true"), encoding="utf-8")
    return tmp_path


def reserve(*arguments: str) -> Any:
    app = Typer()
    app.command()(main)
    return CliRunner().invoke(app, arguments)


def test_the_list_is_made_of_the_report_splits(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "reserved.bin"
    result = reserve("--data", str(data), "--out", str(out))
    assert result.exit_code == 0, result.output
    article = json.loads((data / TASKS["covidqa"].file).read_text(encoding="utf-8"))
    expected = [
        "xquad 0",
        "xquad 1",
        "shift 1300",  # 1301 is a passage that BoolQ's part for training has too
        "shift 1302",
        article["data"][0]["paragraphs"][0]["context"],
        "boolq report",
        "abstract 1",
        "one and",
        "two",
        "three",
        "dev fact dev fact too",
        *RESERVED,
    ]
    assert out.read_bytes() == reserved.packed(expected)
    assert str(len(expected)) in result.output


def test_a_missing_data_set_leaves_the_list_alone(data: Path, tmp_path: Path) -> None:
    (data / TASKS["strategyqa"].file).unlink()
    out = tmp_path / "reserved.bin"
    out.write_bytes(b"12345678")
    result = reserve("--data", str(data), "--out", str(out))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "strategyqa" in line
    assert out.read_bytes() == b"12345678"
