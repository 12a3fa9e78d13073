"""Scores of one sound, alone or beside a recording, and the intervals they are known to within.

Sounds are float32 (nw,) at any rate, mels raw log-mels (n, d). Nothing here listens to words: `asr.py` does.
"""

from __future__ import annotations

import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn

from f5kit.audio import match_loudness, mel_filterbank, read_audio, resample, trim_silence
from f5kit.config import MelConfig
from f5kit.errors import UserError
from f5kit.weights import convert_pickle, read_tensors

RATE = 16_000  # Hz, of every network here
CEPSTRA = 13  # coefficients compared, without that of the level

# ---- Who speaks


class SpeakerEncoder(ABC):
    """A sound as a direction that tells its speaker."""

    name: str
    """As `load_speaker_encoder` knows it."""

    @torch.no_grad()
    def embed(self, audio: Tensor, sample_rate: int) -> Tensor:
        """(nw,) to a vector of length 1. Silence at the ends and the level do not count."""
        audio = trim_silence(resample(audio.detach().cpu().float(), sample_rate, RATE), RATE)
        return nn.functional.normalize(self._embed(match_loudness(audio, -30.0)), dim=0)

    @abstractmethod
    def _embed(self, audio: Tensor) -> Tensor:
        """(nw,) at 16 kHz and -30 dBFS to a vector."""


class Resemblyzer(SpeakerEncoder):
    """The d-vector network of the package Resemblyzer: three LSTM layers trained with the GE2E loss (Wan et al. 2018,
    arXiv 1710.10467) on LibriSpeech and VoxCeleb.

    The weights are read from the package's folder, and the package itself is not imported: it would bring librosa and
    webrtcvad, which has no wheel, for a mel spectrogram and the removal of pauses. The first is made here, to the same
    numbers; the pauses inside a sentence stay, in recordings and in speech alike.
    """

    name = "resemblyzer"
    WINDOW, STEP = 160, 77  # frames of 10 ms: windows of 1.6 s, 1.3 of them a second
    COVERAGE = 0.75  # the share of the last window that must be there

    def __init__(self):
        found = importlib.util.find_spec("resemblyzer")
        weights = Path(found.origin).with_name("pretrained.pt") if found and found.origin else None
        if weights is None or not weights.is_file():
            raise UserError(
                "speaker similarity needs the weights of Resemblyzer: pip install --no-deps resemblyzer "
                "(its own requirements are not needed, and one of them takes a compiler)"
            )
        self.lstm, self.linear = nn.LSTM(40, 256, 3, batch_first=True), nn.Linear(256, 256)
        tensors = read_tensors(convert_pickle(weights))
        for name in ("lstm", "linear"):
            own = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
            getattr(self, name).load_state_dict(own)
        self._bank = mel_filterbank(MelConfig("bigvgan", RATE, 400, 160, 400, 40))  # f d, Slaney's

    def _embed(self, audio: Tensor) -> Tensor:
        starts = range(0, max(1, len(audio) // 160 + 1 - self.WINDOW + self.STEP + 1), self.STEP)
        if len(starts) > 1 and len(audio) - starts[-1] * 160 < self.COVERAGE * self.WINDOW * 160:
            starts = starts[:-1]
        audio = nn.functional.pad(audio, (0, max(0, (starts[-1] + self.WINDOW) * 160 - len(audio))))
        spectrum = torch.stft(audio, 400, 160, 400, torch.hann_window(400), pad_mode="constant", return_complex=True)
        mel = spectrum.abs().square().T @ self._bank  # n d, power, not its logarithm
        _, (hidden, _) = self.lstm(torch.stack([mel[start : start + self.WINDOW] for start in starts]))
        return nn.functional.normalize(self.linear(hidden[-1]).relu(), dim=1).mean(0)


class WavLM(SpeakerEncoder):
    """A WavLM with an x-vector head, such as microsoft/wavlm-base-plus-sv, by transformers.

    Not the network behind published SIM-o figures, which is WavLM-large with ECAPA-TDNN: never compare with those.
    """

    def __init__(self, model: str | Path):
        from f5kit.audio import import_torchaudio

        import_torchaudio()  # transformers imports it where it is installed, and fails where it is broken
        try:
            from transformers import AutoFeatureExtractor, WavLMForXVector
        except ImportError:
            raise UserError('WavLM needs transformers: pip install "f5kit[wavlm]"') from None
        self.name = f"wavlm:{model}"
        try:
            self._features = AutoFeatureExtractor.from_pretrained(str(model))
            self._model = WavLMForXVector.from_pretrained(str(model)).eval()
        except (OSError, ValueError) as error:
            raise UserError(
                f"the speaker encoder {model} can't be had ({str(error).splitlines()[0][:150]}): check the connection, "
                "name a folder that holds one, or choose resemblyzer"
            ) from None

    def _embed(self, audio: Tensor) -> Tensor:
        inputs = self._features(audio.numpy(), sampling_rate=RATE, return_tensors="pt")
        return self._model(**inputs).embeddings[0]


def load_speaker_encoder(name: str = "resemblyzer") -> SpeakerEncoder:
    """"resemblyzer" (offline), or "wavlm:NAME": a repository of the Hub or a folder.

    Raises UserError when it can't be had.
    """
    if name == "resemblyzer":
        return Resemblyzer()
    if name.startswith("wavlm:") and name != "wavlm:":
        return WavLM(name.removeprefix("wavlm:"))
    raise UserError(f"there is no speaker encoder {name!r}: choose 'resemblyzer', or 'wavlm:' and a model's name")


def bundled_speakers() -> dict[str, list[tuple[Tensor, int]]]:
    """{speaker: [(audio, sample rate), ...]} of the clips that come with the kit, to be the other speakers."""
    folder = Path(__file__).parent / "assets" / "other_speakers"
    found: dict[str, list[tuple[Tensor, int]]] = {}
    for path in sorted(folder.glob("*.flac")):
        found.setdefault(path.stem.rsplit("_", 1)[0], []).append((read_audio(path, RATE), RATE))
    return found


class SpeakerScale:
    """Similarity to one speaker on a scale where other speakers are 0 and the speaker's own recordings 1.

    With cos(x) the mean cosine between a sound and the speaker's recordings of OTHER sentences (so that equal words do
    not count), the scaled similarity of some sounds is

        (mean cos(sounds) - mean cos(other speakers)) / (mean cos(recordings) - mean cos(other speakers))

    where other speakers are averaged one by one. It depends on which they are: the more alike they sound, the more it
    asks for. An other speaker who is as near to the recordings as these are to each other (above the lowest tenth of
    them) is taken for the same person and left out; `left_out` names them.
    """

    def __init__(self, encoder: SpeakerEncoder, recordings: Sequence[tuple[Tensor, int]], others: Mapping):
        """`recordings`, two or more, and `others`, {speaker: clips}, are (audio, sample rate)."""
        if len(recordings) < 2:
            raise UserError(f"similarity needs two recordings of the speaker or more, and there are {len(recordings)}")
        self.encoder = encoder
        self._recorded = torch.stack([encoder.embed(*clip) for clip in recordings])  # b k
        cosines = self._recorded @ self._recorded.T
        self.own = ((cosines.sum(1) - 1) / (len(recordings) - 1)).tolist()
        """cos of each recording."""
        near = {name: self._nearness(clips) for name, clips in others.items()}
        lowest = numpy.quantile(self.own, 0.1)
        self.left_out = [name for name, cosine in near.items() if cosine >= lowest]
        kept = [cosine for name, cosine in near.items() if name not in self.left_out]
        if not kept:
            raise UserError("similarity needs clips of another speaker: give some as `others`, {name: [clip, ...]}")
        self.other = sum(kept) / len(kept)
        """Mean cos of the other speakers."""

    def _nearness(self, clips: Sequence[tuple[Tensor, int]]) -> float:
        return float((torch.stack([self.encoder.embed(*clip) for clip in clips]) @ self._recorded.T).mean())

    def cosine(self, audio: Tensor, sample_rate: int, sentence: int) -> float:
        """cos of a sound that says the sentence of that recording."""
        cosines = self._recorded @ self.encoder.embed(audio, sample_rate)
        return float((cosines.sum() - cosines[sentence]) / (len(cosines) - 1))

    def scaled(self, cosines, own=None):
        """Scaled similarity from cos of sounds and of recordings, (..., sentences) to (...)."""
        own = numpy.asarray(self.own) if own is None else own
        return (numpy.mean(cosines, -1) - self.other) / (numpy.mean(own, -1) - self.other)


# ---- Beside a recording


def mel_cepstral_distance(mel: Tensor, recorded: Tensor) -> float:
    """Mel-cepstral distance in dB between two log-mels (n, d) and (m, d), the level left out (Kubichek 1993).

    Cepstra are c_k = 2/d sum_j mel_j cos(pi k (j + 1/2) / d) for k = 1 to 13. Frames are paired by dynamic time
    warping (Sakoe & Chiba 1978, steps of one frame in either or both), and 10 / ln 10 sqrt(2 sum_k (c_k - c'_k)^2) is
    averaged over the pairs. From 100 HTK bins of this kit's mels: not comparable with figures from other front ends.
    """
    a, b = (_cepstra(m.detach().cpu().double()) for m in (mel, recorded))
    distances = 10 / math.log(10) * math.sqrt(2) * torch.cdist(a, b)
    return _aligned_mean(distances.numpy())


def _cepstra(mel: Tensor) -> Tensor:
    """Log-mel (n, d) to cepstra (n, 13)."""
    d = mel.shape[1]
    k = torch.arange(1, CEPSTRA + 1, dtype=mel.dtype)
    return mel @ torch.cos(math.pi * (torch.arange(d, dtype=mel.dtype)[:, None] + 0.5) * k / d) * (2 / d)


def _aligned_mean(cost: numpy.ndarray) -> float:
    """The mean cost (n, m) along the cheapest path from corner to corner, one antidiagonal at a time."""
    n, m = cost.shape
    total = numpy.full((n + 1, m + 1), numpy.inf)
    length = numpy.zeros((n + 1, m + 1))
    total[0, 0] = 0
    for k in range(n + m - 1):
        i = numpy.arange(max(0, k - m + 1), min(n, k + 1))
        j = k - i
        before = numpy.stack([total[i, j], total[i, j + 1], total[i + 1, j]])
        steps = numpy.stack([length[i, j], length[i, j + 1], length[i + 1, j]])
        best, columns = before.argmin(0), numpy.arange(len(i))
        total[i + 1, j + 1] = before[best, columns] + cost[i, j]
        length[i + 1, j + 1] = steps[best, columns] + 1
    return float(total[n, m] / length[n, m])


def speech_seconds(audio: Tensor, sample_rate: int) -> float:
    """How long a sound is without what lies 35 dB below its loudest 20 ms at its ends, where a vocoder may differ."""
    return len(trim_silence(audio, sample_rate, top_db=35.0, keep=0.0)) / sample_rate


# ---- Alone


def dnsmos(audio: Tensor, sample_rate: int) -> float:
    """Overall quality from 1 to 5 as DNSMOS P.835 predicts it (Reddy et al. 2022, arXiv 2110.01763), by speechmos.

    It was trained on noise suppression: noise and clipping count, wrong words do not.
    """
    try:
        from speechmos import dnsmos as model
    except ImportError:
        raise UserError('DNSMOS needs speechmos and librosa: pip install "f5kit[dnsmos]"') from None
    sound = resample(audio.detach().cpu().float(), sample_rate, RATE).clamp(-1, 1).numpy()
    return float(model.run(sound, sr=RATE)["ovrl_mos"])


# ---- How well a figure is known


def interval(
    statistic: Callable[..., numpy.ndarray], *columns: Sequence[float], draws: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """The 95 % bootstrap interval (percentiles) of a statistic over sentences.

    Each column has one value for each sentence; sentences are drawn with replacement, the same ones from all columns,
    so that a ratio or a difference is known as well as the pairs allow. `statistic` takes arrays (..., sentences) and
    reduces the last axis. What is not a number in some draw counts as the largest value. The same seed gives the same
    interval.
    """
    arrays = [numpy.asarray(column, dtype=float) for column in columns]
    picked = numpy.random.default_rng(seed).integers(0, len(arrays[0]), (draws, len(arrays[0])))
    with numpy.errstate(divide="ignore", invalid="ignore"):
        values = numpy.asarray(statistic(*(array[picked] for array in arrays)))
    values = numpy.sort(numpy.where(numpy.isnan(values), numpy.inf, values))
    return float(values[int(0.025 * draws)]), float(values[math.ceil(0.975 * draws) - 1])
