"""Speech recognition: what was understood of a sound, and how far that is from what should have been said.

Audio is float32 (nw,), full scale at 1.0, at any rate. Two recognisers stand behind one method: faster-whisper, whose
weights come from a folder or the Hub, and pocketsphinx, whose English model is in its package and needs no network.
Neither is an absolute measure: read a figure beside that of the same recogniser on real recordings of the same texts.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from f5kit.audio import resample
from f5kit.errors import UserError
from f5kit.numerals import LANGUAGES, read_numbers
from f5kit.text import normalise

RATE = 16_000  # Hz, what both recognisers were trained on
WHISPER_ON_GPU, WHISPER_ON_CPU = "large-v3-turbo", "base.en"  # what "auto" asks the Hub for
EXTRA = 'pip install "f5kit[judge]"'


class Recogniser(ABC):
    """Something that writes down what it hears. The same sound always gives the same words."""

    name: str
    """As `load_recogniser` knows it."""
    why: str = "asked for"
    """Why this one was chosen."""

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"

    @abstractmethod
    def transcribe(self, audio: Tensor, sample_rate: int) -> str:
        """What is said in (nw,), as the recogniser writes it; "" where it hears no words."""


class PocketSphinx(Recogniser):
    """pocketsphinx with the US English model of its package: offline, quick, and much weaker than Whisper.

    Sounds are brought to a peak of 0.3, between half a second of silence, under white noise of 1e-3: of the settings
    that were tried on synthetic speech these were understood best. The noise is the same for every sound.
    """

    name = "pocketsphinx"
    PEAK, SILENCE, NOISE = 0.3, 0.5, 1e-3  # full scale, seconds, full scale

    def __init__(self):
        try:
            from pocketsphinx import Decoder
        except ImportError:
            raise UserError(f"recognition without a network needs pocketsphinx: {EXTRA}") from None
        # "batch": the cepstral mean is that of the sound itself; no sound may depend on the one before it
        self._decoder = Decoder(loglevel="FATAL", cmn="batch")
        self._language_model = self._decoder.current_search()

    def transcribe(self, audio: Tensor, sample_rate: int) -> str:
        self._decoder.activate_search(self._language_model)
        return self._hear(audio, sample_rate)

    def knows(self, words: str) -> bool:
        """Whether all of these words, separated by spaces, are in its dictionary of 134,000."""
        return all(self._decoder.lookup_word(word) for word in words.split())

    def choose(self, audio: Tensor, sample_rate: int, sentences: Sequence[str]) -> str:
        """The one of these sentences that fits the sound best, or "" when none does.

        The sentences are the alternatives of a grammar (JSGF); they hold words that the recogniser knows, as
        `comparable` writes them.
        """
        rules = " | ".join(sentences)
        self._decoder.add_jsgf_string("sentences", f"#JSGF V1.0;\ngrammar g;\npublic <sentence> = {rules};\n")
        self._decoder.activate_search("sentences")
        try:
            return self._hear(audio, sample_rate)
        finally:
            self._decoder.activate_search(self._language_model)
            self._decoder.remove_search("sentences")

    def _hear(self, audio: Tensor, sample_rate: int) -> str:
        self._decoder.reinit_feat()  # forgets the noise that it tracked in the sound before
        self._decoder.start_utt()
        self._decoder.process_raw(self._samples(audio, sample_rate), full_utt=True)
        self._decoder.end_utt()
        best = self._decoder.hyp()
        return best.hypstr if best else ""

    def _samples(self, audio: Tensor, sample_rate: int) -> bytes:
        """16-bit samples at 16 kHz, levelled, padded and under noise."""
        audio = torch.from_numpy(_heard(audio, sample_rate))
        audio = audio * (self.PEAK / audio.abs().max().clamp(min=1e-6))
        audio = torch.nn.functional.pad(audio, [int(self.SILENCE * RATE)] * 2)
        audio = audio + self.NOISE * torch.randn(len(audio), generator=torch.Generator().manual_seed(0))
        return (audio * 32767).round().clamp(-32768, 32767).to(torch.int16).numpy().tobytes()


class Whisper(Recogniser):
    """faster-whisper (CTranslate2) with weights from a folder or the Hub; fp16 on a GPU, int8 on a CPU.

    It can be the `transcriber` of `prepare_dataset`.
    """

    def __init__(
        self, model: str | Path, language: str | None = "en", device: str = "cpu", compute: str | None = None
    ):  # fmt: skip
        """`model`: a folder in CTranslate2's layout, or a name such as "large-v3"; `language` None detects it.

        Raises UserError when the package or the weights can't be had.
        """
        try:
            from faster_whisper import WhisperModel
        except ImportError:
            raise UserError(f"recognition by Whisper needs faster-whisper: {EXTRA}") from None
        self.name, self.language = f"whisper:{model}", language
        kind = torch.device(device).type
        try:
            self._model = WhisperModel(
                str(model), device=kind, device_index=torch.device(device).index or 0,
                compute_type=compute or ("float16" if kind == "cuda" else "int8"),
            )  # fmt: skip
        except Exception as error:  # the Hub's errors, the HTTP client's, and CTranslate2's RuntimeError
            raise UserError(
                f"the Whisper model {model} can't be had ({type(error).__name__}: {str(error).splitlines()[0][:150]}): "
                "check the connection, name a folder that holds one, or choose pocketsphinx"
            ) from None

    def __call__(self, audio: Tensor, sample_rate: int, language: str | None = None) -> tuple[str, str]:
        """What is said in (nw,), and its language: the one given, else the recogniser's, else the one that is heard."""
        # one temperature, and nothing of an earlier sound: the words depend on the sound alone
        segments, info = self._model.transcribe(
            _heard(audio, sample_rate), language=language or self.language, beam_size=5, temperature=0.0,
            condition_on_previous_text=False,
        )  # fmt: skip
        return " ".join(segment.text.strip() for segment in segments).strip(), info.language

    def transcribe(self, audio: Tensor, sample_rate: int) -> str:
        return self(audio, sample_rate)[0]

    def detect_language(self, clips: Sequence[Tensor], sample_rate: int) -> str:
        """The language that most of some clips (nw,) seem to be in, each weighted by how sure the model is."""
        votes: Counter = Counter()
        for audio in clips:
            name, probability, _ = self._model.detect_language(_heard(audio, sample_rate))
            votes[name] += probability
        return max(votes, key=votes.get)


def _heard(audio: Tensor, sample_rate: int):
    """(nw,) as an array at 16 kHz."""
    return resample(audio.detach().cpu().float(), sample_rate, RATE).numpy()


def load_recogniser(name: str = "auto", *, language: str = "en", device: str = "cpu") -> Recogniser:
    """A recogniser; its `.why` says in a sentence why it is this one.

    name: "pocketsphinx", "whisper:NAME" (a name on the Hub such as large-v3, or a folder), or "auto": Whisper where
    its weights are in the local cache or the Hub answers (large-v3-turbo on a GPU, base.en or base on a CPU), else
    pocketsphinx. Raises UserError when it can't be had, and for pocketsphinx in another language than English.
    """
    if name == "auto":
        return _best(language, device)
    if name == "pocketsphinx":
        if language != "en":
            raise UserError(f"pocketsphinx knows English alone, and the language is {language!r}: choose whisper:base")
        return PocketSphinx()
    if name.startswith("whisper:") and name != "whisper:":
        return Whisper(name.removeprefix("whisper:"), language, device)
    raise UserError(f"there is no recogniser {name!r}: choose 'auto', 'pocketsphinx' or 'whisper:' and a model's name")


def _best(language: str, device: str) -> Recogniser:
    small = WHISPER_ON_CPU if language == "en" else WHISPER_ON_CPU.removesuffix(".en")
    model = WHISPER_ON_GPU if torch.device(device).type == "cuda" else small
    try:
        look_for(model)
        recogniser = Whisper(model, language, device)
        recogniser.why = f"the best that suits {'a GPU' if model == WHISPER_ON_GPU else 'a CPU'}"
    except UserError as error:
        if language != "en":
            raise
        recogniser = PocketSphinx()
        recogniser.why = f"weaker than Whisper, which is not at hand: {error}"
    return recogniser


def look_for(model: str) -> None:
    """Raise UserError at once where a Whisper is neither a folder nor in the cache, and the Hub does not answer: a
    download alone retries for long."""
    try:
        from faster_whisper.utils import download_model
        from huggingface_hub import constants, get_session
    except ImportError:
        raise UserError(f"recognition by Whisper needs faster-whisper: {EXTRA}") from None
    try:
        Path(model).is_dir() or download_model(model, local_files_only=True)
    except Exception:  # not in the cache, said in the library's own ways
        try:
            get_session().head(constants.ENDPOINT, timeout=3.0)
        except Exception as error:  # offline mode, and whatever the HTTP client raises
            raise UserError(
                f"Whisper's {model} is not in the cache and the Hub did not answer ({type(error).__name__})"
            ) from None


# Errors


def comparable(text: str, language: str = "en") -> str:
    """Text as it is compared: lower case, numbers as words, no punctuation, hyphens as spaces, one space between words.

    Apostrophes inside a word stay ("don't").
    """
    text = normalise(text)
    if any(c.isdigit() for c in text) and language in LANGUAGES:
        text = read_numbers(text, language)
    text = re.sub(r"(?<=\w)'(?=\w)", "\x00", text.lower())
    return " ".join(re.sub(r"[^\w\x00]|_", " ", text).split()).replace("\x00", "'")


@dataclass(frozen=True)
class Errors:
    """How one transcript differs from the text: counts, so that they can be summed over sentences."""

    word_errors: int
    """Words substituted, left out and put in (Levenshtein)."""
    words: int
    """Words of the text."""
    character_errors: int
    characters: int
    """Characters of the text, spaces included."""


def count_errors(text: str, heard: str, language: str = "en") -> Errors:
    """Word and character errors of what was heard against the text, both as `comparable` writes them; by jiwer.

    Raises UserError for a text without words.
    """
    try:
        import jiwer
    except ImportError:
        raise UserError(f"counting errors needs jiwer: {EXTRA}") from None
    wanted, found = comparable(text, language), comparable(heard, language)
    if not wanted:
        raise UserError(f"the text {text[:40]!r} has no words to be understood: leave it out")
    words, characters = jiwer.process_words(wanted, found), jiwer.process_characters(wanted, found)
    return Errors(
        words.substitutions + words.deletions + words.insertions, len(wanted.split()),
        characters.substitutions + characters.deletions + characters.insertions, len(wanted),
    )  # fmt: skip


# The decoy test


def make_decoys(sentence: str, pool: Sequence[str], count: int = 20, seed: int = 0, knows=None) -> list[str]:
    """`count` wrong sentences of as many words as `sentence`, in `comparable` form, from the texts of a pool.

    Whole sentences of that length come first, then pieces of longer ones; which, depends on the seed and the sentence.
    Decoys differ from the sentence and from each other in at least half of their words, place by place. `knows` says
    of a decoy whether its words are in the dictionary. Raises UserError when the pool does not yield enough.
    """
    sentence = comparable(sentence)
    length = len(sentence.split())
    rng = random.Random(f"{seed}/{sentence}")
    texts = [words for text in dict.fromkeys(map(comparable, pool)) if len(words := text.split()) >= length]
    whole = [text for text in texts if len(text) == length]
    pieces = [text[i : i + length] for text in texts if len(text) > length for i in range(len(text) - length + 1)]
    rng.shuffle(whole)
    rng.shuffle(pieces)
    taken = [sentence.split()]
    for words in whole + pieces:
        if len(taken) > count:
            break
        if all(2 * sum(map(str.__eq__, words, other)) <= length for other in taken):
            if knows is None or knows(" ".join(words)):
                taken.append(words)
    if len(taken) <= count:
        raise UserError(f"the pool of {len(pool)} texts gives {len(taken) - 1} decoys of {length} words: give more")
    return [" ".join(words) for words in taken[1:]]


def wins_among_decoys(
    recogniser: PocketSphinx, audio: Tensor, sample_rate: int, sentence: str, pool: Sequence[str], count: int = 20,
    seed: int = 0,
) -> bool | None:  # fmt: skip
    """Whether the true sentence fits the sound better than `count` decoys of as many words.

    Chance is 1 in `count` + 1 at most, for the recogniser may also find that nothing fits. None where the sentence has
    a word that the recogniser's dictionary lacks, or the pool has too few decoys for it.
    """
    true = comparable(sentence)
    if not recogniser.knows(true):
        return None
    try:
        decoys = make_decoys(sentence, pool, count, seed, recogniser.knows)
    except UserError:
        return None
    alternatives = sorted([true, *decoys])  # by the alphabet: the true one has no place of its own
    return recogniser.choose(audio, sample_rate, alternatives) == true
