"""Questions come from files, the same ones for the same seed, and from their own split only."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cag.errors import CagError, DownloadFailed, IngestError
from cag.translate.examples import read_examples
from eval.data import TASKS, Question, find_task, read_squad, sample
from eval.data.among import read_among
from eval.data.boolq import read_boolq
from eval.data.covidqa import read_covidqa
from eval.data.hotpotqa import read_hotpotqa
from eval.data.hub import HUB, export
from eval.data.pubmedqa import read_pubmedqa
from eval.data.strategyqa import read_strategyqa
from eval.data.synthetic import read_synthetic

FILES = [name for name, task in TASKS.items() if task.file]


def written(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return path


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# -- SQuAD ---------------------------------------------------------------------------------


def qa(identifier: Any, *answers: str) -> dict[str, Any]:
    found = [{"text": text, "answer_start": 0} for text in answers]
    return {"id": identifier, "question": f" Question {identifier}? ", "answers": found}


def squad(*paragraphs: dict[str, Any]) -> dict[str, Any]:
    """One article to every two paragraphs."""
    halves = [paragraphs[at : at + 2] for at in range(0, len(paragraphs), 2)]
    return {"version": "1.1", "data": [{"title": "T", "paragraphs": half} for half in halves]}


@pytest.fixture
def six(tmp_path: Path) -> Path:
    """A file of six paragraphs in three articles, with a question each."""
    paragraphs = [{"context": f"Paragraph {i}.", "qas": [qa(f"q{i}", "a")]} for i in range(6)]
    return written(tmp_path / "six.json", squad(*paragraphs))


def test_questions_have_passage_and_distinct_answers(tmp_path: Path) -> None:
    first = {
        "context": "\nThe café is red. ",
        "qas": [qa("q1", "red", "red", "a red"), qa(2, "é")],
    }
    nothing = {"context": "Nothing.", "qas": [qa("unanswerable")]}
    assert read_squad(written(tmp_path / "dev.json", squad(first, nothing))) == [
        Question("q1", ("The café is red.",), "Question q1?", ("red", "a red")),
        Question("2", ("The café is red.",), "Question 2?", ("é",)),
    ]


@pytest.mark.parametrize(
    ("part", "ids"),
    [("", "012345"), ("[1:4]", "123"), ("[:2]", "01"), ("[4:]", "45"), ("[5:99]", "5")],
)
def test_any_squad_file_is_a_task(six: Path, part: str, ids: str, tmp_path: Path) -> None:
    task = find_task(f"{six}{part}")
    assert task.role == "report"
    assert {q.id for q in task.questions(tmp_path / "elsewhere")} == {f"q{i}" for i in ids}


def test_the_path_of_a_file_is_not_below_the_data_folder(
    six: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(six.parent)
    assert len(find_task("six.json").questions(Path("/nowhere"))) == 6


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_found_by_its_name(name: str) -> None:
    assert find_task(name) is TASKS[name]


@pytest.mark.parametrize("name", ["", "squad", "xquad[0:10]", "notes.txt", "XQuAD"])
def test_an_unknown_task_lists_the_known_ones_in_one_line(name: str) -> None:
    with pytest.raises(IngestError) as caught:
        find_task(name)
    message = str(caught.value)
    assert "\n" not in message and f"'{name}'" in message
    assert all(known in message for known in TASKS)


# -- reading goes wrong --------------------------------------------------------------------

MALFORMED = {
    "empty": b"",
    "no JSON": b"not json",
    "no text": b"\xff\xfe\x00",
    "number": b"3",
    "other object": b'{"data": 3}',
    "texts": b'["abc"]',
    "texts in data": b'{"data": ["abc"]}',
    "objects without fields": b'[{"a": 1}]',
    "by id without fields": b'{"1": {"a": 1}}',
    "no answers": json.dumps(squad({"context": "C", "qas": [{"id": 1, "question": "Q"}]})).encode(),
    "answer is text": json.dumps(
        squad({"context": "C", "qas": [{"id": 1, "question": "Q", "answers": "a"}]})
    ).encode(),
    "null context": json.dumps(squad({"context": None, "qas": [qa(1, "a")]})).encode(),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_file_is_a_user_error(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / TASKS[name].file
    path.parent.mkdir()
    path.write_bytes(content)
    written(path.with_name("train.json"), [])
    written(path.with_name("test_ground_truth.json"), {"1": "yes"})
    with pytest.raises(IngestError) as caught:
        TASKS[name].questions(tmp_path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_a_user_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(IngestError, match=f"'{name}'"):
        TASKS[name].questions(tmp_path)


@pytest.mark.parametrize(("name", "beside"), [("pubmedqa", "test_gr"), ("strategyqa", "train")])
def test_the_file_that_fixes_the_split_must_be_there(
    name: str, beside: str, tmp_path: Path
) -> None:
    written(tmp_path / TASKS[name].file, {} if name == "pubmedqa" else [])
    with pytest.raises(IngestError, match=beside):
        TASKS[name].questions(tmp_path)


# -- BoolQ ---------------------------------------------------------------------------------

BOOLQ = [
    {"question": "is it red", "answer": True, "passage": "It is red."},
    {"question": "is it blue", "answer": False, "passage": "It is blue or not."},
    {"question": "is it old?", "answer": False, "passage": " It  is red.\n"},
    {"question": "does it (really) float??", "answer": True, "passage": " It floats. "},
    {"question": "can it sink", "answer": False, "passage": "It floats."},
]


def test_boolq_reports_on_no_passage_that_an_earlier_row_has(tmp_path: Path) -> None:
    path = written(tmp_path / "dev.jsonl", lines(BOOLQ) + "\n")
    assert [q.id for q in read_boolq(path)] == ["row-0", "row-1", "row-2", "row-3", "row-4"]
    assert read_boolq(path, first=2) == [
        Question("row-3", ("It floats.",), "Does it (really) float?", ("yes",), ("yes", "no")),
        Question("row-4", ("It floats.",), "Can it sink?", ("no",), ("yes", "no")),
    ]


def test_the_boolq_task_begins_at_row_2000(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": True, "passage": f"{i % 2001}."} for i in range(2003)]
    written(tmp_path / TASKS["boolq"].file, lines(rows))
    assert [q.id for q in TASKS["boolq"].questions(tmp_path)] == ["row-2000"]


def test_boolq_is_trained_on_and_measured_with_the_same_text(tmp_path: Path) -> None:
    path = written(tmp_path / "dev.jsonl", lines(BOOLQ))
    measured = [(q.passages[0], ((q.question, q.answers[0]),)) for q in read_boolq(path)]
    assert measured == [(e.text, e.questions) for e in read_examples(str(path))]


@pytest.mark.parametrize("answer", ["yes", 1, None])
def test_an_answer_that_is_no_truth_value_is_refused(answer: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", lines([{**BOOLQ[0], "answer": answer}]))
    with pytest.raises(ValueError, match="true or false"):
        read_boolq(path)


# -- PubMedQA ------------------------------------------------------------------------------

PUBMEDQA = {
    "11": {"QUESTION": "Is it so?", "CONTEXTS": ["We tried. ", "It was."], "final_decision": "yes"},
    "12": {"QUESTION": "Is it not?", "CONTEXTS": ["We slept."], "final_decision": "maybe"},
    "13": {"QUESTION": "Is it?", "CONTEXTS": ["We left."], "final_decision": "no"},
}


def test_pubmedqa_reports_on_the_test_ids_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "ori.json", PUBMEDQA)
    written(tmp_path / "test_ground_truth.json", {"13": "no", "11": "yes"})
    choices = ("yes", "no", "maybe")
    assert sorted(read_pubmedqa(path), key=lambda q: q.id) == [
        Question("11", ("We tried.  It was.",), "Is it so?", ("yes",), choices),
        Question("13", ("We left.",), "Is it?", ("no",), choices),
    ]
    trained = {example.text for example in read_examples(str(path))}
    assert {q.passages[0] for q in read_pubmedqa(path)} < trained


@pytest.mark.parametrize(
    ("test", "change"),
    [
        ({"99": "yes"}, {}),
        ({"11": "yes"}, {"final_decision": "perhaps"}),
        ({"11": "yes"}, {"CONTEXTS": "one text"}),
    ],
)
def test_pubmedqa_with_unknown_ids_or_answers_is_refused(
    test: dict[str, str], change: dict[str, Any], tmp_path: Path
) -> None:
    path = written(tmp_path / TASKS["pubmedqa"].file, {"11": {**PUBMEDQA["11"], **change}})
    written(path.with_name("test_ground_truth.json"), test)
    with pytest.raises(IngestError):
        TASKS["pubmedqa"].questions(tmp_path)


# -- HotpotQA ------------------------------------------------------------------------------


def hotpotqa(identifier: str, distractors: int = 3) -> dict[str, Any]:
    return {
        "_id": identifier,
        "question": " Which? ",
        "answer": "this",
        "para_a": ["The first.", " It goes on."],
        "para_b": ["The second."],
        "distractors": [[f"T{i}", [f"Wrong {i}.", " So."], 1.5] for i in range(distractors)],
    }


def test_hotpotqa_gives_both_paragraphs_and_distractors_only_if_wanted(tmp_path: Path) -> None:
    path = written(tmp_path / "dev.json", [hotpotqa("a"), hotpotqa("b", distractors=0)])
    given = {"The first. It goes on.", "The second."}
    for question in read_hotpotqa(path):
        assert len(question.passages) == 2 and set(question.passages) == given
    first, second = read_hotpotqa(path, distractors=True)
    assert len(first.passages) == 5
    assert set(first.passages) == given | {f"Wrong {i}. So." for i in range(3)}
    assert set(second.passages) == given
    assert (first.id, first.question, first.answers, first.choices) == (
        "a",
        "Which?",
        ("this",),
        (),
    )


@pytest.mark.parametrize(("distractors", "orders"), [(False, 2), (True, 120)])
def test_the_order_of_passages_follows_from_the_id(
    distractors: bool, orders: int, tmp_path: Path
) -> None:
    rows = [hotpotqa(str(i)) for i in range(40)]
    forwards = read_hotpotqa(written(tmp_path / "a.json", rows), distractors)
    backwards = read_hotpotqa(written(tmp_path / "b.json", rows[::-1]), distractors)
    assert forwards == backwards[::-1]
    seen = Counter(question.passages for question in forwards)
    assert len(seen) > orders // 6 and max(seen.values()) < 35  # no order is preferred


# -- StrategyQA ----------------------------------------------------------------------------


def strategyqa(identifier: str, answer: Any, *facts: str) -> dict[str, Any]:
    return {"qid": identifier, "question": f"{identifier}? ", "answer": answer, "facts": facts}


def test_strategyqa_reports_on_no_question_that_shares_a_fact_with_training(
    tmp_path: Path,
) -> None:
    written(tmp_path / "train.json", [strategyqa("t", True, "Boats float.", "Stones sink.")])
    rows = [
        strategyqa("kept", False, "Wood floats. ", "Iron sinks."),
        strategyqa("same", True, "Water is wet.", "Boats float."),
        strategyqa("nearly the same", True, "stones sink", "Water is wet."),
        strategyqa("nothing", True),
    ]
    assert read_strategyqa(written(tmp_path / "dev.json", rows)) == [
        Question("kept", ("Wood floats. Iron sinks.",), "kept?", ("no",), ("yes", "no"))
    ]


# -- COVID-QA ------------------------------------------------------------------------------

WORDS = [f"word{i}" for i in range(3000)]
ARTICLE = " ".join(WORDS)


def covidqa(tmp_path: Path, *answers: tuple[str, int], article: str = ARTICLE) -> list[Question]:
    qas = [
        {"id": i, "question": "Q?", "answers": [{"text": text, "answer_start": start}]}
        for i, (text, start) in enumerate(answers)
    ]
    return read_covidqa(written(tmp_path / "c.json", squad({"context": article, "qas": qas})))


def test_a_window_of_whole_words_holds_the_answer(tmp_path: Path) -> None:
    within_words = ["d1500 word1501 wo", ARTICLE[10_002:11_500], ARTICLE[17_004:18_504]]
    wanted = ["word0 word1", "word2998 word2999", *within_words, *WORDS[5:3000:100]]
    questions = covidqa(tmp_path, *((text, 0) for text in wanted))
    assert [q.answers for q in questions] == [(text,) for text in wanted]
    for text, question in zip(wanted, questions, strict=True):
        (passage,) = question.passages
        assert text in passage
        assert 1450 <= len(passage) <= 1520
        words = passage.split()
        at = WORDS.index(words[0])
        assert words == WORDS[at : at + len(words)]


def test_the_answer_stands_anywhere_in_the_window(tmp_path: Path) -> None:
    questions = covidqa(tmp_path, *((word, 0) for word in WORDS[1000:1200]))
    places = [q.passages[0].index(q.answers[0]) / len(q.passages[0]) for q in questions]
    thirds = Counter(min(2, int(3 * place)) for place in places)
    assert min(thirds[third] for third in range(3)) > 40
    assert questions == covidqa(tmp_path, *((word, 0) for word in WORDS[1000:1200]))


@pytest.mark.parametrize("offset", [0, 9_990, 10_300, 40_000])
def test_of_several_places_the_nearest_to_the_offset_is_taken(offset: int, tmp_path: Path) -> None:
    places = {0, 1_500, 3_000}
    article = " ".join("here" if i in places else word for i, word in enumerate(WORDS))
    starts = [at for at in range(len(article)) if article.startswith("here", at)]
    nearest = min(starts, key=lambda start: abs(start - offset))
    (question,) = covidqa(tmp_path, ("here", offset), article=article)
    at = article.index(question.passages[0])
    assert at <= nearest < at + len(question.passages[0])


def test_answers_that_do_not_occur_are_left_out(tmp_path: Path) -> None:
    questions = covidqa(tmp_path, ("nowhere", 0), (" word7 ", 0), ("", 0))
    assert [(q.id, q.answers) for q in questions] == [("1", ("word7",))]


@pytest.mark.parametrize("article", ["Short.", "x" * 5000, ARTICLE[:1600]])
def test_short_articles_and_long_answers_are_given_whole(article: str, tmp_path: Path) -> None:
    (question,) = covidqa(tmp_path, (article, 3), article=f" {article}\n")
    assert question.passages == (article,)


# -- made-up facts -------------------------------------------------------------------------

NOWHERE = Path("/nowhere")


def test_made_up_passages_hold_their_one_word_answers_once() -> None:
    questions = TASKS["synthetic"].questions(NOWHERE)
    assert len(questions) == len({q.id for q in questions}) == 500
    assert len({(q.question, q.passages) for q in questions}) == 500
    for question in questions:
        words = question.passages[0].replace(",", "").replace(".", "").split()
        assert 40 <= len(words) <= 60
        assert words.count(question.answers[0]) == 1
        assert question.answers[0] not in question.question.split()


def test_a_made_up_question_has_one_answer_in_all_passages() -> None:
    asked = Counter(q.question for q in read_synthetic(NOWHERE))
    assert set(asked.values()) == {1}


def test_a_seed_fixes_what_is_made_up() -> None:
    assert read_synthetic(NOWHERE, seed=1) == read_synthetic(NOWHERE, seed=1)
    ours = {q.passages for q in read_synthetic(NOWHERE, seed=0)}
    assert not ours & {q.passages for q in read_synthetic(NOWHERE, seed=1)}


def test_no_kind_of_made_up_answer_can_be_guessed() -> None:
    """Whoever always gives the commonest answer is right for few."""
    answers = Counter(q.answers[0] for q in read_synthetic(NOWHERE))
    assert answers.most_common(1)[0][1] < 25


# -- drawing -------------------------------------------------------------------------------

QUESTIONS = [Question(f"q{i}", (f"passage {i % 7}",), "?", ("a",)) for i in range(50)]


def test_a_seed_fixes_the_sample() -> None:
    assert sample(QUESTIONS, 20, seed=1) == sample(QUESTIONS, 20, seed=1)
    assert sample(QUESTIONS, 20, seed=1) != sample(QUESTIONS, 20, seed=2)


@pytest.mark.parametrize(("n", "size"), [(1, 1), (20, 20), (50, 50), (1000, 50)])
def test_a_sample_has_no_question_twice(n: int, size: int) -> None:
    drawn = sample(QUESTIONS, n, seed=0)
    assert len(drawn) == len(set(drawn)) == size
    assert set(drawn) <= set(QUESTIONS)


@pytest.mark.parametrize("n", [20, 1000])
def test_passages_stay_together(n: int) -> None:
    drawn = sample(QUESTIONS, n, 0)
    runs = [passages for passages, _ in itertools.groupby(q.passages for q in drawn)]
    assert len(runs) == len(set(runs))


def test_a_task_draws_as_many_as_asked_for(six: Path) -> None:
    task = find_task(str(six))
    assert len(task.questions(NOWHERE)) == 6
    drawn = task.questions(NOWHERE, n=2, seed=3)
    assert len(drawn) == 2 and drawn == task.questions(NOWHERE, n=2, seed=3)


# -- the hub -------------------------------------------------------------------------------

SECRET = read_synthetic(NOWHERE)[0].passages[0]  # a reserved text that may be shown

HUB_ROWS: dict[str, list[dict[str, Any]]] = {
    "xquad": [
        {
            "id": f"q{i}",
            "context": f"Paragraph {i // 2}.",
            "question": f"Q{i}?",
            "answers": {"text": ["a", "b"], "answer_start": [0, 2]},
        }
        for i in range(3)
    ],
    "boolq": [
        *({"question": "q", "answer": True, "passage": f"{i}."} for i in range(2000)),
        {"question": "is it", "answer": False, "passage": "It floats."},
    ],
    "pubmedqa": [
        {
            "pubid": 7,
            "question": "Is it?",
            "context": {"contexts": SECRET.split("\n"), "labels": ["A"], "meshes": []},
            "long_answer": "Perhaps.",
            "final_decision": "maybe",
        },
        {
            "pubid": 8,
            "question": "Is it not?",
            "context": {"contexts": ["Open to", "training."], "labels": ["A"], "meshes": []},
            "long_answer": "No.",
            "final_decision": "no",
        },
    ],
    "hotpotqa": [
        {
            "id": "h",
            "question": "Which?",
            "answer": "this",
            "supporting_facts": {"title": ["B", "D", "B"], "sent_id": [0, 0, 1]},
            "context": {
                "title": ["A", "B", "C", "D"],
                "sentences": [["a."], ["b.", " more b."], ["c."], ["d."]],
            },
        }
    ],
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for the `datasets` library, and knows the sets by what we call them."""
    names = {(found.id, found.config, found.split): name for name, found in HUB.items()}

    def load_dataset(path: str, name: str | None, *, split: str) -> list[dict[str, Any]]:
        return HUB_ROWS[names[path, name, split]]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "xquad",
            [
                Question("q0", ("Paragraph 0.",), "Q0?", ("a", "b")),
                Question("q1", ("Paragraph 0.",), "Q1?", ("a", "b")),
                Question("q2", ("Paragraph 1.",), "Q2?", ("a", "b")),
            ],
        ),
        ("boolq", [Question("row-2000", ("It floats.",), "Is it?", ("no",), ("yes", "no"))]),
        ("pubmedqa", [Question("7", (SECRET,), "Is it?", ("maybe",), ("yes", "no", "maybe"))]),
    ],
)
@pytest.mark.usefixtures("hub")
def test_what_the_hub_gives_is_read_by_the_task(
    name: str, expected: list[Question], tmp_path: Path
) -> None:
    assert export(name, tmp_path) == tmp_path / TASKS[name].file
    assert TASKS[name].questions(tmp_path) == expected


@pytest.mark.usefixtures("hub")
def test_hotpotqa_from_the_hub_tells_given_paragraphs_from_distractors(tmp_path: Path) -> None:
    export("hotpotqa", tmp_path)
    (question,) = TASKS["hotpotqa"].questions(tmp_path)
    assert set(question.passages) == {"b. more b.", "d."}
    (question,) = TASKS["hotpotqa_distractors"].questions(tmp_path)
    assert sorted(question.passages) == ["a.", "b. more b.", "c.", "d."]


@pytest.mark.usefixtures("hub")
def test_paragraphs_of_the_hub_are_counted_as_in_the_file(tmp_path: Path) -> None:
    path = export("xquad", tmp_path)
    assert [q.id for q in find_task(f"{path}[1:2]").questions(tmp_path)] == ["q2"]


def test_without_the_library_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CagError, match="pip install datasets"):
        export("xquad", tmp_path)


def test_a_set_that_is_not_on_the_hub_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(CagError, match="xquad, boolq, pubmedqa, hotpotqa"):
        export("synthetic", tmp_path)


@pytest.mark.parametrize("name", HUB)
def test_a_hub_that_fails_or_has_other_columns_is_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ConnectionError("no\nroute")

    def changed(*_: Any, **__: Any) -> list[dict[str, Any]]:
        return [{"other": 1}]

    for load in (fails, changed):
        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
        with pytest.raises(DownloadFailed) as caught:
            export(name, tmp_path)
        assert HUB[name].id in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_the_right_passage_stands_first_or_last_among_others(
    count: int, last: bool, tmp_path: Path
) -> None:
    def read(path: Path) -> list[Question]:
        return [Question(f"q{i}", (f"passage {i // 2}",), "What?", ("a",)) for i in range(12)]

    found = read_among(tmp_path, read, count, last)
    assert found == read_among(tmp_path, read, count, last)
    for plain, question in zip(read(tmp_path), found, strict=True):
        assert question.passages[-1 if last else 0] == plain.passages[0]
        assert len(question.passages) == len(set(question.passages)) == count
        assert (question.id, question.answers) == (plain.id, plain.answers)
    assert len({question.passages for question in found}) > 6
    names = [
        f"{task}_{count}_{name}" for task in ("xquad", "squadshifts") for name in ("first", "last")
    ]
    assert [TASKS[name].role for name in names] == ["report", "report", "choose", "choose"]
