"""Passages are exact stretches of the document, none too long, nothing lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cag.documents import Document, Span, split

Counter = Callable[[str], int]


def words(text: str) -> int:
    return len(text.split())


COUNTERS: list[Counter] = [words, len, lambda text: len(text.encode())]
BLANKS = ["\n\n", " \n \n", "\t", " " * 40]
MARKS = ["# One\n", "\n## Two\n", "### Deep #\n", "```\n", "~~~\n"]
PROSE = [
    "word ",
    "A sentence. ",
    "He said “no.” ",
    "x" * 30,
    "东京。",
    "e\u0301",
    "👍🏽",
    "👩\u200d🚀",
]
STRUCTURED = st.lists(st.sampled_from(BLANKS + MARKS + PROSE)).map("".join)


def document(text: str, kind: str = "text", title: str = "Doc") -> Document:
    return Document("/doc", title, text, kind, "0" * 64)


def titles(spans: list[Span]) -> list[str]:
    return [span.title for span in spans]


def texts(spans: list[Span]) -> list[str]:
    return [span.text for span in spans]


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(
    text=STRUCTURED | st.text(max_size=200),
    kind=st.sampled_from(["markdown", "code"]),
    count=st.sampled_from(COUNTERS),
    limit=st.integers(4, 60),
)
def test_passages_are_exact_short_and_lose_nothing(
    text: str, kind: str, count: Counter, limit: int
) -> None:
    end = 0
    for span in split(document(text, kind), count_tokens=count, max_tokens=limit):
        assert text[span.start : span.end] == span.text == span.text.strip() != ""
        assert not text[end : span.start].strip()  # in order, disjoint, only white space between
        assert count(span.text) <= limit
        end = span.end
    assert not text[end:].strip()


@pytest.mark.parametrize("text", ["", " ", "\n \t\n", "\u2003" * 9000])
def test_no_words_no_passages(text: str) -> None:
    assert split(document(text), count_tokens=len, max_tokens=8) == []


def test_a_short_document_is_one_passage() -> None:
    assert split(document("  One two.\n"), count_tokens=words) == [Span(2, 10, "One two.", "Doc")]


def test_repeated_text_has_its_own_place() -> None:
    spans = split(document("same words. " * 5), count_tokens=words, max_tokens=2)
    assert [span.start for span in spans] == [0, 12, 24, 36, 48]


# -- headings ---------------------------------------------------------------------------------

SECTIONS = """Before any heading there are words.

# Harbour

The harbour was built in 1874.

## Ships ##

Nora and Ida sail every day.

# Tower

The tower has nine bells.
"""


def test_headings_give_titles() -> None:
    spans = split(document(SECTIONS, "markdown"), count_tokens=words, max_tokens=10)
    assert titles(spans) == ["Doc", "Doc > Harbour", "Doc > Harbour > Ships", "Doc > Tower"]
    assert spans[1].text == "# Harbour\n\nThe harbour was built in 1874."


def test_a_title_that_is_the_first_heading_is_not_repeated() -> None:
    text = "# Doc\n\n" + "a " * 9 + "\n\n## Part\n\n" + "b " * 9
    spans = split(document(text, "markdown"), count_tokens=words, max_tokens=12)
    assert titles(spans) == ["Doc", "Doc > Part"]


def test_sections_are_kept_apart_though_they_would_fit() -> None:
    text = "# One\n\n" + "a " * 20 + "\n\n## Two\n\n" + "b " * 20
    assert len(split(document(text, "markdown"), count_tokens=words, max_tokens=60)) == 2


def test_tiny_and_deep_sections_are_joined() -> None:
    tiny = "# One\n\na\n\n# Two\n\nb"
    deep = "# One\n\n" + "a " * 20 + "\n\n### Deep\n\n" + "b " * 20
    for text in (tiny, deep):
        spans = split(document(text, "markdown"), count_tokens=words, max_tokens=60)
        assert titles(spans) == ["Doc > One"]


@pytest.mark.parametrize("fence", ["```", "~~~"])
def test_a_comment_inside_a_fence_is_no_heading(fence: str) -> None:
    text = f"# Use\n\n{fence}sh\n# not a heading\nls\n{fence}\n\n# Next\n\nmore"
    spans = split(document(text, "markdown"), count_tokens=words, max_tokens=10)
    assert titles(spans) == ["Doc > Use", "Doc > Next"]


@pytest.mark.parametrize("kind", ["markdown", "html", "pdf", "docx", "text", "code"])
def test_headings_are_optional(kind: str) -> None:
    assert titles(split(document("Just words.", kind), count_tokens=words)) == ["Doc"]


@pytest.mark.parametrize("line", ["#no", "####### seven", "a # b", "\\# no"])
def test_what_is_no_heading(line: str) -> None:
    text = f"# One\n\n{line}"
    assert titles(split(document(text, "markdown"), count_tokens=words)) == ["Doc > One"]


def test_a_sharp_at_the_end_of_a_heading() -> None:
    assert titles(split(document("# C#\n\nwords", "markdown"), count_tokens=words)) == ["Doc > C#"]


# -- borders ----------------------------------------------------------------------------------


def test_paragraphs_before_lines_before_sentences_before_words() -> None:
    text = "a b\nc d\n\ne f. g h. i"
    cases = {
        5: ["a b\nc d", "e f. g h. i"],
        4: ["a b\nc d", "e f. g h.", "i"],
        3: ["a b", "c d", "e f.", "g h. i"],
        1: ["a", "b", "c", "d", "e", "f.", "g", "h.", "i"],
    }
    for limit, expected in cases.items():
        assert texts(split(document(text), count_tokens=words, max_tokens=limit)) == expected


def test_sentences_end_behind_closing_quotes_and_in_chinese() -> None:
    text = "“Go on.” He went away. 他走了。 他回来了。"
    spans = split(document(text), count_tokens=len, max_tokens=14)
    assert texts(spans) == ["“Go on.”", "He went away.", "他走了。 他回来了。"]


def test_one_long_word_is_cut_anyway() -> None:
    text = "x" * 5000
    spans = split(document(text), count_tokens=len, max_tokens=64)
    assert "".join(texts(spans)) == text
    assert all(32 <= len(span.text) <= 64 for span in spans)


def test_one_long_line_is_cut_between_words() -> None:
    text = "word " * 3000
    spans = split(document(text, "text"), count_tokens=words, max_tokens=50)
    assert {token for span in spans for token in span.text.split()} == {"word"}
    assert len(spans) <= 120


@pytest.mark.parametrize("cluster", ["e\u0301", "👍🏽", "👩\u200d🚀", "☂\ufe0f"])
def test_no_cut_inside_what_reads_as_one_character(cluster: str) -> None:
    spans = split(document(cluster * 200), count_tokens=len, max_tokens=16)
    assert len(spans) > 1
    assert all(span.text == cluster * (len(span.text) // len(cluster)) for span in spans)


def test_no_cut_inside_a_character_of_a_short_stretch() -> None:
    spans = split(document("e\u0301x"), count_tokens=len, max_tokens=2)
    assert texts(spans) == ["e\u0301", "x"]


def test_a_character_of_many_tokens_stands_alone() -> None:
    spans = split(document("ab"), count_tokens=lambda text: 5 * len(text), max_tokens=3)
    assert texts(spans) == ["a", "b"]


def test_the_counter_sees_no_text_much_longer_than_the_limit() -> None:
    seen: list[int] = []

    def count(text: str) -> int:
        seen.append(len(text))
        return words(text)

    split(document("word " * 20_000), count_tokens=count, max_tokens=16)
    assert max(seen) <= 16 * 8


# -- code -------------------------------------------------------------------------------------

CODE = """import os

# a comment
def first():
    return 1


def second():
    return 2
"""


def test_code_is_cut_at_blank_lines_and_has_no_headings() -> None:
    spans = split(document(CODE, "code", "a.py"), count_tokens=words, max_tokens=7)
    assert titles(spans) == ["a.py"] * 3
    assert texts(spans) == [
        "import os",
        "# a comment\ndef first():\n    return 1",
        "def second():\n    return 2",
    ]


def test_code_keeps_the_indentation_between_its_lines() -> None:
    (span,) = split(document(CODE, "code", "a.py"), count_tokens=words)
    assert span.text == CODE.strip()


def test_code_without_blank_lines_is_cut_at_lines() -> None:
    code = "\n".join(f"x{i} = {i}" for i in range(40))
    spans = split(document(code, "code"), count_tokens=words, max_tokens=9)
    assert "\n".join(texts(spans)) == code


def test_a_heading_stays_with_the_long_paragraph_below_it() -> None:
    text = "# Boats\n\n" + "They are all painted blue. " * 4
    spans = split(document(text, "markdown"), count_tokens=words, max_tokens=40, join_tokens=8)
    assert [span.text.split("\n")[0] for span in spans] == ["# Boats"]


def test_paragraphs_are_joined_up_to_a_smaller_size_than_a_long_one_may_have() -> None:
    text = "one two\n\nthree four\n\nfive six\n\n" + "seven " * 9
    spans = split(document(text), count_tokens=words, max_tokens=10, join_tokens=4)
    assert [len(span.text.split()) for span in spans] == [4, 2, 9]
