"""A log that a crash cut off loses no more than the line it was writing."""

from __future__ import annotations

from pathlib import Path

from cag import lines


def test_a_line_that_was_cut_off_is_passed_over_and_what_follows_is_read(tmp_path: Path) -> None:
    log = tmp_path / "new" / "log.jsonl"
    assert list(lines.read(log)) == []
    lines.append(log, {"a": 1})
    lines.append(log, {"a": "zwölf\u2028\x85"})
    with log.open("ab") as file:
        file.write(b'{"a": 3, "b')
    lines.append(log, {"a": 4})
    assert list(lines.read(log)) == [{"a": 1}, {"a": "zwölf\u2028\x85"}, {"a": 4}]
    assert log.read_bytes().count(b"\n") == 4


def test_lines_that_are_no_objects_are_passed_over(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('[1]\n{"a": 1}\n\nnull\n', encoding="utf-8")
    assert list(lines.read(log)) == [{"a": 1}]
