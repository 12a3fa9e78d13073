"""Speech as the bytes of a sound file, whole or while it is made.

Every format but raw PCM carries where it comes from (`provenance`). Audio is float32 (nw,), full scale at 1.0.
"""

from __future__ import annotations

import io

from torch import Tensor

from f5kit.errors import UserError
from f5kit.provenance import Provenance, tag

MEDIA_TYPES = {
    "wav": "audio/wav", "flac": "audio/flac", "mp3": "audio/mpeg", "opus": "audio/ogg", "pcm": "audio/pcm",
}  # fmt: skip
_KINDS = {"wav": ("WAV", "PCM_16"), "flac": ("FLAC", "PCM_16"), "mp3": ("MP3", None), "opus": ("OGG", "OPUS")}
_BLOCK = 1 << 16
_UNKNOWN = b"\xff\xff\xff\xff"  # the length of a WAV that is still being made


class Encoder:
    """Turns sound into a file: the bytes of `write` and `end` in a row are the file.

    With `live`, each piece of sound comes out as soon as its coder lets go of it, and the header of a WAV says that its
    length is unknown; FLAC comes at the end all the same, for few programs read one of unknown length. Otherwise all
    bytes come at the end. "pcm" is 16 bit, little endian, without a header.
    """

    def __init__(self, form: str, sample_rate: int, provenance: Provenance, *, live: bool = False):
        if form not in MEDIA_TYPES:
            raise UserError(f"format is {form!r}; choose one of {', '.join(MEDIA_TYPES)}")
        self.form, self.live = form, live and form != "flac"
        self._file, self._sink = None, _Sink()
        if form != "pcm":
            import soundfile

            kind, subtype = _KINDS[form]
            # MP3: readers guess the length of a stream by its bit rate, so that must not change on the way
            steady = {"bitrate_mode": "CONSTANT", "compression_level": 0.7} if form == "mp3" else {}
            self._file = soundfile.SoundFile(self._sink, "w", sample_rate, 1, format=kind, subtype=subtype, **steady)
            tag(self._file, provenance)

    def write(self, audio: Tensor) -> bytes:
        samples = audio.detach().cpu().float().clamp(-1, 1).numpy()
        if self._file is None:
            self._sink.write((samples * 32767).round().astype("<i2").tobytes())
        for start in range(0, len(samples) if self._file else 0, _BLOCK):  # the Opus coder fails on minutes at once
            self._file.write(samples[start : start + _BLOCK])
        return self._sink.take(self.form) if self.live else b""

    def end(self) -> bytes:
        if self._file is not None:
            self._file.close()
        return self._sink.take(self.form) if self.live else self._sink.getvalue()


class _Sink(io.BytesIO):
    """A file in memory, of which the beginning may have been sent already: what is written there later is lost."""

    sent = 0

    def take(self, form: str) -> bytes:
        """What was not yet sent."""
        first, data = self.sent == 0, bytes(self.getbuffer()[self.sent :])
        self.sent += len(data)
        if form == "wav" and first and data:
            place = 12
            while data[place : place + 4] != b"data":  # over the chunks before it: fmt and LIST
                place += 8 + int.from_bytes(data[place + 4 : place + 8], "little")
            data = b"RIFF" + _UNKNOWN + data[8 : place + 4] + _UNKNOWN + data[place + 8 :]
        return data


def encode(audio: Tensor, sample_rate: int, form: str, provenance: Provenance) -> bytes:
    """A whole file."""
    encoder = Encoder(form, sample_rate, provenance)
    return encoder.write(audio) + encoder.end()
