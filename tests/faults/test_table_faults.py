"""F8: broken tables. Every line and every recording ends in one row; nothing outside the folder is touched."""

from __future__ import annotations

import json
import random
import string
from collections import Counter

import pytest
import soundfile
from preparing import TEXT, VERDICTS, accounted, folder_with, prepared, voice

from f5kit.errors import UserError
from f5kit.tables import read_table

pytestmark = pytest.mark.usefixtures("one_thread")

GOOD = [f"a{n}|{TEXT}" for n in (1, 2, 3)]
LONG = "One sentence, and another, with commas."


def csv(*rows: str, header: str | None = None) -> list[str]:
    return [*([header] if header else []), *rows]


# (name, the table, statuses of a1..a3, reasons of all other rows, name of the table's file)
TABLES = [
    ("plain", GOOD, "aaa", []),
    ("byte_order_mark", b"\xef\xbb\xbf" + "\n".join(GOOD).encode(), "raa", []),
    ("utf16", "\n".join(GOOD).encode("utf-16"), "aaa", []),
    ("utf16_without_mark", "\n".join(GOOD).encode("utf-16-le"), "aaa", []),
    ("utf32", "\n".join(GOOD).encode("utf-32"), "aaa", []),
    ("crlf", "\r\n".join(GOOD).encode(), "aaa", []),
    ("cr", "\r".join(GOOD).encode(), "aaa", []),
    ("blank_lines", ["", *GOOD, "", "   "], "aaa", []),
    ("with_folder", [f"wavs/a1.wav|{TEXT}", f"./wavs/a2|{TEXT}", f"wavs\\a3.wav|{TEXT}"], "aaa", []),
    ("other_suffix", [f"a1.flac|{TEXT}", *GOOD[1:]], "aaa", []),
    ("third_column", [f"{row}|a short sentence" for row in GOOD], "aaa", []),
    ("header", ["file_name|text", *GOOD], "aaa", []),
    ("upstream_cli", ["audio_file|text", *(f"/old/place/wavs/a{n}.wav|{TEXT}" for n in (1, 2, 3))], "rrr", []),
    ("commas", csv(*(f"a{n},{TEXT}" for n in (1, 2, 3))), "aaa", []),
    ("commas_quoted", csv(*(f'a{n},"{LONG}"' for n in (1, 2, 3)), header="name,text"), "aaa", []),
    ("commas_unquoted", csv(f"a1,{TEXT}", f"a2,{LONG}", f"a3,{TEXT}"), "ara", []),
    ("tabs", csv(*(f"a{n}\t{TEXT}" for n in (1, 2, 3)), header="path\tsentence"), "aaa", []),
    ("columns_elsewhere", csv(*(f"7,{TEXT},a{n}.wav" for n in (1, 2, 3)), header="age,text,audio"), "aaa", []),
    ("everything_quoted", [f'"a{n}"|"{TEXT}"' for n in (1, 2, 3)], "aaa", []),
    ("lone_quote", ['a1|He said "Stop and was gone.', *GOOD[1:]], "aaa", []),
    ("lone_quote_in_csv", [f'a1,"{LONG}', f"a2,{TEXT}", f"a3,{TEXT}"], "raa", []),
    ("quote_over_two_lines", ['a1,"Two lines,', 'and one text."', f"a2,{TEXT}", f"a3,{TEXT}"], "aaa", []),
    ("extra_column", [GOOD[0] + "|and more", *GOOD[1:]], "xaa", []),
    ("too_many_columns", [GOOD[0] + "|b|c|d", *GOOD[1:]], "xaa", []),
    ("wrong_delimiter", [f"a1,{TEXT}", *GOOD[1:]], "xaa", []),
    ("one_column", ["a1", *GOOD[1:]], "xaa", []),
    ("missing_file", [*GOOD, f"a9|{TEXT}"], "aaa", ["line 4: there is no recording 'a9'"]),
    ("duplicate", [*GOOD, f"wavs/a2.wav|{TEXT}"], "aaa", ["line 4: wavs/a2.wav is named already in line 2"]),
    ("absolute", [*GOOD, f"/etc/passwd|{TEXT}"], "aaa", ["line 4: /etc/passwd points outside"]),
    ("drive", [*GOOD, f"C:\\a.wav|{TEXT}"], "aaa", ["points outside"]),
    ("parent", [*GOOD, f"../secret.wav|{TEXT}"], "aaa", ["points outside"]),
    ("parent_in_the_middle", [*GOOD, f"wavs/../../secret.wav|{TEXT}"], "aaa", ["points outside"]),
    ("empty_text", ["a1|", *GOOD[1:]], "xaa", []),
    ("white_text", ["a1| \t\u00a0", *GOOD[1:]], "xaa", []),
    ("no_letters", ["a1|... --- !", *GOOD[1:]], "xaa", []),
    ("long_line", ["a1|" + "word " * 2_000_000, *GOOD[1:]], "xaa", []),
    ("long_name", ["a" * 100_000 + f"|{TEXT}", *GOOD], "aaa", ["line 1: there is no recording"]),
    ("not_utf8", b"a1|caf\xe9 au lait\n" + "\n".join(GOOD[1:]).encode(), "xaa", []),
    ("control_characters", ["a1|A short\x00 sentence\x07 to say.", *GOOD[1:]], "raa", []),
    ("emoji_and_formula", ["a1|Well done \U0001f600!", f"a2|=SUM(A1:A2) {TEXT}", GOOD[2]], "aaa", []),
    ("surrogate", b"a1|A half \xed\xa0\x80 character.\n" + "\n".join(GOOD[1:]).encode(), "xaa", []),
    ("unnamed_recording", GOOD[:2], "aax", []),
    ("jsonl", [json.dumps({"audio_filepath": f"wavs/a{n}.wav", "text": TEXT}) for n in (1, 2, 3)], "aaa", [],
     "metadata.jsonl"),
    ("jsonl_broken", ['{"audio": "a1", "text": ', *(f'{{"audio":"a{n}","text":"{TEXT}"}}' for n in (2, 3)), "[]", "7"],
     "xaa", ["line 1: it is no JSON object", "line 4: it is no JSON", "line 5: it is no JSON"], "metadata.jsonl"),
    ("jsonl_odd_types", ['{"audio": 5, "text": "x"}', '{"audio": "a1", "text": {"a": 1}}', '{"text": "x"}',
     *(f'{{"audio":"a{n}","text":"{TEXT}"}}' for n in (2, 3))], "xaa", ["line 1: it names no recording",
     "line 3: it names no recording"], "metadata.jsonl"),
    ("jsonl_deep", ["[" * 100_000, *(f'{{"audio":"a{n}","text":"{TEXT}"}}' for n in (1, 2, 3))], "aaa",
     ["line 1: it is no JSON object"], "metadata.jsonl"),
    ("jsonl_outside", [json.dumps({"audio": "../secret.wav", "text": TEXT}), *(f'{{"audio":"a{n}","text":"{TEXT}"}}'
     for n in (1, 2, 3))], "aaa", ["points outside"], "metadata.jsonl"),
]  # fmt: skip


TOTALS = Counter()


@pytest.mark.parametrize("case", TABLES, ids=[row[0] for row in TABLES])
def test_every_row_of_a_table_is_accounted_for(tmp_path, case):
    name, table, expected, others, *file = case
    soundfile.write(tmp_path / "secret.wav", voice(seed=99), 24_000)
    rows, summary = prepared(folder_with(tmp_path / "in", table, table=file[0] if file else "metadata.csv"))
    letter = {"accepted": "a", "repaired": "r", "rejected": "x"}
    by_source = {row["source"]: row for row in rows if row["source"] and "-2" not in row["id"]}
    said = [reason for row in rows for reason in row["reasons"]]
    assert "".join(letter[by_source[f"wavs/a{n}.wav"]["status"]] for n in (1, 2, 3)) == expected, said
    rest = [row for row in rows if row not in by_source.values()]
    assert len(rows) == 3 + len(rest) and all(row["status"] == "rejected" for row in rest)
    assert len(rest) == len(others), said
    for reason in others:
        assert any(reason in sentence for row in rest for sentence in row["reasons"]), said
    assert "secret" not in "".join(row["source"] or "" for row in rows)
    TOTALS.update({"tables": 1, **{key: summary[key] for key in ("seen", *VERDICTS)}})


def test_a_hundred_scrambled_tables_are_accounted_for(tmp_path, report):
    """Rows of the table itself: each line with something in it is one row, whatever is done to the file."""
    path, dice = tmp_path / "metadata.csv", random.Random(5)
    known = {f"a{n}" for n in range(50)}
    lines = [f'a{n}|Sentence "{n}", quoted; and so on.' for n in range(50)]
    seen = 0
    for _ in range(100):
        rows = list(lines)
        for _ in range(dice.randrange(1, 9)):
            at = dice.randrange(len(rows))
            row = list(rows[at])
            row.insert(dice.randrange(len(row) + 1), dice.choice("\"|,;\t\\'" + string.punctuation + "\u00e9\u4f60\0"))
            rows[at] = "".join(row)
        path.write_bytes("\n".join(rows).encode(dice.choice(["utf-8", "utf-16", "utf-8-sig"])))
        try:
            found = list(read_table(path, lambda name: name in known))
        except UserError:
            continue
        assert [line.number for line in found] == list(range(1, 51))
        assert sum(line.problem is None and line.name in known for line in found) >= 50 - 9
        seen += len(found)
    assert seen == 5000
    report("F8", injected=TOTALS["tables"] + 100, survived=TOTALS["tables"] + seen // 50, **accounted(TOTALS))


def test_damaged_arrow_and_parquet_are_one_sentence(tmp_path):
    pytest.importorskip("pyarrow")
    for name in ("raw.arrow", "rows.parquet"):
        (tmp_path / name).write_bytes(b"ARROW1\0\0" + b"\1" * 500)
        with pytest.raises(UserError, match="cannot be read as a table"):
            list(read_table(tmp_path / name, lambda _: True))
