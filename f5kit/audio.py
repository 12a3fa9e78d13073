"""Sound: reading, writing, levelling, and the log-mel spectrogram.

Audio is float32, mono, full scale at 1.0; mels are natural logarithms.
Shapes: b batch, n frames, d mel bins, nw samples of a waveform.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import importlib.machinery
import io
import math
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from f5kit.config import MelConfig
from f5kit.errors import UserError
from f5kit.media import open_sound
from f5kit.provenance import Provenance, tag

_WRITABLE = {".wav": "WAV", ".flac": "FLAC", ".mp3": "MP3", ".ogg": "OGG"}  # WAV and FLAC: 16 bit


def import_torchaudio():
    """The module torchaudio, also where its compiled half cannot load.

    The wheel on the package index is built for CUDA; beside a CPU build of torch its shared library does not
    load and the import fails. f5kit and vocos use the Python half only, so a stand-in for the private module
    that loads the library reports that there is none. It is registered only after the real import has failed.

    Raises UserError where torchaudio is absent or does not import even so.
    """
    try:
        return importlib.import_module("torchaudio")
    except ModuleNotFoundError as error:
        if error.name == "torchaudio":
            raise UserError("torchaudio is not installed; install it with: pip install torchaudio") from None
        reason = error
    except (ImportError, OSError, RuntimeError) as error:  # its library is absent or for another CUDA
        reason = error
    _forget_torchaudio()
    stand_in = _no_compiled_half()
    sys.modules[stand_in.__name__] = stand_in
    try:
        torchaudio = importlib.import_module("torchaudio")
    except (ImportError, OSError, RuntimeError, AttributeError):
        _forget_torchaudio()
        raise UserError(
            f"torchaudio does not import beside torch {torch.__version__} ({reason}); "
            "install the torchaudio that belongs to this torch, see https://pytorch.org/get-started"
        ) from reason
    torchaudio._extension = stand_in
    return torchaudio


def _forget_torchaudio() -> None:
    """Drop what a failed import left behind, so that the next one starts clean."""
    for name in [name for name in sys.modules if name == "torchaudio" or name.startswith("torchaudio.")]:
        del sys.modules[name]


def _no_compiled_half() -> types.ModuleType:
    """A module in the place of torchaudio._extension: nothing is there, every guard refuses when called."""

    def refuse(function):
        def refusing(*args, **kwargs):
            raise RuntimeError(f"torchaudio's {function.__name__} needs its compiled half, which cannot load")

        return refusing

    def answer(name: str):
        if name.startswith("_IS_"):
            return False
        if name.startswith("fail_if_no_"):
            return refuse
        raise AttributeError(name)

    module = types.ModuleType("torchaudio._extension", "f5kit's stand-in for what cannot load.")
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, loader=None)
    module.__getattr__ = answer
    return module


def decode(path: str | Path | bytes, max_seconds: float | None = None, name: str = "it") -> tuple[Tensor, int]:
    """The samples of a file (or of a file's bytes, called `name`) as they are: float32 (channels, nw), and their rate.

    Recordings longer than `max_seconds` are refused before they fill the memory.

    Raises UserError for a file that is missing, unreadable, empty, cut short or not finite.
    """
    name = name if isinstance(path, bytes) else str(path)
    sound = open_sound(path, name)
    limit = math.inf if max_seconds is None else max_seconds * sound.rate
    blocks, count = [], sound.declared
    if count <= limit:
        count = 0
        for block in sound.blocks:
            blocks.append(block)
            count += len(block)
            if count > limit:
                break
    if count > limit:
        raise UserError(f"{name} lasts {count / sound.rate:.2f} s, over {max_seconds:g} s; cut it at pauses")
    return torch.from_numpy(np.concatenate(blocks).T.copy()), sound.rate  # channels nw


def to_mono(audio: Tensor) -> tuple[Tensor, bool]:
    """(channels, nw) to (nw,), and whether the channels cancelled.

    The mean of the channels; where they are in opposite phase it is almost nothing: the left one is taken.
    """
    mono = audio.mean(0)
    cancelled = bool(mono.square().mean() < 0.01 * audio.square().mean())  # 20 dB lost
    return (audio[0].clone(), True) if cancelled else (mono, False)


def resample(audio: Tensor, from_rate: int, to_rate: int) -> Tensor:
    """(nw,) at `from_rate` Hz to (nw * to_rate / from_rate,) at `to_rate` Hz, by soxr's best quality."""
    if from_rate == to_rate:
        return audio
    import soxr

    return torch.from_numpy(soxr.resample(audio.numpy(), from_rate, to_rate, quality="VHQ"))


def read_audio(path: str | Path, sample_rate: int = 24_000) -> Tensor:
    """A recording as float32 (nw,) mono at `sample_rate` Hz. Raises UserError as `decode` does."""
    audio, rate = decode(path)
    return resample(to_mono(audio)[0], rate, sample_rate)


def write_audio(
    path: str | Path, audio: Tensor, sample_rate: int = 24_000, provenance: Provenance | None = None
) -> Path:
    """Write (nw,) float32 as .wav or .flac (16 bit), .mp3 or .ogg. The file appears whole or not at all,
    and its folder with it. It says where it comes from (`f5kit.provenance`); by default, which f5kit wrote it.

    Samples beyond full scale are held at it. Raises UserError for another suffix, ValueError for samples
    that are not finite.
    """
    import soundfile

    path = Path(path)
    if path.suffix.lower() not in _WRITABLE:
        raise UserError(f"{path.name}: f5kit writes {', '.join(_WRITABLE)}; choose one of these suffixes")
    if audio.ndim != 1 or not bool(torch.isfinite(audio).all()):
        raise ValueError(f"audio of shape {tuple(audio.shape)} must be one row of finite samples")
    form = _WRITABLE[path.suffix.lower()]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    samples = audio.detach().cpu().float().clamp(-1, 1).numpy()
    try:
        with soundfile.SoundFile(str(partial), "w", sample_rate, 1, format=form) as file:
            tag(file, provenance)
            for start in range(0, len(samples), 1 << 16):  # its Vorbis encoder fails on minutes at once
                file.write(samples[start : start + (1 << 16)])
        os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
    return path


def player(audio: Tensor, sample_rate: int, form: str = "WAV") -> str:
    """HTML that plays (nw,) samples; they are inside it, as WAV or, in a tenth of the room, as MP3."""
    import soundfile

    memory = io.BytesIO()
    soundfile.write(memory, audio.numpy(), sample_rate, format=form, **({"subtype": "PCM_16"} if form == "WAV" else {}))
    kind = "audio/wav" if form == "WAV" else "audio/mpeg"
    data = base64.b64encode(memory.getvalue()).decode()
    return f'<audio controls src="data:{kind};base64,{data}"></audio>'


@dataclass(frozen=True)
class Levels:
    """How loud a recording is and where its speech lies."""

    peak: float
    """Largest magnitude; 1.0 is full scale."""
    rms_dbfs: float
    """Root mean square in dB below full scale, without DC; -120 for digital silence."""
    clipped: float
    """Share of samples in flat tops: runs of three or more at the very largest magnitude."""
    leading: float
    """Seconds before the speech."""
    trailing: float
    """Seconds after the speech."""


def measure_levels(audio: Tensor, sample_rate: int) -> Levels:
    """Levels of (nw,). A flat top shows only before resampling and levelling, so measure what was decoded.

    Sums are made in fp64: in fp32 their last digit would depend on the number of threads.
    """
    exact = audio.double()
    first, last = _speech_bounds(audio, sample_rate, top_db=45.0)
    return Levels(
        peak=float(audio.abs().max()),
        rms_dbfs=_decibel(float((exact - exact.mean()).square().mean())),
        clipped=float(flat_tops(audio).mean()),
        leading=first / sample_rate,
        trailing=(len(audio) - last) / sample_rate,
    )


def trim_silence(audio: Tensor, sample_rate: int, top_db: float = 45.0, keep: float = 0.05) -> Tensor:
    """(nw,) without the silence before and after the speech, of which `keep` seconds stay.

    Silence is what lies more than `top_db` dB below the loudest 20 ms; a noisy recording is left as it is.
    """
    first, last = _speech_bounds(audio, sample_rate, top_db)
    margin = round(keep * sample_rate)
    return audio[max(0, first - margin) : last + margin]


def match_loudness(audio: Tensor, target_dbfs: float = -23.0, max_peak: float = 0.99) -> Tensor:
    """(nw,) brought to `target_dbfs` (root mean square), or as near as its peak allows; silence stays."""
    peak, power = float(audio.abs().max()), float(audio.square().mean())
    if power == 0:
        return audio
    return audio * min(10 ** (target_dbfs / 20) / power**0.5, max_peak / peak)


def as_stored(audio: Tensor) -> Tensor:
    """(nw,) rounded to 16 bit, as the clips of a dataset are stored.

    A recording of 16 kHz has nothing above 8 kHz. What a model hears there in training is the noise of that rounding, a
    log-mel of -6; a reference brought to 24 kHz and not rounded has -11 there, and is no voice that the model knows.
    """
    return (audio * 32768).round().clamp(-32768, 32767) / 32768


def match_lufs(audio: Tensor, sample_rate: int, target: float = -23.0, max_peak: float = 0.99) -> Tensor:
    """(nw,) brought to `target` LUFS (ITU-R BS.1770, by pyloudnorm), or as near as its peak allows.

    What is shorter than the standard's 0.4 s is measured as if it were repeated. Silence stays.
    """
    import pyloudnorm

    heard = audio.double().numpy()
    block = round(0.4 * sample_rate) + 1
    if len(heard) < block:
        heard = np.tile(heard, -(-block // len(heard)))
    with np.errstate(divide="ignore"):
        loudness = pyloudnorm.Meter(sample_rate).integrated_loudness(heard)
    if not math.isfinite(loudness):  # all of it below the gate of -70
        return audio
    return audio * min(10 ** ((target - loudness) / 20), max_peak / float(audio.abs().max()))


def _decibel(power: float) -> float:
    return 10 * math.log10(max(power, 1e-12))


def flat_tops(audio: Tensor) -> Tensor:
    """Which samples of (nw,) lie in flat tops, runs of three or more at the very largest magnitude: 1.0 or 0.0."""
    limit = audio.abs().max()
    if len(audio) < 3 or limit < 0.05:  # a few quantisation steps repeat by nature
        return torch.zeros_like(audio)
    top = audio.abs() >= limit
    runs = top[:-2] & top[1:-1] & top[2:]  # three tops follow each other
    flat = torch.zeros_like(top)
    for shift in range(3):
        flat[shift : shift + len(runs)] |= runs
    return flat.float()


def _speech_bounds(audio: Tensor, sample_rate: int, top_db: float) -> tuple[int, int]:
    """First sample and one past the last sample of the frames within `top_db` of the loudest."""
    frame = max(1, sample_rate // 50)  # 20 ms
    if len(audio) < 2 * frame:
        return 0, len(audio)
    hop = max(1, frame // 2)
    power = (audio - float(audio.double().mean())).square().unfold(0, frame, hop).mean(-1)
    loud = (power > power.max() * 10 ** (-top_db / 10)).nonzero().flatten()
    if len(loud) == 0:
        return 0, len(audio)
    end = len(audio) if int(loud[-1]) == len(power) - 1 else int(loud[-1]) * hop + frame
    return int(loud[0]) * hop, end


def mel_filterbank(mel: MelConfig = MelConfig()) -> Tensor:  # noqa: B008  (frozen)
    """Triangular filters from 0 Hz to half the rate, float32: (n_fft // 2 + 1, n_mels).

    "vocos": HTK mel scale, all of height 1. "bigvgan": Slaney's mel scale, all of one area, as librosa makes them.
    """
    if mel.kind == "bigvgan":
        return _slaney_filterbank(mel)
    functional = import_torchaudio().functional
    return functional.melscale_fbanks(
        mel.n_fft // 2 + 1, 0.0, mel.sample_rate / 2, mel.n_mels, mel.sample_rate, norm=None, mel_scale="htk"
    )


def _slaney_filterbank(mel: MelConfig) -> Tensor:
    """Worked out in fp64, as librosa does: torchaudio's fp32 is off by 4e-6 of the largest value.

    The scale is linear below 1 kHz (3 mels for 200 Hz) and logarithmic above, 27 mels for a factor of 6.4
    (Slaney, Auditory Toolbox, 1998).
    """
    step = math.log(6.4) / 27
    highest = 15 + math.log(mel.sample_rate / 2000) / step
    mels = torch.linspace(0, highest, mel.n_mels + 2, dtype=torch.float64)
    corners = torch.where(mels < 15, mels * (200 / 3), 1000 * torch.exp((mels - 15) * step))  # n_mels + 2, Hz
    bins = torch.arange(mel.n_fft // 2 + 1, dtype=torch.float64)[:, None] * (mel.sample_rate / mel.n_fft)
    low, peak, high = corners[:-2], corners[1:-1], corners[2:]
    triangles = torch.minimum((bins - low) / (peak - low), (high - bins) / (high - peak)).clamp(min=0)
    return (triangles.float() * (2 / (high - low))).float()


def frame_count(samples: int, mel: MelConfig = MelConfig()) -> int:  # noqa: B008  (frozen)
    """How many mel frames `log_mel` makes of so many samples: "vocos" has one more than whole hops."""
    return samples // mel.hop_length + (mel.kind == "vocos")


def log_mel(audio: Tensor, mel: MelConfig = MelConfig()) -> Tensor:  # noqa: B008  (frozen)
    """Log-mel spectrogram that a model and its vocoder agree on; `mel.kind` says which.

    "vocos" is that of Vocos and most of F5-TTS (vocos/feature_extractors.py), equal to the bit to torchaudio's
    MelSpectrogram; "bigvgan" that of BigVGAN (F5-TTS, model/modules.py, get_bigvgan_mel_spectrogram).
    audio: (nw,) or (b, nw) float32 at mel.sample_rate, nw > n_fft // 2. Returns (n, d) or (b, n, d) float32:
    the natural logarithm of magnitudes held at 1e-5, n = frame_count(nw, mel). Raises UserError for audio that is
    too short to be reflected at its ends.
    """
    if audio.shape[-1] <= mel.n_fft // 2:
        raise UserError(f"{audio.shape[-1]} samples make no spectrogram; it takes more than {mel.n_fft // 2}")
    window = torch.hann_window(mel.win_length, device=audio.device)
    sizes = mel.n_fft, mel.hop_length, mel.win_length
    if mel.kind == "vocos":
        spectrum = torch.stft(audio, *sizes, window, pad_mode="reflect", return_complex=True)  # b n_freqs n
        magnitude = spectrum.abs()
    else:
        edge = (mel.n_fft - mel.hop_length) // 2
        audio = torch.nn.functional.pad(audio[None], (edge, edge), mode="reflect")[0]
        spectrum = torch.view_as_real(torch.stft(audio, *sizes, window, center=False, return_complex=True))
        magnitude = torch.sqrt(spectrum.pow(2).sum(-1) + 1e-9)
    mels = torch.matmul(magnitude.transpose(-1, -2), mel_filterbank(mel).to(audio.device))  # b n d
    return mels.clamp(min=1e-5).log()
