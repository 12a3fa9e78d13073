"""F9: hostile archives. Nothing is written outside the folder, nothing of a bomb is kept, every member is told of."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import struct
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import soundfile
from preparing import VERDICTS, accounted, prepared, voice

from f5kit import ingest
from f5kit.archives import Limits, unpack
from f5kit.errors import UserError
from f5kit.prepare import prepare_dataset

pytestmark = pytest.mark.usefixtures("one_thread")


def _sound() -> bytes:
    memory = io.BytesIO()
    soundfile.write(memory, voice(0.5), 24_000, format="WAV")
    return memory.getvalue()


SOUND = _sound()
GOOD = [("good.txt", tarfile.REGTYPE, "", b"fine"), ("good.wav", tarfile.REGTYPE, "", SOUND)]
TOTALS = Counter()


def zipped(*members, mode: int | None = None, flags: int = 0):
    def write(path):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr("good.txt", "fine")
            packed.writestr("good.wav", SOUND)
            for name, content in members:
                info = zipfile.ZipInfo("placeholder")
                info.filename = name
                info.compress_type = zipfile.ZIP_DEFLATED
                if mode is not None:
                    info.create_system, info.external_attr = 3, mode << 16
                packed.writestr(info, content)
        if flags:
            data = bytearray(path.read_bytes())
            at = data.rfind(b"PK\1\2")
            data[at + 8] |= flags
            path.write_bytes(data)

    return write


def tarred(*members, compress=None):
    def write(path):
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w", format=tarfile.GNU_FORMAT) as packed:
            for name, kind, link, content in [*GOOD, *members]:
                info = tarfile.TarInfo(name)
                info.type, info.linkname, info.size = kind, link, len(content)
                packed.addfile(info, io.BytesIO(content))
        path.write_bytes(compress(data.getvalue()) if compress else data.getvalue())

    return write


def giant_header(path):
    """A long-name record that claims to be 4 GB."""
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 4 << 30
    path.write_bytes(gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + b"\0" * 100_000))


def lying_size(path):
    """A central directory that says 4 bytes of a member that holds ten million."""
    zipped(("big.wav", b"\0" * 10_000_000))(path)
    data = bytearray(path.read_bytes())
    at = data.rfind(b"PK\1\2")
    data[at + 24 : at + 28] = struct.pack("<I", 4)
    path.write_bytes(data)


def half(writer):
    def write(path):
        writer(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return write


REG, SYM, LNK, FIFO, CHR, BLK = (tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE,
                                 tarfile.BLKTYPE)  # fmt: skip
SMALL = Limits(files=100, bytes=8 << 20, ratio=50, free=1 << 20)
# (name, how to write it, what is said of a member, or of the whole with "!" before it)
# A limit is told with its own remedy, not with that of a damaged archive.
TOO_LARGE = "!more than .* GB; unpack it yourself$"
TOO_DENSE = "!times its size, as no recordings do; if you trust it, unpack it yourself$"
TOO_MANY = "!more than 100 members; unpack it yourself, in parts$"

ARCHIVES = [
    ("parent.zip", zipped(("../evil.txt", "x")), "leads out"),
    ("parent_deep.zip", zipped(("a/b/../../../evil.txt", "x")), "leads out"),
    ("parent_backslash.zip", zipped(("..\\evil.txt", "x")), "leads out"),
    ("absolute.zip", zipped(("/tmp/evil_f5kit.txt", "x")), "absolute"),
    ("drive.zip", zipped(("C:\\evil.txt", "x")), "absolute"),
    ("share.zip", zipped(("\\\\host\\evil.txt", "x")), "absolute"),
    ("link.zip", zipped(("link.wav", "/etc/passwd"), mode=stat.S_IFLNK | 0o777), "link"),
    ("pipe.zip", zipped(("pipe.wav", ""), mode=stat.S_IFIFO | 0o666), "link or a device"),
    ("twice.zip", zipped(("a.txt", "1"), ("a.txt", "2")), "same name"),
    ("file_as_folder.zip", zipped(("a.txt", "1"), ("a.txt/b.txt", "2")), "same name"),
    ("nul.zip", zipped(("a\0.txt", "1")), "characters"),
    ("long_name.zip", zipped(("n" * 5000 + ".txt", "1")), "too long"),
    ("encrypted.zip", zipped(("a.txt", "1"), flags=1), "encrypted"),
    ("bomb_size.zip", zipped(("big.wav", os.urandom(9 << 20))), TOO_LARGE),
    ("bomb_ratio.zip", zipped(("big.wav", b"\0" * (6 << 20))), TOO_DENSE),
    ("bomb_count.zip", zipped(*((f"{n}.txt", "") for n in range(200))), TOO_MANY),
    ("lying_size.zip", lying_size, "!cannot be unpacked|times its size"),
    ("half.zip", half(zipped(("a.txt", os.urandom(5000)))), "!cannot be unpacked"),
    ("parent.tar", tarred(("../evil.txt", REG, "", b"x")), "leads out"),
    ("absolute.tar", tarred(("/tmp/evil_f5kit.txt", REG, "", b"x")), "absolute"),
    ("symlink.tar", tarred(("wavs", SYM, "/tmp", b""), ("wavs/evil.txt", REG, "", b"x")), "link"),
    ("symlink_file.tar.gz", tarred(("a.wav", SYM, "../../etc/passwd", b""), compress=gzip.compress), "link"),
    ("hardlink.tar", tarred(("a.wav", LNK, "/etc/passwd", b"")), "link"),
    ("pipe.tar.bz2", tarred(("a.wav", FIFO, "", b""), compress=bz2.compress), "link or a device"),
    ("device.tar.xz", tarred(("a.wav", CHR, "", b""), ("b.wav", BLK, "", b""), compress=lzma.compress), "device"),
    ("ratio.tar.gz", tarred(("big.wav", REG, "", b"\0" * (6 << 20)), compress=gzip.compress), TOO_DENSE),
    ("ratio.tar.xz", tarred(("big.wav", REG, "", b"\0" * (6 << 20)), compress=lzma.compress), TOO_DENSE),
    ("skipped.tar.gz", tarred(("../big", REG, "", b"\0" * (6 << 20)), compress=gzip.compress), TOO_DENSE),
    ("bomb_size.tar", tarred(("big.wav", REG, "", os.urandom(9 << 20))), TOO_LARGE),
    ("count.tar", tarred(*((f"{n}.txt", REG, "", b"") for n in range(200))), TOO_MANY),
    ("giant.tar.gz", giant_header, "!impossible size"),
    ("cut.tar.gz", half(tarred(("a.wav", REG, "", os.urandom(50_000)), compress=gzip.compress)), "!cannot be unpacked"),
    ("noise.tar", lambda path: path.write_bytes(os.urandom(4000)), "!cannot be unpacked"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "write", "said"), ARCHIVES, ids=[row[0] for row in ARCHIVES])
def test_an_archive_stays_in_its_folder(tmp_path, monkeypatch, name, write, said):
    write(tmp_path / name)
    before = {p for p in Path("/tmp").glob("evil*")} | {p for p in tmp_path.iterdir()}
    folder = tmp_path / "deep" / "out"
    if said.startswith("!"):
        with pytest.raises(UserError, match=said[1:]) as caught:
            unpack(tmp_path / name, folder, SMALL)
        assert "\n" not in str(caught.value) and not folder.exists()
    else:
        refused = unpack(tmp_path / name, folder, SMALL)
        assert [why for _, why in refused if said in why], refused
        assert (folder / "good.txt").read_text() == "fine"
        for path in folder.rglob("*"):
            assert path.is_dir() or (path.is_file() and not path.is_symlink())
    _account(tmp_path / name, monkeypatch, said)
    after = {p for p in Path("/tmp").glob("evil*")} | {p for p in tmp_path.iterdir()} - {tmp_path / f"{name}_prepared"}
    assert after - before <= {tmp_path / "deep"}
    assert not (tmp_path / "deep").exists() or list((tmp_path / "deep").iterdir()) in ([folder], [])


def _account(archive: Path, monkeypatch, said: str) -> None:
    """Prepare a dataset from it: one good clip and a row for each other member, or one sentence and nothing else."""
    monkeypatch.setattr(ingest, "unpack", lambda path, folder: unpack(path, folder, SMALL))
    if said.startswith("!"):
        with pytest.raises(UserError, match=said[1:]):
            prepare_dataset(archive, archive.with_name("refused"), progress=False)
        TOTALS.update(contained=1, refused_whole=1)
        return
    rows, summary = prepared(archive)
    assert [row["id"] for row in rows if row["status"] == "accepted"] == ["good"]
    assert any(said in reason for row in rows for reason in row["reasons"])
    TOTALS.update({"contained": 1, **{key: summary[key] for key in ("seen", *VERDICTS)}})


def test_a_refused_member_is_a_row_of_the_report(tmp_path, report):
    with zipfile.ZipFile(tmp_path / "voice.zip", "w") as packed:
        packed.writestr("my/wavs/a.wav", SOUND)
        packed.writestr("my/metadata.csv", "a|fine\n")
        packed.writestr("../evil.wav", SOUND)
    rows, _ = prepared(tmp_path / "voice.zip")
    assert [row["status"] for row in rows] == ["rejected", "accepted"]
    assert "voice.zip: ../evil.wav is left out, its path leads out" in rows[0]["reasons"][0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["voice.zip", "voice.zip_prepared"]
    contained, whole = TOTALS["contained"], TOTALS["refused_whole"]
    report("F9", injected=contained + 1, survived=contained + 1, **accounted(TOTALS), refused_whole=whole)
