"""Fixtures: a small prepared dataset of real (synthetic-voice) speech, and models whose output is not zero."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

DEMO_VOICE = Path(__file__).parents[1] / "f5kit" / "demo_voice"


@pytest.fixture(autouse=True, scope="session")
def two_threads():
    """As many threads as every machine has: bit-exact comparisons need the same number in both runs."""
    torch.set_num_threads(min(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2))


@pytest.fixture(scope="module")
def one_thread(two_threads):
    """For models so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def recordings(tmp_path_factory) -> Path:
    """The shortest 14 clips of the demo voice with their transcripts, in LJSpeech form."""
    folder = tmp_path_factory.mktemp("recordings")
    (folder / "wavs").mkdir()
    clips = sorted((DEMO_VOICE / "wavs").glob("*.flac"), key=lambda f: f.stat().st_size)[:14]
    names = {clip.stem for clip in clips}
    for clip in clips:
        shutil.copy(clip, folder / "wavs")
    lines = (DEMO_VOICE / "metadata.csv").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.split("|")[0] in names]
    (folder / "metadata.csv").write_text("\n".join(kept) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def dataset(recordings, tmp_path_factory):
    """Those clips, prepared."""
    from f5kit.prepare import prepare_dataset

    return prepare_dataset(recordings, tmp_path_factory.mktemp("data") / "small", progress=False)


@pytest.fixture(scope="module")
def voice(one_thread):
    """The embedded voice."""
    from f5kit import Voice

    return Voice.load("starter")


@pytest.fixture(scope="module")
def other(voice):
    """The embedded voice with another speaker's reference."""
    from f5kit.inference import demo_reference

    return voice.refer_to(*demo_reference())


@pytest.fixture
def awake():
    """A function that fills a model's zero-initialised layers, so that its output depends on everything."""

    def fill(model, seed: int = 0):
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.any():
                    parameter.copy_(torch.randn(parameter.shape, generator=g, dtype=parameter.dtype) * 0.2)
        return model

    return fill
