"""Every kind of file becomes text, or one line that says why not."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import docx
import pytest
from pypdf import PdfReader, PdfWriter

from cag.documents import Document, find_files, load
from cag.errors import IngestError, UnreadableDocument


def loaded(folder: Path, name: str, data: bytes | str) -> Document:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return load(path)


def reason(folder: Path, name: str, data: bytes) -> str:
    """Why a file cannot be read; always one line."""
    with pytest.raises(UnreadableDocument) as caught:
        loaded(folder, name, data)
    text = str(caught.value)
    assert text and len(text.splitlines()) == 1
    return text


def pdf(*pages: str, title: str = "") -> bytes:
    """A PDF by hand: one line of Helvetica per page."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, text in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET" if text else ""
        objects += [
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] "
            f"/Contents {5 + 2 * i} 0 R /Resources << /Font << /F1 3 0 R >> >> >>",
            f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream",
        ]
    objects.append(f"<< /Title ({title}) >>")
    out, offsets = "%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n"
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    size = len(objects) + 1
    return (
        f"{out}xref\n0 {size}\n0000000000 65535 f \n{table}"
        f"trailer\n<< /Size {size} /Root 1 0 R /Info {size - 1} 0 R >>\n"
        f"startxref\n{len(out)}\n%%EOF\n"
    ).encode()


def encrypted(data: bytes, user: str) -> bytes:
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(data)))
    writer.encrypt(user, "owner", algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def word(title: str = "") -> bytes:
    document = docx.Document()
    document.core_properties.title = title
    document.add_heading("Harbour", 1)
    document.add_paragraph("Built in 1874.")
    document.add_paragraph("")
    document.add_heading("Ships", 2)
    table = document.add_table(2, 2)
    for cell, text in zip(table._cells, ("Name", "Year", "Nora", "1901"), strict=True):
        cell.text = text
    document.add_paragraph("After the table.")
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


# -- text -------------------------------------------------------------------------------------


def test_markdown_takes_its_title_from_a_leading_heading(tmp_path: Path) -> None:
    data = b"\n## The harbour\r\n\r\nBuilt in 1874.\rRed."
    document = loaded(tmp_path, "a.md", data)
    assert document == Document(
        path=str(tmp_path / "a.md"),
        title="The harbour",
        text="\n## The harbour\n\nBuilt in 1874.\nRed.",
        kind="markdown",
        sha256=hashlib.sha256(data).hexdigest(),
    )


def test_a_later_heading_is_not_the_title(tmp_path: Path) -> None:
    assert loaded(tmp_path, "a.md", "Words.\n\n# Heading").title == "a.md"


@pytest.mark.parametrize("name", ["a.txt", "a.unknown", "README"])
def test_plain_text_is_kept_and_named_after_its_file(tmp_path: Path, name: str) -> None:
    document = loaded(tmp_path, name, "# one\n\n  two\n")
    assert (document.title, document.kind, document.text) == (name, "text", "# one\n\n  two\n")


@pytest.mark.parametrize("name", ["a.py", "A.PY", "a.rs"])
def test_source_code_is_kept_as_it_is(tmp_path: Path, name: str) -> None:
    source = "# comment\ndef f() -> int:\n\treturn 1\n"
    document = loaded(tmp_path, name, source)
    assert (document.title, document.kind, document.text) == (name, "code", source)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1", "cp1252"])
def test_common_encodings_are_recognised(tmp_path: Path, encoding: str) -> None:
    assert loaded(tmp_path, "a.txt", "café à Åland".encode(encoding)).text == "café à Åland"


def test_what_no_encoding_explains_is_replaced(tmp_path: Path) -> None:
    assert loaded(tmp_path, "a.txt", b"caf\xe9 \x81").text == "café \ufffd"


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "a.html", "a"])
def test_binary_data_is_refused(tmp_path: Path, name: str) -> None:
    assert "is binary" in reason(tmp_path, name, b"\x7fELF\0\0\1")


def test_utf_16_without_a_mark_counts_as_binary(tmp_path: Path) -> None:
    assert "is binary" in reason(tmp_path, "a.txt", "words".encode("utf-16-le"))


def test_undecodable_text_is_refused(tmp_path: Path) -> None:
    assert reason(tmp_path, "a.txt", "words".encode("utf-16")[:-1]).startswith("broken text file: ")


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "a.html", "a.pdf", "a.docx"])
def test_an_empty_file_is_refused(tmp_path: Path, name: str) -> None:
    reason(tmp_path, name, b"")


@pytest.mark.parametrize("data", [b" \n\t\r\n", b"\xef\xbb\xbf", b"\xff\xfe"])
def test_a_file_without_words_is_refused(tmp_path: Path, data: bytes) -> None:
    assert reason(tmp_path, "a.txt", data) == "holds no text"


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.txt")


# -- HTML -------------------------------------------------------------------------------------


def test_html_keeps_words_and_structure_only(tmp_path: Path) -> None:
    page = """
    <html><head><title> The  harbour </title><style>p {color: red}</style></head><body>
    <nav><p>Menu</p></nav><script>track()</script><template><p>Unused</p></template>
    <h1>Harbour</h1><p>Built &amp; painted
      in <b>1874</b>.</p><noscript><p>Enable</p></noscript><style>b {}</style>
    <h2>Ships</h2><ul><li>Nora</li><li>Ida</li></ul>
    <table><tr><th>Name</th><th>Year</th></tr><tr><td>Nora</td><td>1901</td></tr></table>
    <pre>a
      b</pre><p></p></body></html>
    """
    document = loaded(tmp_path, "a.html", page)
    assert (document.kind, document.title.split()) == ("html", ["The", "harbour"])
    assert document.text.split("\n\n") == [
        "# Harbour",
        "Built & painted in 1874.",
        "## Ships",
        "- Nora",
        "- Ida",
        "Name | Year",
        "Nora | 1901",
        "a\n      b",
    ]


def test_html_without_blocks_or_title(tmp_path: Path) -> None:
    document = loaded(tmp_path, "a.htm", "<div>One</div><div>Two</div><script>x</script>")
    assert (document.title, document.text) == ("a.htm", "One\n\nTwo")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "latin-1"])
def test_html_in_its_declared_encoding(tmp_path: Path, encoding: str) -> None:
    mark = f'<meta charset="{encoding}">' if encoding != "utf-16" else ""
    assert loaded(tmp_path, "a.html", f"{mark}<p>Café</p>".encode(encoding)).text == "Café"


def test_html_with_scripts_only_is_refused(tmp_path: Path) -> None:
    assert reason(tmp_path, "a.html", b"<script>x</script><style>y</style>") == "holds no text"


@pytest.mark.parametrize(
    "page",
    [
        "<div>first</div><p>second</p>",
        "<ul><li>first<ul><li>second</li></ul></li></ul>",
        "<p>first<p>second",
        "<table><tr><td>first</td><td><p>second</p></td></tr></table>",
    ],
)
def test_html_loses_no_words(tmp_path: Path, page: str) -> None:
    words = loaded(tmp_path, "a.html", page).text
    assert "first" in words and "second" in words


# -- PDF --------------------------------------------------------------------------------------


def test_pdf_pages_in_order(tmp_path: Path) -> None:
    document = loaded(tmp_path, "a.pdf", pdf("Built in 1874.", "Painted red.", title="Harbour"))
    assert (document.kind, document.title) == ("pdf", "Harbour")
    assert [line.strip() for line in document.text.split("\n\n")] == [
        "Built in 1874.",
        "Painted red.",
    ]


def test_pdf_without_a_title_is_named_after_its_file(tmp_path: Path) -> None:
    assert loaded(tmp_path, "a.pdf", pdf("Words.")).title == "a.pdf"


def test_pdf_without_text_asks_for_ocr(tmp_path: Path) -> None:
    assert "OCR" in reason(tmp_path, "a.pdf", pdf("", ""))


def test_pdf_behind_a_password_is_refused(tmp_path: Path) -> None:
    assert "is encrypted" in reason(tmp_path, "a.pdf", encrypted(pdf("Words."), "secret"))


def test_pdf_that_only_restricts_editing_is_read(tmp_path: Path) -> None:
    assert loaded(tmp_path, "a.pdf", encrypted(pdf("Words."), "")).text.strip() == "Words."


@pytest.mark.parametrize("data", [b"%PDF-1.4\n", b"not a pdf", pdf("Words.")[:60]])
def test_a_broken_pdf_is_refused(tmp_path: Path, data: bytes) -> None:
    assert reason(tmp_path, "a.pdf", data).startswith("broken pdf file: ")


# -- DOCX -------------------------------------------------------------------------------------


def test_docx_headings_paragraphs_and_tables_in_order(tmp_path: Path) -> None:
    document = loaded(tmp_path, "a.docx", word("On Lindholm"))
    assert (document.kind, document.title) == ("docx", "On Lindholm")
    assert document.text.split("\n\n") == [
        "# Harbour",
        "Built in 1874.",
        "## Ships",
        "Name | Year\nNora | 1901",
        "After the table.",
    ]


def test_docx_without_a_title_is_named_after_its_file(tmp_path: Path) -> None:
    assert loaded(tmp_path, "a.docx", word()).title == "a.docx"


def test_a_broken_docx_is_refused(tmp_path: Path) -> None:
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("a.txt", "not Word")
    for data in (b"not a zip", word()[:500], other.getvalue()):
        assert reason(tmp_path, "a.docx", data).startswith("broken docx file: ")


# -- find_files -------------------------------------------------------------------------------


def names(root: Path, *paths: Path) -> list[str]:
    return [str(found.relative_to(root)) for found in find_files(paths)]


def grow(root: Path, *files: str) -> None:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("words")


def test_a_folder_gives_its_known_files_in_order(tmp_path: Path) -> None:
    grow(tmp_path, "b.md", "a.TXT", "z/b.py", "z/a.html", "c/d.pdf", "image.png", "Makefile")
    assert names(tmp_path, tmp_path) == ["a.TXT", "b.md", "c/d.pdf", "z/a.html", "z/b.py"]


def test_hidden_and_generated_files_are_left_out(tmp_path: Path) -> None:
    grow(tmp_path, ".env.txt", ".git/a.md", "node_modules/a.js", "a/__pycache__/b.py", "a/b.py")
    assert names(tmp_path, tmp_path) == ["a/b.py"]


def test_a_file_that_is_named_is_always_taken(tmp_path: Path) -> None:
    grow(tmp_path, "image.png", ".hidden", ".dot/a.md")
    paths = [tmp_path / name for name in ("image.png", ".hidden", ".dot")]
    assert names(tmp_path, *paths) == ["image.png", ".hidden", ".dot/a.md"]


def test_a_file_that_is_named_twice_comes_once(tmp_path: Path) -> None:
    grow(tmp_path, "a.md", "b.md")
    assert names(tmp_path, tmp_path / "b.md", tmp_path, tmp_path / "b.md") == ["b.md", "a.md"]


def test_links_neither_loop_nor_break(tmp_path: Path) -> None:
    grow(tmp_path, "a/b.md")
    (tmp_path / "a/loop").symlink_to(tmp_path)
    (tmp_path / "a/gone.md").symlink_to(tmp_path / "none.md")
    (tmp_path / "a/link.md").symlink_to(tmp_path / "a/b.md")
    assert names(tmp_path, tmp_path) == ["a/b.md", "a/link.md"]


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(IngestError, match=r"none\.md' does not exist"):
        find_files([tmp_path, tmp_path / "none.md"])


def test_an_empty_folder_gives_nothing(tmp_path: Path) -> None:
    assert find_files([tmp_path]) == []
