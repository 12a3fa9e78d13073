"""Unpacking an archive that nobody vouches for: regular files only, inside one folder, within limits.

Python's own extractors have been talked into writing elsewhere more than once. Here nothing that an archive says is
obeyed but names, and only plain ones: files are made one by one, in a folder that was empty, by a call that follows no
link and replaces nothing; links, devices and pipes are never made. What is refused is told, member by member.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from f5kit.errors import UserError

ARCHIVE_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_BLOCK = 1 << 20
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError,
            RuntimeError, ValueError, MemoryError)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What an archive may unpack to."""

    files: int = 1_000_000
    bytes: int = 256 << 30
    ratio: float = 100.0
    """Bytes unpacked for one of the archive, once more than `free` bytes are out. Speech packs less than tenfold."""
    free: int = 64 << 20


def unpack(archive: Path, folder: Path, limits: Limits = Limits()) -> list[tuple[str, str]]:  # noqa: B008  (frozen)
    """Unpack a zip or tar (plain, gzip, bzip2, xz) into an empty folder.

    Returns (member, why) for each that was refused; directories and what the system's packers add are not counted.
    Raises UserError when the archive is damaged or a limit is passed: then nothing of it is kept.
    """
    folder.mkdir(parents=True)
    meter = _Meter(archive, limits, shutil.disk_usage(folder).free)
    refused, seen = [], 0
    try:
        for name, problem, content in _members(archive, meter):
            seen += 1
            if seen > limits.files:
                raise UserError(f"{archive} has more than {limits.files:,} members; unpack it yourself, in parts")
            parts = name.replace("\\", "/").split("/")
            if "__MACOSX" in parts or parts[-1] in (".DS_Store", "Thumbs.db"):
                continue
            problem = problem or _bad_name(name) or _write(folder.joinpath(*[p for p in parts if p]), content, meter)
            if problem:
                refused.append((_shown(name), problem))
    except BaseException as error:
        shutil.rmtree(folder)
        if isinstance(error, _DAMAGED) and not isinstance(error, UserError):  # a UserError says itself what to do
            raise UserError(f"{archive} cannot be unpacked ({_shown(str(error))}); download or pack it again") from None
        raise
    return refused


def _shown(name: str) -> str:
    return re.sub(r"[^\w .,:()'/\\-]", "?", name)[:120]


def _bad_name(name: str) -> str | None:
    """Why a name can't be used. Nothing is made of it that it does not say."""
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", name):
        return "its path is absolute"
    if ".." in parts:
        return "its path leads out of the archive"
    if len(parts) > 64 or any(len(part.encode("utf-8", "replace")) > 240 for part in parts):
        return "its name is too long"
    if any(ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in name) or not any(part.strip(". ") for part in parts):
        return "its name holds characters that no file name has"
    return None


def _write(path: Path, content, meter: _Meter) -> str | None:
    """Write a member to a place where nothing stands yet."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o644)
    except (FileExistsError, NotADirectoryError):
        return "another member has the same name"
    except (OSError, ValueError):
        return "its name holds characters that no file name has"
    with os.fdopen(handle, "wb") as file, content() as source:
        while block := source.read(_BLOCK):
            meter.count(len(block))
            file.write(block)
    return None


class _Meter:
    """Counts what comes out of an archive, and stops it."""

    def __init__(self, archive: Path, limits: Limits, disk: int):
        self.archive, self.limits, self.size, self.out = archive, limits, max(1, archive.stat().st_size), 0
        self.most = min(limits.bytes, int(disk * 0.9))

    def count(self, n: int) -> None:
        self.out += n
        if self.out > self.most:
            raise UserError(f"{self.archive} unpacks to more than {self.most / 1e9:.3g} GB; unpack it yourself")
        if self.out > self.limits.free and self.out > self.limits.ratio * self.size:
            raise UserError(
                f"{self.archive} unpacks to more than {self.limits.ratio:g} times its size, as no recordings do; "
                "if you trust it, unpack it yourself"
            )


def _members(archive: Path, meter: _Meter) -> Iterator:
    """(name, problem, a function that opens the content) of each member that is no directory."""
    with open(archive, "rb") as file:
        magic = file.read(6)
    if magic[:4] in (b"PK\3\4", b"PK\5\6"):
        with zipfile.ZipFile(archive) as packed:
            for info in packed.infolist():
                kind = (info.external_attr >> 16) & 0o170000  # as Unix packers note it
                problem = "it is a link or a device" if kind not in (0, 0o100000, 0o040000) else None
                problem = "it is encrypted" if info.flag_bits & 1 else problem
                # The name as written: zipfile itself cuts it at a NUL.
                if not info.is_dir() or problem:
                    yield info.orig_filename, problem, lambda info=info: packed.open(info)
        return
    opener = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}.get(magic[:2], open)
    with opener(archive, "rb") as stream:
        packed = tarfile.open(fileobj=_Forward(stream, meter), mode="r:")
        for info in packed:
            plain = info.isreg() and not info.issparse()
            problem = None if plain else "it is a link or a device"
            if not info.isdir():
                yield info.name, problem, lambda info=info: packed.extractfile(info)
            packed.members.clear()  # tarfile keeps every member it has seen


class _Forward:
    """A stream that is read forwards, in bounded pieces: a header can't make tarfile fill the memory."""

    def __init__(self, stream, meter: _Meter):
        self.stream, self.meter, self.place = stream, meter, 0

    def tell(self) -> int:
        return self.place

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= 16 * _BLOCK:
            raise tarfile.ReadError("a header of impossible size")
        data = self.stream.read(size)
        self.place += len(data)
        return data

    def seek(self, place: int) -> int:
        if place < self.place:
            raise tarfile.ReadError("it does not go forwards")
        while self.place < place:
            data = self.read(min(_BLOCK, place - self.place))
            if not data:
                break
            self.meter.count(len(data))  # what is skipped has been unpacked too
        return self.place
