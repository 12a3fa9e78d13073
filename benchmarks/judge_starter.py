"""Judge a model on sentences it has not heard, of a speaker it was trained on, beside the recordings and the controls.

    python benchmarks/judge_starter.py CORPUS --sentences 200 --processes 2

    # the demo's finetuned voice, and what the starter voice made of its reference before
    python benchmarks/judge_starter.py CORPUS --split demo --model runs/demo/runs/my_voice --before starter \
        --processes 2 --out benchmarks/results/judge_demo.json

CORPUS/heldout and CORPUS/demo hold metadata.csv (name|text) and wavs/, as make_corpus.py leaves them. Writes
results/judge_starter.json (command, commit, hardware, versions, date, settings, the summary, and every sentence of
every system), and the sounds with --sounds FOLDER.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from demo import RESULTS, ROOT, processor
from tqdm.auto import tqdm

from f5kit import Voice, load_model, log_mel, prepare_dataset, read_audio, text_advantage
from f5kit.judge import COPY, OTHER_REFERENCE, SHUFFLED, judge, stranger
from f5kit.report import RECORDINGS
from f5kit.vocoder import load_vocoder

VOICE, BEFORE = "voice", "before"
PACKAGES = ("f5kit", "torch", "pocketsphinx", "faster-whisper", "jiwer", "resemblyzer", "vocos")
_voices: dict[str, Voice] = {}  # of a speaking process


def read_corpus(folder: Path) -> list[tuple[Path, str]]:
    """(recording, text) of every clip."""
    lines = (folder / "metadata.csv").read_text(encoding="utf-8").splitlines()
    names = (line.split("|", 1) for line in lines)
    return [(folder / "wavs" / f"{name}.wav", text) for name, text in names]


def choose_reference(clips: list[tuple[Path, str]], wanted: str | None) -> tuple[Path, str]:
    """The clip of that name, else of the last quarter the one nearest to 4 seconds: it is not judged.

    As long as the reference that the starter voice carries, which has never heard more than 8.9 s in one piece,
    reference and new speech together.
    """
    if wanted:
        return next(clip for clip in clips if clip[0].stem == wanted)
    return min(clips[-max(len(clips) // 4, 1) :], key=lambda clip: abs(len(read_audio(clip[0])) / 24_000 - 4))


def open_voices(vocoder: str, systems: dict, threads: int) -> None:
    torch.set_num_threads(threads)
    for system, (model, path, text) in systems.items():
        _voices[system] = Voice.load(model, path, text, vocoder=vocoder)
        vocoder = _voices[system].vocoder


def say(task: tuple) -> tuple:
    """The samples of one sentence, and their rate."""
    system, text, settings = task
    speech = _voices[system].speak(text, **settings, progress=False)
    return speech.audio.numpy(), speech.sample_rate


def speak_all(options, systems: dict, texts: list[str]) -> dict[str, list]:
    """{system: sounds} of each (model, reference, its text), in as many processes as asked for."""
    settings = {"steps": options.steps, "cfg_strength": options.cfg_strength, "seed": options.seed}
    tasks = [(system, text, settings) for system in systems for text in texts]
    threads = max(1, len(os.sched_getaffinity(0)) // options.processes)
    context = multiprocessing.get_context("spawn")
    arguments = (options.vocoder, systems, threads)
    with ProcessPoolExecutor(options.processes, context, open_voices, arguments) as workers:
        said = list(tqdm(workers.map(say, tasks), total=len(tasks), desc="speaking", unit="sentence"))
    sounds = [(torch.from_numpy(audio), rate) for audio, rate in said]
    return {system: sounds[i * len(texts) :][: len(texts)] for i, system in enumerate(systems)}


def learned_text(model, corpus: Path, clips: int) -> dict:
    """The paired own-text/other-text loss on held-out clips."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = prepare_dataset(corpus, Path(folder) / "heldout", heldout=10**6, progress=False)
        return asdict(text_advantage(model, dataset, clips=clips))


def told(value):
    """A setting as a record says it: a path from the project's folder, or by its name alone where it lies elsewhere."""
    if not isinstance(value, Path) and "/" not in str(value):
        return value
    path = Path(value).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--split", default="heldout", help="heldout, or demo: the demo voice")
    parser.add_argument("--model", default="starter", help="what load_model takes")
    parser.add_argument("--before", help="a model to set beside it, with the same reference")
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--reference", help="name of the held-out clip to speak from")
    parser.add_argument("--other", default="rms_1", help="bundled clip of another speaker")
    parser.add_argument("--vocoder", default="auto")
    parser.add_argument("--recogniser", default="pocketsphinx")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--cfg-strength", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dnsmos", action="store_true")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--sounds", type=Path, help="folder to keep all sounds in")
    parser.add_argument("--out", type=Path, default=RESULTS / "judge_starter.json")
    options = parser.parse_args()
    started = time.monotonic()

    clips = read_corpus(options.corpus / options.split)
    reference = choose_reference(clips, options.reference)
    judged = [clip for clip in clips if clip != reference][: options.sentences]
    texts = [text for _, text in judged]
    model = load_model(options.model)
    vocoder = load_vocoder(options.vocoder, model.config.mel)
    recorded = [read_audio(path) for path, _ in judged]
    systems = {RECORDINGS: [(audio, 24_000) for audio in recorded]}
    copies = (vocoder.decode(log_mel(audio, model.config.mel)) for audio in recorded)
    systems[COPY] = [(audio, 24_000) for audio in tqdm(copies, total=len(texts), desc="copy synthesis")]
    spoken = {VOICE: (options.model, *reference), OTHER_REFERENCE: (options.model, *stranger(options.other))}
    if options.before:
        spoken[BEFORE] = (options.before, *reference)
    systems |= speak_all(options, spoken, texts)
    systems[SHUFFLED] = [*systems[VOICE][1:], systems[VOICE][0]]
    report = judge(
        systems, texts, recogniser=options.recogniser, pool=[text for _, text in clips], seed=options.seed,
        with_dnsmos=options.dnsmos, processes=options.processes,
    )  # fmt: skip
    for row in report.table():
        print(row)
    if options.sounds:
        report.save(options.sounds)

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    settings = {name: told(value) for name, value in vars(options).items()}
    command = ["python", "benchmarks/judge_starter.py", *map(told, sys.argv[1:])]
    record = {
        "command": " ".join(command), "commit": commit.stdout.strip(),
        "date": date.today().isoformat(), "hardware": processor(), "versions": versions(), "settings": settings,
        "model": told(model.origin), "vocoder": str(vocoder),
        "reference": {"clip": reference[0].stem, "text": reference[1]},
        "text_advantage": learned_text(model, options.corpus / options.split, options.sentences),
        "seconds": round(time.monotonic() - started, 1), **report.to_dict(),
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"text advantage: {record['text_advantage']}\nwritten: {options.out}")


if __name__ == "__main__":
    main()
