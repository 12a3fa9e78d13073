"""F7: broken recordings. Every one gets its verdict, none ends the preparation, none is read from elsewhere."""

from __future__ import annotations

import json
import os
import re
import zlib
from fractions import Fraction

import numpy
import pytest
import soundfile
from preparing import TEXT, accounted, prepared, voice

from f5kit.audio import read_audio

pytestmark = pytest.mark.usefixtures("one_thread")  # short clips are no work to share
pytest.importorskip("av")


def mono(name: str, seconds: float = 2.0, rate: int = 24_000) -> numpy.ndarray:
    """A sound of its own for each vector: the same one twice would be a duplicate."""
    return voice(seconds, rate, seed=zlib.crc32(name.encode()))


def wav(change=lambda x: x, rate: int = 24_000, subtype: str = "PCM_16", form: str = "WAV", seconds: float = 2.0):
    def write(path):
        soundfile.write(path, change(mono(path.name, seconds, rate)), rate, subtype=subtype, format=form)

    return write


def raw(content: bytes):
    return lambda path: path.write_bytes(content)


def cut(writer, keep):
    def write(path):
        writer(path)
        content = path.read_bytes()
        path.write_bytes(content[: keep(len(content))])

    return write


def with_bytes(place: int, value: bytes, writer=None):
    def write(path):
        (writer or wav())(path)
        content = bytearray(path.read_bytes())
        place_now = place if place >= 0 else len(content) // 2
        content[place_now : place_now + len(value)] = value
        path.write_bytes(content)

    return write


def with_chunk(path):
    wav()(path)
    content = path.read_bytes()
    path.write_bytes(content[:12] + b"LIST" + (26).to_bytes(4, "little") + b"INFOISFT" + b"\0" * 18 + content[12:])


def changed(index, value):
    def change(samples):
        samples[index] = value
        return samples

    return change


def av_file(form: str, codec: str, video: bool = False, channels: str = "mono"):
    def write(path):
        import av

        with av.open(str(path), "w", format=form) as container:
            track = container.add_stream(codec, rate=24_000, layout=channels)
            if video:
                pictures = container.add_stream("mpeg4", rate=10)
                pictures.width, pictures.height, pictures.pix_fmt = 32, 32, "yuv420p"
                for time in range(20):
                    picture = av.VideoFrame.from_ndarray(numpy.zeros((32, 32, 3), numpy.uint8), format="rgb24")
                    picture.pts, picture.time_base = time, Fraction(1, 10)
                    container.mux(pictures.encode(picture))
                container.mux(pictures.encode(None))
            samples = numpy.tile(mono(path.name), (1 if channels == "mono" else 2, 1))
            frame = av.AudioFrame.from_ndarray(numpy.ascontiguousarray(samples), format="fltp", layout=channels)
            frame.rate, frame.pts, frame.time_base = 24_000, 0, Fraction(1, 24_000)
            container.mux(track.encode(frame))
            container.mux(track.encode(None))

    return write


def an_hour(path):
    soundfile.write(path, numpy.zeros(8000 * 3600, numpy.int16), 8000)


def link(path):
    wav()(path.with_suffix(".hidden"))
    path.symlink_to(path.with_suffix(".hidden").name)


def link_out(path):
    outside = path.parent.parent / "outside.wav"
    wav()(outside)
    path.symlink_to(outside)


MP3 = wav(form="MP3", subtype="MPEG_LAYER_III")
FLAC = wav(form="FLAC")
M4A = av_file("ipod", "aac")
# (name, how to write it, verdict, a word of the reason)
AUDIO = [
    ("good.wav", wav(), "accepted", None),
    ("zero_bytes.wav", raw(b""), "rejected", "cannot be read"),
    ("header_of_30_bytes.wav", cut(wav(), lambda n: 30), "rejected", "cannot be read|holds no samples"),
    ("header_only.wav", cut(wav(), lambda n: 44), "rejected", "holds no samples|cut short"),
    ("one_sample.wav", wav(lambda x: x[:1]), "rejected", "silent|lasts"),
    ("truncated_to_half.wav", cut(wav(), lambda n: n // 2), "rejected", "holds 1.00 s of the 2.00 s"),
    ("size_of_a_pipe.wav", with_bytes(40, b"\xff\xff\xff\xff"), "accepted", None),
    ("rate_0.wav", with_bytes(24, b"\0\0\0\0"), "rejected", "cannot be read|sample rate"),
    ("rate_4000.wav", wav(rate=4000), "rejected", "sample rate of 4000 Hz"),
    ("rate_8000.wav", wav(rate=8000), "accepted", None),
    ("rate_44100.wav", wav(rate=44_100), "accepted", None),
    ("rate_96000.wav", wav(rate=96_000), "accepted", None),
    ("rate_11025.wav", wav(rate=11_025), "accepted", None),
    ("wrong_rate.wav", with_bytes(24, (192_000).to_bytes(4, "little")), "rejected", "characters a second|lasts 0.25"),
    ("no_channels.wav", with_bytes(22, b"\0\0"), "rejected", "cannot be read"),
    ("u8.wav", wav(subtype="PCM_U8"), "accepted", None),
    ("s24.wav", wav(subtype="PCM_24"), "accepted", None),
    ("s32.wav", wav(subtype="PCM_32"), "accepted", None),
    ("float.wav", wav(subtype="FLOAT"), "accepted", None),
    ("double.wav", wav(subtype="DOUBLE"), "accepted", None),
    ("ulaw.wav", wav(subtype="ULAW"), "accepted", None),
    ("extra_chunk.wav", with_chunk, "accepted", None),
    ("nan.wav", wav(changed(500, numpy.nan), subtype="FLOAT"), "rejected", "not finite"),
    ("inf.wav", wav(changed(500, numpy.inf), subtype="FLOAT"), "rejected", "not finite"),
    ("peak_12.wav", wav(lambda x: x * 12 / abs(x).max(), subtype="FLOAT"), "repaired", "peak of 12.00 lowered"),
    ("silent.wav", wav(lambda x: 0 * x), "rejected", "silent"),
    ("faint_hiss.wav", wav(lambda x: x * 1e-3, subtype="FLOAT"), "rejected", "silent"),
    ("clipped.wav", wav(lambda x: numpy.clip(x * 40, -1, 1)), "rejected", "clipped"),
    ("offset.wav", wav(lambda x: x + 0.2), "repaired", "DC offset of 0.200 removed"),
    ("stereo.wav", wav(lambda x: numpy.stack([x, 0.5 * x], 1)), "accepted", None),
    ("six_channels.wav", wav(lambda x: numpy.stack([x] * 6, 1)), "accepted", None),
    ("anti_phase.wav", wav(lambda x: numpy.stack([x, -x], 1)), "repaired", "opposite phase"),
    ("mp3.mp3", MP3, "accepted", None),
    ("mp3_named.wav", MP3, "accepted", None),
    ("mp3_of_noise.mp3", raw(numpy.random.default_rng(1).bytes(20_000)), "rejected", "cannot be read|characters"),
    ("flac.flac", FLAC, "accepted", None),
    ("flac_named.wav", FLAC, "accepted", None),
    ("flac_truncated.flac", cut(FLAC, lambda n: n // 2), "rejected", "cut short|cannot be read"),
    ("flac_damaged.flac", with_bytes(-1, b"\xaa" * 4000, FLAC), "rejected", "cut short|cannot be read|not finite"),
    ("ogg.ogg", wav(form="OGG", subtype="VORBIS"), "accepted", None),
    ("opus.opus", wav(form="OGG", subtype="OPUS"), "accepted", None),
    ("aiff.aiff", wav(form="AIFF"), "accepted", None),
    ("m4a.m4a", M4A, "accepted", None),
    ("m4a_stereo.m4a", av_file("ipod", "aac", channels="stereo"), "accepted", None),
    ("m4a_truncated.m4a", cut(M4A, lambda n: n // 2), "rejected", "cannot be read"),
    ("film.mp4", av_file("mp4", "aac", video=True), "accepted", None),
    ("film.mkv", av_file("matroska", "aac", video=True), "accepted", None),
    ("playlist.m4a", raw(b"#EXTM3U\n#EXTINF:9,\ngood.wav\n#EXT-X-ENDLIST\n"), "rejected", "cannot"),
    ("html.wav", raw(b"<!DOCTYPE html><html>404</html>" * 99), "rejected", "cannot be read"),
    ("html.mp4", raw(b"<!DOCTYPE html><html>404</html>" * 99), "rejected", "cannot be read"),
    ("pipe.wav", os.mkfifo, "rejected", "is not a file"),
    ("folder.wav", os.mkdir, "rejected", "there is no recording"),
    ("link.wav", link, "accepted", None),
    ("link_out.wav", link_out, "rejected", "leads out of the folder"),
    ("link_to_nothing.wav", lambda path: path.symlink_to("nowhere.wav"), "rejected", "there is no audio file"),
    ("seconds_0.29.wav", wav(seconds=0.29), "rejected", "lasts 0.29 s"),
    ("seconds_0.3.wav", wav(seconds=0.3), "accepted", None),
    ("seconds_30.wav", wav(seconds=30.0), "accepted", None),
    ("seconds_30.01.wav", wav(seconds=30.01), "rejected", "lasts 30.01 s"),
    ("an_hour.wav", an_hour, "rejected", "lasts 3600"),
]  # fmt: skip


def test_every_recording_gets_its_verdict(tmp_path, report):
    source = tmp_path / "recordings"
    source.mkdir()
    for name, write, _, _ in AUDIO:
        write(source / name)
    short = {"seconds_0.3.wav": "Yes."}
    (source / "metadata.csv").write_text("".join(f"{name}|{short.get(name, TEXT)}\n" for name, *_ in AUDIO))
    rows, summary = prepared(source)
    by_line = {row["place"]: row for row in rows}
    assert len(rows) == len(AUDIO)
    for line, (name, _, verdict, reason) in enumerate(AUDIO, 1):
        row = by_line[f"metadata.csv line {line}"] if f"metadata.csv line {line}" in by_line else None
        assert row is not None, name
        assert row["status"] == verdict, (name, row)
        if reason:
            assert any(re.search(reason, said) for said in row["reasons"]), (name, row)
        assert str(tmp_path) not in json.dumps(row)  # no path of this machine in a file that is shared
    # What is used is equally loud, 24 kHz, mono, 16 bit, and as long as it says.
    import pyloudnorm

    for row in rows:
        if row["status"] != "rejected":
            path = tmp_path / "recordings_prepared" / row["audio"]
            info = soundfile.info(str(path))
            assert (info.samplerate, info.channels, info.subtype) == (24_000, 1, "PCM_16")
            assert info.frames / 24_000 == pytest.approx(row["seconds"], abs=1e-4)
            assert row["frames"] == info.frames // 256 + 1
            if info.frames > 10_000:
                heard = pyloudnorm.Meter(24_000).integrated_loudness(read_audio(path).numpy())
                assert heard == pytest.approx(-23, abs=0.2), row
    assert len(AUDIO) >= 30
    report("F7", injected=len(AUDIO), survived=len(by_line), **accounted(summary))
