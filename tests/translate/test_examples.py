"""Every kind of training file gives passages and questions."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from conftest import TEXT

from cag.errors import IngestError
from cag.translate.examples import Example, cloze, read_examples


def written(path: Path, content: Any) -> str:
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture
def squad(tmp_path: Path) -> str:
    """Six passages in two articles; the third has an unanswerable question only."""
    paragraphs = [
        {
            "context": f" Passage {i} says that boats are blue. ",
            "qas": [
                {"question": f" Colour {i}? ", "answers": [{"text": "blue"}, {"text": "navy"}]},
                {"question": "Why?", "answers": []},
            ],
        }
        for i in range(6)
    ]
    del paragraphs[2]["qas"][0]
    articles = [{"paragraphs": paragraphs[:3]}, {"paragraphs": paragraphs[3:]}]
    return written(tmp_path / "squad.json", {"version": "1.1", "data": articles})


def test_squad(squad: str) -> None:
    examples = read_examples(squad)
    assert len(examples) == 6
    assert examples[0] == Example("Passage 0 says that boats are blue.", (("Colour 0?", "blue"),))


def test_json_lines(tmp_path: Path) -> None:
    rows = [
        {"question": "is it red", "answer": True, "passage": " It is red. "},
        {"question": "Is it blue?", "answer": False, "passage": "It is not blue."},
        {"question": "which colour", "answer": "green", "passage": "It is green."},
        {"question": "How many?", "answer": 42, "passage": "There are 42."},
    ]
    source = written(tmp_path / "x.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert read_examples(source) == [
        Example("It is red.", (("Is it red?", "yes"),)),
        Example("It is not blue.", (("Is it blue?", "no"),)),
        Example("It is green.", (("Which colour?", "green"),)),
        Example("There are 42.", (("How many?", "42"),)),
    ]


def test_pubmedqa(tmp_path: Path) -> None:
    row = {"QUESTION": "Does it help?", "CONTEXTS": ["We tried.", "It did."]}
    source = written(tmp_path / "x.json", {"1234": {**row, "final_decision": "yes"}})
    assert read_examples(source) == [Example("We tried. It did.", (("Does it help?", "yes"),))]


def test_plain_text_is_cut_at_words_and_gets_cloze_questions(tmp_path: Path) -> None:
    text = TEXT * 12
    examples = read_examples(written(tmp_path / "x.txt", text))
    assert all(250 < len(e.text) <= 1000 for e in examples)
    kept = " ".join(e.text for e in examples)
    assert text.startswith(kept) and len(text) - len(kept) <= 251  # a short rest is left out
    for example in examples:
        assert len(example.questions) == 3
        for question, answer in example.questions:
            half = question.removeprefix('How does "').removesuffix('" go on?')
            assert f"{half} {answer}" in example.text


def test_cloze_questions_depend_on_the_seed_alone(tmp_path: Path) -> None:
    source = written(tmp_path / "x.txt", TEXT * 4)
    assert read_examples(source, seed=1) == read_examples(source, seed=1)
    assert read_examples(source, seed=1) != read_examples(source, seed=2)


def test_short_sentences_make_no_question() -> None:
    assert cloze("Boats are blue. Why? They are.", random.Random(0)) == ()


def test_wikitext_reads_like_text(tmp_path: Path) -> None:
    line = "The <unk> 's well @-@ known boat ( built in 1 @,@ 874 ) cost 3 @.@ 5 pounds . " * 6
    source = written(tmp_path / "x.tokens", f" = Boats = \n\n{line}\n = = More = = \n")
    (example,) = read_examples(source)
    assert example.text.startswith("The Kern's well-known boat (built in 1,874) cost 3.5 pounds.")
    assert "=" not in example.text


@pytest.mark.parametrize(
    ("part", "numbers"),
    [("[:2]", [0, 1]), ("[4:]", [4, 5]), ("[1:3]", [1, 2]), ("[:]", range(6)), ("[5:99]", [5])],
)
def test_a_slice_takes_passages(squad: str, part: str, numbers: Any) -> None:
    texts = [example.text for example in read_examples(squad + part)]
    assert texts == [f"Passage {i} says that boats are blue." for i in numbers]


def test_slices_keep_splits_apart(squad: str) -> None:
    assert read_examples(f"{squad}[:3]") + read_examples(f"{squad}[3:]") == read_examples(squad)


UNREADABLE = {
    "not.json": "{",
    "other.json": {"a": {"b": 1}},
    "text.json": {"a": "b"},
    "number.json": "5",
    "no_answers.json": {"data": [{"paragraphs": [{"context": "x", "qas": [{"question": "y"}]}]}]},
    "nothing.json": {},
    "no_articles.json": {"data": []},
    "not.jsonl": "boats\n",
    "other.jsonl": '{"question": "x", "passage": "y"}\n',
    "list.jsonl": "[1]\n",
    "null.jsonl": '{"question": "x?", "passage": "y", "answer": null}\n',
    "number.jsonl": '{"question": "x?", "passage": 3, "answer": "y"}\n',
    "nothing.jsonl": "",
    "nothing.txt": "",
    "headings.txt": "= Boats =\n\n = = Ships = =\n",
}


@pytest.mark.parametrize(("name", "content"), UNREADABLE.items(), ids=UNREADABLE.keys())
def test_unknown_or_empty_files_are_refused_in_one_line(
    name: str, content: Any, tmp_path: Path
) -> None:
    source = written(tmp_path / name, content)
    with pytest.raises(IngestError) as caught:
        read_examples(source)
    assert source in str(caught.value) and "\n" not in str(caught.value)


def test_missing_files_bare_folders_bytes_and_empty_slices_are_refused(
    squad: str, tmp_path: Path
) -> None:
    binary, bare = tmp_path / "x.bin", tmp_path / "bare"
    binary.write_bytes(b"\x00\xff\xfa" * 400)
    bare.mkdir()
    for source in (tmp_path / "none.json", bare, binary, f"{squad}[6:]", f"{squad}[3:3]"):
        with pytest.raises(IngestError):
            read_examples(str(source))


@pytest.mark.parametrize("content", [[{"question": "x", "answer": "y", "passage": "z"}], '"text"'])
def test_json_that_is_no_object_is_refused(content: Any, tmp_path: Path) -> None:
    with pytest.raises(IngestError):
        read_examples(written(tmp_path / "x.json", content))


def test_a_folder_gives_its_documents(tmp_path: Path) -> None:
    text = "The old harbour was built by sailors from the north in 1874. " * 6
    (tmp_path / "a.md").write_text(f"# Title\n\n{text}")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b.html").write_text(f"<p>{text.replace('1874', '1902')}</p>")
    (tmp_path / "data.bin").write_bytes(b"\0" * 9)
    one, two = read_examples(str(tmp_path))
    assert "1874" in one.text and "1902" in two.text and "<p>" not in two.text
    assert one.questions and "go on?" in one.questions[0][0]
    assert read_examples(f"{tmp_path}[1:]") == [two]
    row = {"question": "what", "answer": "that", "passage": "A passage of its own."}
    (tmp_path / "c.jsonl").write_text(json.dumps(row))
    assert read_examples(str(tmp_path))[1] == Example(row["passage"], (("What?", "that"),))
    (tmp_path / "empty.md").write_text("")
    with pytest.raises(IngestError, match=r"empty.md': holds no text"):
        read_examples(str(tmp_path))


def test_json_lines_end_only_at_newlines(tmp_path: Path) -> None:
    row = {"question": "where?", "answer": "here", "passage": "One\u2028two."}
    source = written(tmp_path / "x.jsonl", json.dumps(row, ensure_ascii=False) + "\n")
    assert read_examples(source)[0].text == "One\u2028two."
