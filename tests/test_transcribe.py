"""Writing down what nobody has written: a real Whisper, tiny and made here, tried in a process of its own."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import soundfile
import torch
from preparing import TEXT, voice

from f5kit import transcribe
from f5kit.errors import UserError
from f5kit.host import Decision, Host
from f5kit.prepare import prepare_dataset
from f5kit.transcribe import load_transcriber

pytest.importorskip("faster_whisper")
pytest.importorskip("transformers")
from tiny_whisper import make_tiny_whisper  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def whisper(tmp_path_factory) -> Path:
    return make_tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def transcriber(whisper):
    return load_transcriber(whisper)


def test_a_model_from_a_folder_writes_and_tells_the_language(transcriber, whisper):
    assert transcriber.name == f"whisper:{whisper}" and "8-bit" in transcriber.why
    audio = torch.from_numpy(voice(2.0))
    text, language = transcriber(audio, 24_000)
    assert isinstance(text, str) and len(language) in (2, 3)
    assert transcriber(audio, 24_000) == (text, language)  # the same sound, the same words
    assert transcriber(audio, 24_000, "vi")[1] == "vi"
    assert transcriber.detect_language([audio, audio], 24_000) == language


def test_what_fails_in_its_own_process_falls_back_to_the_cpu(whisper, tmp_path, monkeypatch):
    """A GPU that is none: CTranslate2 fails there, and the CPU takes over with the reason told."""
    host = Host("colab", "cuda", "Tesla T4", 15.0, 12.0, 50.0, 2, Decision("fp16", ""), "3.11", "2.13")
    monkeypatch.setattr(transcribe, "detect_host", lambda device: host)
    chosen = load_transcriber(whisper)
    assert "8-bit" in chosen.why and "cuda float16 failed" in chosen.why
    assert transcribe._choices(host)[0][:2] == ("cuda", "float16") and transcribe._size(host, "cuda") == "large-v3"


def test_a_process_that_dies_is_told_by_its_signal(tmp_path, monkeypatch):
    """An interpreter that ends as a CUDA library without its symbols ends: by SIGABRT."""
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\nkill -ABRT $$\n")
    dying.chmod(dying.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setattr(transcribe.sys, "executable", str(dying))
    assert transcribe._try("small", "cuda", "float16", None) == "the process died of signal 6"


def test_a_model_that_is_nowhere_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in (str(tmp_path / "nothing"), "no-such-model"):
        with pytest.raises(UserError) as caught:
            load_transcriber(name)
        assert "not in the cache and the Hub did not answer" in str(caught.value) and "\n" not in str(caught.value)


class Listener:
    """Writes a text for each clip, and counts them."""

    name = "listener 1"

    def __init__(self):
        self.heard = 0

    def __call__(self, audio, rate, language=None):
        self.heard += 1
        return f"{TEXT} Number {len(audio)}.", language or "en"


def test_what_has_no_text_is_written_down_once_and_what_has_one_is_checked(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    for n in range(4):
        soundfile.write(source / f"a{n}.wav", voice(4.0 + n / 10, seed=n), 24_000)
    (source / "a0.txt").write_text("Something that nobody would take for it, whatever they hear.")
    (source / "a1.txt").write_text(f"{TEXT} Number {round(4.1 * 24_000)}.")
    listener = Listener()
    rows = prepare_dataset(source, tmp_path / "out", transcriber=listener, progress=False).rows()
    assert listener.heard == 2 and [row["status"] for row in rows] == ["accepted"] * 4
    assert rows[2]["text"].startswith(TEXT) and rows[2]["language"] == "en"
    rows = prepare_dataset(source, tmp_path / "out", transcriber=listener, check_texts=True, progress=False).rows()
    assert listener.heard == 4  # the other two
    assert "asr" in rows[0]["flags"] and rows[0]["measures"]["cer"] > 0.5
    assert "asr" not in rows[1]["flags"] and rows[1]["measures"]["cer"] == 0
    assert rows[1]["text"].endswith("98400.")  # a check changes no text
    soundfile.write(source / "a3.wav", voice(5.0, seed=33), 24_000)
    prepare_dataset(source, tmp_path / "out", transcriber=listener, check_texts=True, progress=False)
    assert listener.heard == 5


def test_a_real_whisper_of_no_sense_makes_rows_all_the_same(tmp_path, transcriber):
    """Random weights write nothing or nonsense: every row has a verdict, and the folder is whole or nothing is."""
    source = tmp_path / "in"
    source.mkdir()
    for n in range(2):
        soundfile.write(source / f"a{n}.wav", voice(3.0, seed=n), 24_000)
    (source / "a0.txt").write_text(TEXT)
    rows = prepare_dataset(source, tmp_path / "out", transcriber=transcriber, check_texts=True, progress=False).rows()
    assert [row["id"] for row in rows] == ["a0", "a1"]
    assert rows[0]["status"] == "accepted" and "asr" in rows[0]["flags"]
    assert os.listdir(tmp_path) and rows[1]["status"] in ("accepted", "rejected")
