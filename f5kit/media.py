"""Opening sound files of every kind: libsndfile first, PyAV for what it does not know (m4a and the sound of videos).

A recording is handed out block by block, so that an hour of it never stands in memory. Samples are float32,
(n, channels), full scale at 1.0.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from f5kit.errors import UserError

# What libsndfile reads, and the demuxers that PyAV gets told: a file chooses none by its content, because playlists and
# the like make a demuxer open other files.
_DEMUXERS = {
    ".m4a": "mov", ".mp4": "mov", ".mov": "mov", ".m4v": "mov", ".3gp": "mov", ".mkv": "matroska", ".webm": "matroska",
    ".aac": "aac", ".wma": "asf", ".avi": "avi", ".amr": "amr",
}  # fmt: skip
AUDIO_SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".oga", ".aif", ".aiff", ".au", ".caf", *_DEMUXERS)
_BLOCK = 1 << 19  # frames


@dataclass
class Sound:
    """An opened recording. `blocks` can be taken once."""

    rate: int
    """Hz."""
    declared: int
    """Frames that the header promises; 0 where it does not say."""
    blocks: Iterator
    """Arrays (n, channels). Raises UserError where the file is damaged, cut short or not finite."""


def open_sound(source: str | Path | bytes, name: str = "the recording") -> Sound:
    """A file, or the bytes of one, whose name for messages is `name`.

    libsndfile tells the format by content, so an MP3 that is named .wav reads all the same.
    Raises UserError for what is missing, unreadable or empty.
    """
    import soundfile

    if not isinstance(source, bytes):
        path = Path(source)
        name = str(source)
        if not path.is_file():  # a pipe would be waited for without end
            raise UserError(f"{path} is not a file" if path.exists() else f"there is no audio file {path}")
    try:
        file = soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else str(source))
    except (soundfile.LibsndfileError, RuntimeError, TypeError, MemoryError):
        return _open_with_av(source, name)
    stream = io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb")  # noqa: SIM115
    with stream:
        declared = max(file.frames if file.frames < 1 << 62 else 0, _declared_wav_frames(stream) or 0)
    return Sound(file.samplerate, declared, _checked(_soundfile_blocks(file, name), file.samplerate, declared, name))


def _soundfile_blocks(file, name: str) -> Iterator:
    import soundfile

    with file:
        while True:
            try:
                block = file.read(_BLOCK, dtype="float32", always_2d=True)
            except (soundfile.LibsndfileError, RuntimeError, MemoryError):
                raise _unreadable(name) from None
            if not len(block):
                return
            yield block


def _checked(blocks: Iterator, rate: int, declared: int, name: str) -> Iterator:
    """The blocks, after which their number is compared with what the header promised."""
    import numpy

    found = 0
    for block in blocks:
        if not numpy.isfinite(block).all():
            raise UserError(f"{name} holds samples that are not finite numbers; export it again")
        found += len(block)
        yield block
    if found == 0:
        raise UserError(f"{name} holds no samples; export it again")
    if declared - found > 0.05 * rate:  # some recorders miscount by a few samples
        raise UserError(
            f"{name} is cut short: it holds {found / rate:.2f} s of the {declared / rate:.2f} s that its header "
            "promises; copy it again"
        )


def _unreadable(name: str) -> UserError:
    return UserError(f"{name} cannot be read as audio; export it again as WAV or FLAC")


def _open_with_av(source: str | Path | bytes, name: str) -> Sound:
    demuxer = _DEMUXERS.get(Path(name).suffix.lower())
    if demuxer is None:
        raise _unreadable(name)
    try:
        import av
    except ImportError:
        raise UserError(f"{name} needs PyAV, of the extra data: pip install av") from None
    try:
        # From a file object and by one demuxer: nothing else on this machine can be opened on the file's word.
        stream = io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb")  # noqa: SIM115
        container = av.open(stream, format=demuxer)
        track = container.streams.audio[0]
        rate = track.rate
    except (av.error.FFmpegError, IndexError, ValueError, OSError):
        raise _unreadable(name) from None
    blocks = _checked(_av_blocks(av, container, track, name), rate, 0, name)
    return Sound(rate, 0, blocks)


def _av_blocks(av, container, track, name: str) -> Iterator:
    import numpy

    resampler = av.AudioResampler(format="fltp", rate=track.rate)  # to float; channels and rate stay
    try:
        waiting, count = [], 0
        for frame in container.decode(track):
            for piece in resampler.resample(frame):
                waiting.append(piece.to_ndarray().T)
                count += len(waiting[-1])
            if count >= _BLOCK:
                yield numpy.concatenate(waiting)
                waiting, count = [], 0
        if waiting:
            yield numpy.concatenate(waiting)
    except (av.error.FFmpegError, ValueError):  # also for channels that change on the way
        raise _unreadable(name) from None
    finally:
        container.close()


def _declared_wav_frames(file) -> int | None:
    """How many frames a WAV header promises (libsndfile takes what is there); None if it does not say."""
    riff, _, wave = struct.unpack("<4sI4s", file.read(12).ljust(12, b"\0"))
    if riff != b"RIFF" or wave != b"WAVE":
        return None
    block_align = 0
    while len(header := file.read(8)) == 8:
        name, size = struct.unpack("<4sI", header)
        if name == b"data":
            streamed = size == 0 or size >= 0x7FFFF000  # written by a pipe that could not know the end
            return None if streamed or not block_align else size // block_align
        if name == b"fmt ":
            coding, block_align = struct.unpack("<H10xH", file.read(min(size, 1024))[:14].ljust(14, b"\0"))
            if coding not in (1, 3, 0xFFFE):  # in compressed audio a block is not a frame
                return None
        else:
            file.seek(size + size % 2, os.SEEK_CUR)
    return None
