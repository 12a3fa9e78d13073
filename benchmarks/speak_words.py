"""The embedded voice's words: in half precision, in one long text against its sentences alone, and the first sound.

    python benchmarks/speak_words.py        nine minutes on two cores; needs the extra `judge`

A recogniser hears every sound; the figures are counts of words. Numbers are spelled: the voice reads digits so badly
that no words fit. What happens where two chunks meet is asked more sharply than free recognition can tell: of each
piece, whether it fits its words best as they are written, or with the first or last of them lost or doubled. Writes
benchmarks/results/speak_words.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from speak import circumstances, write  # noqa: E402

from f5kit.asr import PocketSphinx, comparable, count_errors, load_recogniser  # noqa: E402
from f5kit.inference import Voice  # noqa: E402
from f5kit.judge import demo_texts  # noqa: E402
from f5kit.numerals import read_numbers  # noqa: E402
from f5kit.scores import interval  # noqa: E402

RATE = 24_000  # Hz
# Seconds cut from a piece's start or end, or said twice there, to see whether the recogniser notices: about a word,
# and last words are longer.
START, END = 0.35, 0.5


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


def words(sentences: int, steps: int) -> dict:
    """Word errors of the embedded voice: fp32 against bf16, and one long text against its sentences alone."""
    voice, ear = Voice.load("starter"), load_recogniser()
    texts = [read_numbers(text, "en") for text in demo_texts()[:sentences]]
    counts = [len(text.split()) for text in texts]
    said, heard, wrong, mels = {}, {}, {}, {}
    for precision in ("fp32", "bf16"):
        voice.precision = precision
        said[precision] = [voice.speak(text, steps=steps, progress=False) for text in texts]
        mels[precision] = torch.cat([speech.mel for speech in said[precision]])
        heard[precision] = [ear.transcribe(speech.audio, RATE) for speech in said[precision]]
        wrong[precision] = [count_errors(*pair).word_errors for pair in zip(texts, heard[precision], strict=True)]
    voice.precision = "fp32"
    change = (mels["bf16"] - mels["fp32"]).square().mean().sqrt() / mels["fp32"].square().mean().sqrt()
    low, high = interval(lambda a, b, n: (b - a).sum(-1) / n.sum(-1), wrong["fp32"], wrong["bf16"], counts)
    whole = voice.speak(" ".join(texts), steps=steps, progress=False)
    in_one = [(chunk.text, whole.audio[int(chunk.start * RATE) : int(chunk.end * RATE)]) for chunk in whole.chunks]
    alone = [(text, speech.audio) for text, speech in zip(texts, said["fp32"], strict=True)]
    return {
        "recogniser": str(ear), "sentences": len(texts), "words": sum(counts),
        "wrong": {precision: sum(each) for precision, each in wrong.items()}, "wrong_by_sentence": wrong,
        "wer_difference": {"value": (sum(wrong["bf16"]) - sum(wrong["fp32"])) / sum(counts), "low": low, "high": high},
        "mel_change": change.item(), "long_text": at_borders(ear, in_one, alone), "ends": ends(in_one, alone),
    }  # fmt: skip


# ---- Where chunks meet. Pieces are (text, sound): the chunks of the long text, or the sentences said alone.


def at_borders(ear, in_one: list[tuple[str, Tensor]], alone: list[tuple[str, Tensor]]) -> dict:
    """Words wrong, and those lost, added or doubled where two chunks meet, as a free recogniser hears them."""
    borders = list(accumulate(len(comparable(text).split()) for text, _ in in_one))[:-1]
    result, heard_there = {"chunks": len(in_one), "borders": len(borders)}, []
    for name, pieces in (("in one", in_one), ("alone", alone)):
        given, right, added = hearing([(text, ear.transcribe(sound, RATE)) for text, sound in pieces])
        result["words"] = len(given)
        heard_there.append([right[place] for i in borders for place in (i - 1, i)])
        result[name] = {
            "words_wrong": right.count(False) + sum(map(len, added)),
            "lost_at_borders": heard_there[-1].count(False),
            "added_at_borders": [added[i] for i in borders if added[i]],
            "doubled_at_borders": sum(word in given[i - 1 : i + 1] for i in borders for word in added[i]),
        }
    result["lost_only_in_one"] = sum(there and not here for here, there in zip(*heard_there, strict=True))
    result["lost_only_alone"] = sum(here and not there for here, there in zip(*heard_there, strict=True))
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


def ends(in_one: list[tuple[str, Tensor]], alone: list[tuple[str, Tensor]]) -> dict:
    """How many pieces fit their words best as they are written, or otherwise (`fitting`); and of the chunks that fit as
    written, how many do so no more once about a word is cut from an end, or said twice there."""
    ear, start, end = PocketSphinx(), int(START * RATE), int(END * RATE)
    spoilt = {
        "first lost": lambda sound: sound[start:], "first twice": lambda sound: torch.cat((sound[:start], sound)),
        "last lost": lambda sound: sound[:-end], "last twice": lambda sound: torch.cat((sound, sound[-end:])),
    }  # fmt: skip
    whole = [piece for piece in in_one if fitting(ear, *piece) == "as written"]
    return {
        "in one": Counter(fitting(ear, *piece) for piece in in_one),
        "alone": Counter(fitting(ear, *piece) for piece in alone),
        "spoilt": {"chunks": len(whole), "seconds": [START, END], "noticed": {
            name: sum(fitting(ear, text, spoil(sound)) != "as written" for text, sound in whole)
            for name, spoil in spoilt.items()
        }},
    }  # fmt: skip


def fitting(ear: PocketSphinx, text: str, sound: Tensor) -> str:
    """Which words fit a sound best: "as written", or the "first" or "last" "lost" or "twice"; "none" where none fit."""
    given = comparable(text).split()
    if not ear.knows(" ".join(given)):
        return "a word not in the dictionary"
    kinds = {
        "first lost": given[1:], "first twice": given[:1] + given, "last lost": given[:-1],
        "last twice": given + given[-1:], "as written": given,
    }  # fmt: skip
    sentences = {" ".join(words): kind for kind, words in kinds.items() if words}
    return sentences.get(ear.choose(sound, RATE, list(sentences)), "none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sentences", type=int, default=48)
    parser.add_argument("--steps", type=int, default=16)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    record = circumstances("cpu") | {"first_sound": first_sound(), "words": words(given.sentences, given.steps)}
    print(json.dumps({k: record[k] for k in ("first_sound", "words")}))
    write("speak_words.json", record)


if __name__ == "__main__":
    main()
