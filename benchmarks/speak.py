"""Speaking: f5kit beside upstream's inference pipeline in one run, what half precision costs, and the first sound.

    .venv-parity/bin/python benchmarks/speak.py                    v1_Small and v1_Base: minutes on a GPU, and
                                                                   five quarters of an hour on two cores
    .venv-parity/bin/python benchmarks/speak.py --quick            v1_Small, 5 s, 7 steps: a minute or two, only told
    python benchmarks/speak.py --words                             the embedded voice alone; needs the extra `judge`

Both pipelines get the same random weights of the published structure, the same 3 s of reference, the same text and
length, each its own vocoder of the published Vocos structure, and run as they do by default on this device: upstream
through its infer_batch_process, with the chunks of its chunk_text; f5kit through Voice.speak. Repetitions alternate;
a row that has taken a minute is not repeated.
A time is that of the whole call, from the text to the samples. Writes benchmarks/results/speak.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

import f5kit
from f5kit.asr import comparable, count_errors
from f5kit.audio import import_torchaudio, log_mel, match_loudness, read_audio
from f5kit.checkpoint import fresh_model
from f5kit.config import PRESETS
from f5kit.inference import Voice, demo_reference
from f5kit.judge import demo_texts
from f5kit.reference import Reference
from f5kit.scores import interval
from f5kit.text import Tokenizer, english_vocab
from f5kit.tuning import apply_environment, speaking_precision
from f5kit.vocoder import VocosVocoder

ROOT = Path(__file__).parents[1]
REFERENCE_SECONDS = 3.0
PATIENCE = 60.0  # seconds after which a row is not repeated
SENTENCE = "The river ran high that spring, and the road along it was closed for many weeks. "
SAID = "A reference of three seconds, as it is said."
VOCOS = {  # charactr/vocos-mel-24khz
    "feature_extractor": {"class_path": "vocos.feature_extractors.MelSpectrogramFeatures", "init_args": {
        "sample_rate": 24_000, "n_fft": 1024, "hop_length": 256, "n_mels": 100, "padding": "center"}},
    "backbone": {"class_path": "vocos.models.VocosBackbone", "init_args": {
        "input_channels": 100, "dim": 512, "intermediate_dim": 1536, "num_layers": 8}},
    "head": {"class_path": "vocos.heads.ISTFTHead", "init_args": {
        "dim": 512, "n_fft": 1024, "hop_length": 256, "padding": "center"}},
}  # fmt: skip


def make_vocoder(device: str) -> VocosVocoder:
    """Vocos as it is published, with random weights."""
    import_torchaudio()
    from vocos.heads import ISTFTHead
    from vocos.models import VocosBackbone

    torch.manual_seed(0)
    parts = {"backbone": VocosBackbone, "head": ISTFTHead}
    tensors = {
        f"{name}.{k}": t
        for name, make in parts.items()
        for k, t in make(**VOCOS[name]["init_args"]).state_dict().items()
    }
    return VocosVocoder(VOCOS, tensors).to(device)


def make_voice(name: str, device: str) -> Voice:
    """A published structure with lively random weights, fp32."""
    config = PRESETS[name].replace(vocab_size=95, tokenizer="char", normaliser="basic")
    model = fresh_model(config, Tokenizer(english_vocab()))
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.02)
    audio = match_loudness(read_audio(demo_reference()[0])[: int(REFERENCE_SECONDS * 24_000)])
    return Voice(model.to(device), Reference(audio, log_mel(audio), SAID, "demo"), make_vocoder(device))


def upstream_pipeline(voice: Voice, device: str):
    """A function (text, seconds, steps) -> samples that speaks as upstream does, with the same weights."""
    sys.path[:0] = [str(ROOT / "tests" / "parity"), str(ROOT / "tests")]
    import_torchaudio()
    from f5_tts.infer import utils_infer
    from models import upstream_model

    model = upstream_model(voice.model.config)
    model.load_state_dict(voice.model.state_dict())
    model.vocab_char_map = {c: i for i, c in enumerate(english_vocab())}
    # as its load_checkpoint does: half precision on a GPU of capability 7 and up, fp32 on a CPU
    half = device == "cuda" and torch.cuda.get_device_capability()[0] >= 7
    model = model.to(torch.float16 if half else torch.float32).to(device).eval()
    vocoder = make_vocoder(device)

    class Decoder:
        def decode(self, mel: Tensor) -> Tensor:
            return vocoder.head(vocoder.backbone(mel))

    audio = voice.reference.audio[None]
    reference_text = SAID + " "

    def speak(text: str, seconds: float, steps: int) -> Tensor:
        most = int(len(reference_text.encode()) / REFERENCE_SECONDS * (22 - REFERENCE_SECONDS))
        batches = utils_infer.chunk_text(text, max_chars=most)
        made = utils_infer.infer_batch_process(
            (audio, 24_000), reference_text, batches, model, Decoder(), progress=None, nfe_step=steps,
            fix_duration=REFERENCE_SECONDS + seconds, device=device,
        )  # fmt: skip
        return torch.from_numpy(next(made)[0])

    return speak


def timed(action, device: str) -> tuple[float, Tensor]:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    made = action()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, made


def compare(name: str, lengths: list[int], steps: list[int], repeats: int, device: str) -> Iterator[dict]:
    """One row for each length and number of steps: medians, the ratio, and what the precision changes in the mel."""
    voice = make_voice(name, device)
    parameters = sum(p.numel() for p in voice.model.parameters())
    precision = speaking_precision(parameters, device)
    theirs = upstream_pipeline(voice, device)
    exact = {}
    for seconds in lengths:  # in fp32
        text = text_of(seconds)
        exact[seconds] = voice.speak(text, duration=seconds, steps=steps[0], progress=False).mel
    voice.precision = precision.value
    if apply_environment(device)["ENABLE_TORCH_COMPILE"]:
        from f5kit.tuning import compile_backbone

        compile_backbone(voice.model)
    for seconds in lengths:
        text = text_of(seconds)
        half = voice.speak(text, duration=seconds, steps=steps[0], progress=False).mel
        change = ((half - exact[seconds]).square().mean().sqrt() / exact[seconds].square().mean().sqrt()).item()
        theirs(text, seconds, 2)
        for count in steps:
            ours_took, theirs_took, first = [], [], []
            started = time.perf_counter()
            while not ours_took or (len(ours_took) < repeats and time.perf_counter() - started < PATIENCE):
                how = {"duration": float(seconds), "steps": count}
                took, said = timed(lambda: voice.speak(text, progress=False, **how), device)  # noqa: B023
                ours_took.append(took)
                took, samples = timed(lambda: theirs(text, seconds, count), device)  # noqa: B023
                theirs_took.append(took)
                first.append(timed(lambda: next(voice.stream(text, first=2.0, **how)), device)[0])  # noqa: B023
            row = {
                "model": name, "seconds": seconds, "steps": count, "precision": precision.value,
                "ours": statistics.median(ours_took), "upstream": statistics.median(theirs_took),
                "ratio": statistics.median(theirs_took) / statistics.median(ours_took),
                "rtf": statistics.median(ours_took) / said.seconds, "first_sound": statistics.median(first),
                "mel_change": change, "made": [said.seconds, len(samples) / 24_000],
                "repetitions": {"ours": ours_took, "upstream": theirs_took, "first_sound": first},
            }  # fmt: skip
            told = {k: f"{v:.3g}" if isinstance(v, float) else v for k, v in row.items() if k != "repetitions"}
            print(json.dumps(told), flush=True)
            yield row


def text_of(seconds: float) -> str:
    """About as many letters as are said in that time."""
    return SENTENCE * max(1, round(seconds / 5))


# ---- The embedded voice


def first_sound(repeats: int = 3) -> list[float]:
    """Seconds from starting Python to the first samples of a 3 s sentence at 16 steps, by the embedded voice."""
    code = (
        "from f5kit import Voice\n"
        "voice = Voice.load('starter')\n"
        "speech = voice.speak('This is a sentence of three seconds.', duration=3.0, steps=16, progress=False)\n"
        "assert speech.seconds > 2.5"
    )
    took = []
    for _ in range(repeats + 1):  # the first fills the file cache
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        took.append(time.perf_counter() - started)
    return took[1:]


def words(sentences: int, steps: int = 16) -> dict:
    """Word errors of the embedded voice: fp32 against bf16, and one long text against its sentences alone.

    A recogniser hears every sound; the figures are counts of words.
    """
    from f5kit.asr import load_recogniser

    voice, ear = Voice.load("starter"), load_recogniser()
    texts = demo_texts()[:sentences]
    counts = [len(text.split()) for text in texts]
    heard, wrong, mels = {}, {}, {}
    for precision in ("fp32", "bf16"):
        voice.precision = precision
        said = [voice.speak(text, steps=steps, progress=False) for text in texts]
        mels[precision] = torch.cat([speech.mel for speech in said])
        heard[precision] = [ear.transcribe(speech.audio, speech.sample_rate) for speech in said]
        wrong[precision] = [count_errors(*pair).word_errors for pair in zip(texts, heard[precision], strict=True)]
    voice.precision = "fp32"
    change = (mels["bf16"] - mels["fp32"]).square().mean().sqrt() / mels["fp32"].square().mean().sqrt()
    low, high = interval(lambda a, b, n: (b - a).sum(-1) / n.sum(-1), wrong["fp32"], wrong["bf16"], counts)
    return {
        "recogniser": str(ear), "sentences": len(texts), "words": sum(counts),
        "wrong": {precision: sum(each) for precision, each in wrong.items()}, "wrong_by_sentence": wrong,
        "wer_difference": {"value": (sum(wrong["bf16"]) - sum(wrong["fp32"])) / sum(counts), "low": low, "high": high},
        "mel_change": change.item(), "long_text": long_text(voice, ear, texts, heard["fp32"], steps),
    }  # fmt: skip


def long_text(voice: Voice, ear, texts: list[str], heard: list[str], steps: int) -> dict:
    """All sentences as one text: its words wrong, and those lost, added or doubled where two chunks meet, beside the
    same sentences said alone."""
    speech = voice.speak(" ".join(texts), steps=steps, progress=False)
    sounds = [speech.audio[int(chunk.start * 24_000) : int(chunk.end * 24_000)] for chunk in speech.chunks]
    pieces = [chunk.text for chunk in speech.chunks]
    borders = list(accumulate(len(comparable(piece).split()) for piece in pieces))[:-1]
    result, heard_at_borders = {"chunks": len(pieces), "borders": len(borders)}, []
    for name, said in (
        ("in one", [(piece, ear.transcribe(sound, 24_000)) for piece, sound in zip(pieces, sounds, strict=True)]),
        ("alone", list(zip(texts, heard, strict=True))),
    ):
        words, right, added = hearing(said)
        result["words"] = len(words)
        heard_at_borders.append([right[place] for i in borders for place in (i - 1, i)])
        result[name] = {
            "words_wrong": right.count(False) + sum(map(len, added)),
            "lost_at_borders": heard_at_borders[-1].count(False),
            "added_at_borders": [added[i] for i in borders if added[i]],
            "doubled_at_borders": sum(word in words[i - 1 : i + 1] for i in borders for word in added[i]),
        }
    in_one, alone = heard_at_borders
    result["lost_only_in_one"] = sum(there and not here for here, there in zip(in_one, alone, strict=True))
    result["lost_only_alone"] = sum(here and not there for here, there in zip(in_one, alone, strict=True))
    return result


def hearing(said: list[tuple[str, str]]) -> tuple[list[str], list[bool], list[list[str]]]:
    """For all words of (text, what was heard) in a row: the words, whether each was heard, and the words that are not
    there and were heard before each of them and behind the last."""
    import jiwer

    words, right, added = [], [], [[]]
    for text, heard in said:
        start, given, got = len(words), comparable(text).split(), comparable(heard).split()
        words += given
        right += [False] * len(given)
        added += [[] for _ in given]
        for part in jiwer.process_words(" ".join(given), " ".join(got)).alignments[0]:
            if part.type == "equal":
                first, end = start + part.ref_start_idx, start + part.ref_end_idx
                right[first:end] = [True] * (end - first)
            elif part.type == "insert":
                added[start + part.ref_start_idx] += got[part.hyp_start_idx : part.hyp_end_idx]
    return words, right, added


def circumstances(device: str) -> dict:
    """What the figures depend on."""

    def git(*given: str) -> str:
        return subprocess.run(["git", *given], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    hardware = f"CPU {names[0] if names else platform.processor()}, {cores} cores, {torch.get_num_threads()} threads"
    if device == "cuda":
        hardware = f"{torch.cuda.get_device_name()}, {hardware}"
    changed = " and uncommitted changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return {
        "command": "python benchmarks/speak.py " + " ".join(sys.argv[1:]), "commit": git("rev-parse", "HEAD") + changed,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "hardware": hardware,
        "versions": {"python": platform.python_version(), "f5kit": f5kit.__version__, "torch": version("torch")},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["F5TTS_v1_Small", "F5TTS_v1_Base"])
    parser.add_argument("--seconds", nargs="+", type=int, default=[5, 30])
    parser.add_argument("--steps", nargs="+", type=int, default=[7, 16, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="v1_Small, 5 s, 7 steps, once")
    parser.add_argument("--words", action="store_true", help="only the embedded voice: its words and its first sound")
    parser.add_argument("--sentences", type=int, default=48)
    given = parser.parse_args()
    if given.quick:
        given.models, given.seconds, given.steps, given.repeats = ["F5TTS_v1_Small"], [5], [7], 1
    warnings.filterwarnings("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    apply_environment(device)
    record = circumstances(device)
    if given.words:
        record |= {"first_sound": first_sound(), "words": words(given.sentences)}
        print(json.dumps({k: record[k] for k in ("first_sound", "words")}))
        write("speak_words.json", record)
        return
    record["versions"]["f5-tts"] = version("f5-tts")
    record["rows"] = []
    for name in given.models:
        for row in compare(name, given.seconds, given.steps, given.repeats, device):
            record["rows"].append(row)
            if not given.quick:
                write("speak.json", record)  # all of it takes an hour: what was measured is there


def write(name: str, record: dict) -> None:
    (ROOT / "benchmarks" / "results" / name).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
