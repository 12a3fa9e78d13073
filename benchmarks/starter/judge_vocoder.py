"""How near vocoders bring recordings back from their mels: distances, what is understood, and what it costs.

    python benchmarks/starter/judge_vocoder.py FIGURES.json CLIPS griffin-lim build/vocoder/vocoder

CLIPS is a folder with metadata.csv and wavs/, as make_corpus.py writes (heldout/) and as the demo voice is. Each clip
goes to its log-mel and back (copy synthesis). A figure is the mean over clips; beside it stands the difference to the
first vocoder, clip by clip, with its bootstrap interval. The recordings themselves are judged too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from train_vocoder import audible, read_clip, rounded
from vocoder_losses import SpectralDistance

from f5kit import load_vocoder, log_mel
from f5kit.asr import Recogniser, count_errors, load_recogniser
from f5kit.audio import resample, write_audio

RATE = 24_000
SEEDS = 2000
BLUR = 0.5
"""How far mels are blurred in the second half of the figures: each frame and bin keeps so much of its own value and
takes the rest from its neighbours. A small acoustic model's mels are smoother than those of recordings."""


def read_clips(folder: Path, count: int) -> list[tuple[Tensor, str]]:
    """The first clips, as a dataset would hold them, and their texts."""
    rows = [row.split("|") for row in (folder / "metadata.csv").read_text(encoding="utf-8").splitlines()]
    sounds = {path.stem: path for path in (folder / "wavs").iterdir() if path.suffix in (".wav", ".flac")}
    paths = [sounds[name] for name, _ in rows[:count]]
    return [(rounded(read_clip(path)), text) for path, (_, text) in zip(paths, rows, strict=False)]


def blurred(mel: Tensor) -> Tensor:
    """(n, d), each value mixed with its four neighbours."""
    edged = torch.nn.functional.pad(mel[None, None], (1, 1, 1, 1), mode="replicate")[0, 0]
    beside = edged[:-2, 1:-1] + edged[2:, 1:-1] + edged[1:-1, :-2] + edged[1:-1, 2:]
    return BLUR * mel + (1 - BLUR) / 4 * beside


def naturalness():
    """DNSMOS (Reddy et al. 2022) by speechmos, which has its weights in the package; None where it is absent."""
    try:
        from speechmos import dnsmos
    except ImportError:
        return None
    return lambda audio: dnsmos.run(resample(audio, RATE, 16_000).clamp(-1, 1).numpy(), 16_000)["ovrl_mos"]


def figures_of(audio: Tensor, clip: Tensor, text: str, distance: SpectralDistance, ear: Recogniser, mos) -> dict:
    """Everything that is measured of one sound (nw,) beside its recording."""
    clip = clip[: len(audio)]
    ours, theirs = log_mel(audio), log_mel(clip)
    found = {"mel": float((audible(ours) - audible(theirs)).abs().mean())}
    found["mel_all"] = float((ours - theirs).abs().mean())
    found |= {f"stft_{name}": float(x) for name, x in distance(audio[None], clip[None]).items()}
    errors = count_errors(text, ear.transcribe(audio, RATE))
    found |= {"word_errors": errors.word_errors, "words": errors.words}
    return found | ({"dnsmos": float(mos(audio))} if mos else {})


def judge(name: str, clips: list[tuple[Tensor, str]], ear: Recogniser, mos, sounds: Path | None) -> list[dict]:
    """A row a clip, and its sound in the folder `sounds`.

    name: "recordings", or what `load_vocoder` takes, with "+blur" for blurred mels.
    """
    plain = name.removesuffix("+blur")
    vocoder = None if name == "recordings" else load_vocoder(plain)
    distance, rows = SpectralDistance((256, 512, 1024, 2048)), []
    for clip, text in clips:
        mel = log_mel(clip)
        mel = blurred(mel) if name != plain else mel
        began = time.process_time()
        audio = vocoder.decode(mel) if vocoder else clip
        cost = (time.process_time() - began) / (len(clip) / RATE)
        if sounds:
            write_audio(sounds / f"{name.strip('/').replace('/', '_')}_{len(rows):03d}.wav", audio)
        rows.append(figures_of(audio, clip, text, distance, ear, mos) | {"processor_seconds_a_second": cost})
    return rows


def summary(rows: list[dict], others: list[dict]) -> dict:
    """Means, and differences to the same clips of `others` with 95 % intervals."""
    found = {name: _mean(rows, name) for name in rows[0] if name not in ("words", "word_errors")}
    found["wer"] = _wer(rows, range(len(rows)))
    if rows is not others:
        rng = np.random.default_rng(0)
        draws = [rng.integers(0, len(rows), len(rows)) for _ in range(SEEDS)]
        for name in ("wer", *(name for name in ("mel", "stft_log", "dnsmos") if name in rows[0])):
            measure = _wer if name == "wer" else lambda x, chosen, name=name: _mean([x[i] for i in chosen], name)
            apart = [measure(rows, chosen) - measure(others, chosen) for chosen in draws]
            found[f"{name}_difference"] = [*np.percentile(apart, [2.5, 50, 97.5])]
    return {name: np.round(value, 4).tolist() for name, value in found.items()}


def _mean(rows: list[dict], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def _wer(rows: list[dict], chosen) -> float:
    return sum(rows[i]["word_errors"] for i in chosen) / sum(rows[i]["words"] for i in chosen)


def circumstances() -> dict:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return {
        "command": "python benchmarks/starter/judge_vocoder.py " + " ".join(Path(x).name for x in sys.argv[1:]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": f"CPU {names[0] if names else platform.processor()}, {os.cpu_count()} cores, 1 thread used",
        "versions": {"python": platform.python_version()} | {x: version(x) for x in ("torch", "vocos", "pocketsphinx")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("clips", type=Path)
    parser.add_argument("vocoders", nargs="+", help="names or folders; NAME+blur: from blurred mels")
    parser.add_argument("--sounds", type=Path, help="a folder for what was heard")
    parser.add_argument("--count", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    clips, ear, mos = read_clips(args.clips, args.count), load_recogniser("pocketsphinx"), naturalness()
    rows = {name: judge(name, clips, ear, mos, args.sounds) for name in ("recordings", *args.vocoders)}
    table = {name: summary(found, rows[args.vocoders[0]]) for name, found in rows.items()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(circumstances() | {"clips": len(clips), "figures": table, "rows": rows}, indent=1))
    for name, found in table.items():
        print(name, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
