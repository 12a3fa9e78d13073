"""The judge: how well systems that say the same sentences are understood, and how much they sound like the speaker.

Every figure stands beside that of the real recordings, taken the same way, and of controls that should do badly: a
recogniser that hears words in anything, or a similarity that finds everybody alike, shows there.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy
from torch import Tensor

from f5kit.asr import PocketSphinx, count_errors, load_recogniser, wins_among_decoys
from f5kit.audio import log_mel, read_audio, resample, trim_silence
from f5kit.data import Dataset
from f5kit.errors import UserError
from f5kit.inference import Speech, Voice, read_reference
from f5kit.report import RATE, RECORDINGS, Report
from f5kit.scores import (
    SpeakerScale,
    bundled_speakers,
    dnsmos,
    load_speaker_encoder,
    mel_cepstral_distance,
    speech_seconds,
)

COPY, SHUFFLED = "copy synthesis", "shuffled texts"
OTHER_REFERENCE = "another speaker's reference"

Sound = Speech | tuple[Tensor, int] | str | Path
"""Speech, an (audio, sample rate) pair, or a file."""


def judge(
    systems: Mapping[str, Sequence[Sound]],
    sentences: Sequence[str],
    *,
    recogniser: str = "auto",
    encoder: str | None = "resemblyzer",
    others: Mapping[str, Sequence[Sound]] | None = None,
    decoys: int = 20,
    pool: Sequence[str] = (),
    with_dnsmos: bool = False,
    language: str = "en",
    device: str = "cpu",
    processes: int = 1,
    seed: int = 0,
    progress: bool = True,
) -> Report:
    """Judge systems that say the same sentences, one sound each.

    systems: {name: sounds in the order of the sentences}. The name "recordings" is the yardstick: without it there are
    errors and decoys alone. recogniser and encoder: as `load_recogniser` and `load_speaker_encoder` know them; an
    encoder of None measures no similarity. others: clips of other speakers, {speaker: [sound, ...]}, by default those
    of the kit. decoys: how many the true text stands among; they come from `pool`, the other sentences and the kit's
    demo texts. processes: how many listen at a time. The same sounds and seed give the same report.

    What can't be measured here, for want of a package or of recordings, is left out and noted in `about["notes"]`.
    Raises UserError for a recogniser that can't be had, and where sounds and sentences do not match in number.
    """
    sentences = list(sentences)
    for name, sounds in systems.items():
        if len(sounds) != len(sentences) or not sentences:
            raise UserError(f"{name!r} has {len(sounds)} sounds for {len(sentences)} sentences: give one for each")
    sounds = {name: [_samples(sound) for sound in given] for name, given in systems.items()}
    if processes == 1 or recogniser == "auto":  # asked once whether Whisper can be had, not by every process
        known = load_recogniser(recogniser, language=language, device=device)
        name, notes, why = known.name, [], str(known)
    else:
        name, notes, why = recogniser, [], recogniser
    pool = [*sentences, *pool, *(demo_texts() if language == "en" else ())]
    ears = name, language, device, pool, decoys, seed
    tasks: dict[bytes, tuple[Tensor, list[str]]] = {}  # a sound that is scored against two texts is heard once
    for given in sounds.values():
        for audio, sentence in zip(given, sentences, strict=True):
            tasks.setdefault(audio.numpy().tobytes(), (audio, []))[1].append(sentence)
    heard = _with_bar(_listen_all(list(tasks.values()), ears, processes), len(tasks), "listening", progress)
    listened = dict(zip(tasks, heard, strict=True))
    scale = _speaker_scale(sounds.get(RECORDINGS), encoder, others, notes)
    numbered = [(system, i) for system in sounds for i in range(len(sentences))]
    rows = []
    for system, i in _with_bar(numbered, len(numbered), "comparing", progress):
        ear = listened[sounds[system][i].numpy().tobytes()][sentences[i]]
        row = {"system": system, "number": i + 1, "text": sentences[i], **ear}
        rows.append(row | _compare(sounds, system, i, scale) | {"dnsmos": None})
        if with_dnsmos:
            rows[-1]["dnsmos"] = round(dnsmos(sounds[system][i], RATE), 3)
    if all(row["decoy_won"] is None for row in rows):
        notes.append("The decoy test needs pocketsphinx, English and enough texts to take decoys from.")
    about = {"recogniser": why, "encoder": scale.encoder.name if scale else None, "decoys": decoys, "seed": seed}
    if scale:
        about["cosines"] = {"others": round(scale.other, 4), "recordings": round(float(numpy.mean(scale.own)), 4)}
    return Report(sentences, sounds, rows, about | {"language": language, "notes": notes}, scale)


def judge_voice(
    voices: Voice | Mapping[str, Voice],
    clips: Dataset | Sequence[tuple[str | Path, str]],
    *,
    sentences: int | None = None,
    other_reference: tuple[str | Path, str] | None = None,
    steps: int = 32,
    cfg_strength: float = 2.0,
    seed: int = 0,
    progress: bool = True,
    **how,
) -> Report:
    """Let voices say what was recorded, and judge them beside the recordings and the controls.

    voices: one, or {name: voice}, such as {"before": ..., "after": ...}; the controls are made with the last one.
    clips: a dataset, whose held-out clips are taken, or (recording, text) pairs; the first `sentences` of them.
    other_reference: (recording, text) of another speaker, for the control of that name. `how` goes to `judge`.

    The systems: the recordings; copy synthesis, their mels through the vocoder; each voice; "shuffled texts", which is
    the last voice's speech scored against the sentence after the one it says; "another speaker's reference", the last
    voice speaking from that.
    """
    voices = {"voice": voices} if isinstance(voices, Voice) else dict(voices)
    if isinstance(clips, Dataset):
        how.setdefault("pool", [clip.text for clip in clips.clips])
        clips = [(clips.path(clip), clip.text) for clip in clips.heldout]
    clips = list(clips)[:sentences]
    if len(clips) < 2:
        raise UserError(f"the judge needs two recorded sentences or more, and there are {len(clips)}: hold more out")
    texts, last = [text for _, text in clips], list(voices.values())[-1]
    mel = last.model.config.mel
    recorded = [read_audio(path, mel.sample_rate) for path, _ in clips]
    device = last.model.device
    systems: dict[str, list[Sound]] = {RECORDINGS: [(audio, mel.sample_rate) for audio in recorded]}
    systems[COPY] = [(last.vocoder.decode(log_mel(a, mel).to(device)).cpu(), mel.sample_rate) for a in recorded]
    speaking = dict(voices)
    if other_reference:
        other = read_reference(*other_reference, last.model)
        speaking[OTHER_REFERENCE] = last.with_reference(other)
    settings = {"steps": steps, "cfg_strength": cfg_strength, "seed": seed, "progress": False}
    for name, voice in speaking.items():
        speech = (voice.speak(text, **settings) for text in texts)
        systems[name] = list(_with_bar(speech, len(texts), f"speaking, {name}", progress))
    spoken = systems[list(voices)[-1]]
    systems[SHUFFLED] = [*spoken[1:], spoken[0]]
    report = judge(systems, texts, seed=seed, progress=progress, **how)
    report.about |= {"steps": steps, "cfg_strength": cfg_strength, "vocoder": last.vocoder.name}
    report.about["voices"] = {name: repr(voice) for name, voice in speaking.items()}
    return report


# ---- Listening, in this process or in several


def _listen_all(tasks: list[tuple[Tensor, list[str]]], ears: tuple, processes: int) -> Iterator[dict[str, dict]]:
    """For each (sound, sentences): {sentence: what was heard and counted}."""
    if processes == 1:
        listen = _Ears(*ears)
        yield from (listen(*task) for task in tasks)
        return
    # spawned, not forked: torch and recognisers hold threads that do not live through a fork
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _open_ears, ears) as workers:
        yield from workers.map(_listen, [(audio.numpy(), sentences) for audio, sentences in tasks], chunksize=4)


_ears: list = []  # of a worker process, which has no other way to keep them


def _open_ears(*ears) -> None:
    _ears.append(_Ears(*ears))


def _listen(task: tuple) -> dict[str, dict]:
    from torch import from_numpy

    return _ears[0](from_numpy(task[0]), task[1])


class _Ears:
    """A recogniser, and pocketsphinx for the decoy test."""

    def __init__(self, name: str, language: str, device: str, pool: list[str], decoys: int, seed: int):
        self.recogniser = load_recogniser(name, language=language, device=device)
        self.language, self.pool, self.decoys, self.seed = language, pool, decoys, seed
        self.chooser = self.recogniser if isinstance(self.recogniser, PocketSphinx) else None
        if self.chooser is None and language == "en":
            try:
                self.chooser = PocketSphinx()
            except UserError:
                pass  # the report says that there was no decoy test

    def __call__(self, audio: Tensor, sentences: list[str]) -> dict[str, dict]:
        heard = self.recogniser.transcribe(audio, RATE)
        return {sentence: self._score(audio, sentence, heard) for sentence in sentences}

    def _score(self, audio: Tensor, sentence: str, heard: str) -> dict:
        won = None
        if self.chooser and self.decoys:
            won = wins_among_decoys(self.chooser, audio, RATE, sentence, self.pool, self.decoys, self.seed)
        return {"heard": heard, **asdict(count_errors(sentence, heard, self.language)), "decoy_won": won}


# ---- Comparing


def _samples(sound: Sound) -> Tensor:
    """A sound at 24 kHz, (nw,), without the silence at its ends."""
    if isinstance(sound, str | Path):
        audio = read_audio(sound, RATE)
    else:
        audio, rate = sound if isinstance(sound, tuple) else (sound.audio, sound.sample_rate)
        audio = resample(audio.detach().cpu().float(), rate, RATE)
    return trim_silence(audio, RATE)


def _speaker_scale(recorded, encoder: str | None, others, notes: list[str]) -> SpeakerScale | None:
    if encoder is None or not recorded:
        return None
    try:
        clips = bundled_speakers()
        if others is not None:
            clips = {name: [(_samples(sound), RATE) for sound in sounds] for name, sounds in others.items()}
        scale = SpeakerScale(load_speaker_encoder(encoder), [(audio, RATE) for audio in recorded], clips)
    except UserError as error:
        notes.append(f"No similarity: {error}.")
        return None
    if scale.left_out:
        notes.append(f"Taken for the same speaker, and so not among the others: {', '.join(scale.left_out)}.")
    return scale


def _compare(sounds: dict[str, list[Tensor]], system: str, i: int, scale: SpeakerScale | None) -> dict:
    """The scores of one sound that need no recogniser."""
    audio = sounds[system][i]
    seconds = speech_seconds(audio, RATE)
    row = {"seconds": round(seconds, 3), "cosine": None, "mcd": None, "duration_error": None}
    if RECORDINGS not in sounds:
        return row
    if scale:
        row["cosine"] = scale.own[i] if system == RECORDINGS else scale.cosine(audio, RATE, i)
    if system != RECORDINGS:
        recorded = sounds[RECORDINGS][i]
        row["mcd"] = round(mel_cepstral_distance(log_mel(audio), log_mel(recorded)), 3)
        row["duration_error"] = round(seconds / speech_seconds(recorded, RATE) - 1, 4)
    return row


# ---- Small things


def demo_texts() -> list[str]:
    """The sentences of the bundled demo voice, in English."""
    return list(_metadata(Path(__file__).parent / "demo_voice").values())


def stranger(name: str = "slt_1") -> tuple[Path, str]:
    """(recording, text) of a bundled clip of another speaker, for the control "another speaker's reference"."""
    folder = Path(__file__).parent / "assets" / "other_speakers"
    texts = _metadata(folder)
    if name not in texts:
        raise UserError(f"there is no bundled clip {name!r}: choose one of {', '.join(texts)}")
    return folder / f"{name}.flac", texts[name]


def _metadata(folder: Path) -> dict[str, str]:
    lines = (folder / "metadata.csv").read_text(encoding="utf-8").splitlines()
    return dict(line.split("|", 1) for line in lines)


def _with_bar(items, total: int, what: str, progress: bool):
    from tqdm.auto import tqdm

    return tqdm(items, total=total, desc=what, unit="sound", disable=not progress, leave=False)
