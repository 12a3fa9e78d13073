"""Trains the starter vocoder: Vocos (Siuzdak 2023, arXiv 2306.00814) scaled down, on the starter corpus.

    python benchmarks/starter/train_vocoder.py build/vocoder --corpus build/corpus

Writes below the folder:

    settings.json             what it was started with; a start with others is refused
    audio.f32, audio.json     the corpus as one row of samples at 24 kHz, levelled as `prepare_dataset` does
    log.jsonl                 losses, and distances on held-out clips, every so many updates
    state.pt                  everything to go on from: start again and it resumes, with the same result
    vocoder/                  config.yaml and model.safetensors of the averaged weights: load_vocoder(".../vocoder")

Generator and discriminators are the vocos package's own classes. At first the sound is only brought near the recording
(mel, magnitudes, phase steps), then an adversary joins. Audio is drawn by (seed, update), so that no generator's state
is kept. Half of the clips are played faster or slower, pitch and all, for the corpus has few speakers; half of the
segments are rounded to 16 bits, as in a dataset, whose noise stands 40 dB above the mel's floor.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import Tensor, nn
from vocoder_losses import Adversary, SpectralDistance

from f5kit.audio import decode, import_torchaudio, log_mel, match_loudness, resample, to_mono
from f5kit.config import MelConfig
from f5kit.weights import write_json, write_tensors

MEL = MelConfig()


@dataclass(frozen=True)
class Settings:
    """Everything that the result depends on, beside the corpus."""

    dim: int = 256
    intermediate_dim: int = 768
    num_layers: int = 6
    updates: int = 4500
    batch: int = 8
    frames: int = 64
    """Mel frames of a segment: the sound has one hop less."""
    learning_rate: float = 3e-4
    """Of AdamW, which trains everything but the backbone's products."""
    product_rate: float = 1e-3
    """Of Muon (Jordan et al. 2024), which trains those."""
    warmup: int = 100
    adversary_from: float = 0.4
    """Share of the updates after which the adversary joins; 1 never."""
    adversary_channels: int = 16
    mel_weight: float = 15.0
    log_weight: float = 3.0
    convergence_weight: float = 1.0
    phase_weight: float = 1.0
    hinge_weight: float = 1.0
    feature_weight: float = 2.0
    ema: float = 0.999
    gain_db: float = 3.0
    """Segments are made louder or softer by up to this."""
    speeds: float = 1.25
    """Half of the clips are played at 1/speeds to speeds times their speed."""
    hours: float = 9.0
    """Of the corpus, at most."""
    precision: str = "bf16"
    """Of the backbone's and the discriminators' products while training; "fp32" needs no such hardware."""
    seed: int = 0


# Audio


def prepare(out: Path, corpus: Path, settings: Settings) -> np.ndarray:
    """All training clips as one row of samples, made once. It lies in the memory only where it is read."""
    names = sorted(path.name for path in (corpus / "train" / "wavs").glob("*.wav"))
    wanted = {"clips": len(names), "hours": settings.hours, "speeds": settings.speeds, "seed": settings.seed}
    audio, note = out / "audio.f32", out / "audio.json"
    if not note.is_file() or json.loads(note.read_text()) != wanted:
        random.Random(settings.seed).shuffle(names)
        left = round(settings.hours * 3600 * MEL.sample_rate)
        with open(audio, "wb") as file:
            for name in names:
                if left <= 0:
                    break
                clip = read_clip(corpus / "train" / "wavs" / name, _speed(name, settings))[:left]
                file.write(clip.numpy().astype("<f4").tobytes())
                left -= len(clip)
        write_json(note, wanted)
    return np.memmap(audio, "<f4", "r")


def _speed(name: str, settings: Settings) -> float:
    rng = random.Random(f"{settings.seed} {name}")
    return 1.0 if rng.random() < 0.5 else settings.speeds ** rng.uniform(-1, 1)


def read_clip(path: Path, speed: float = 1.0) -> Tensor:
    """(nw,) at 24 kHz, levelled as `prepare_dataset` does."""
    audio, rate = decode(path)
    return match_loudness(resample(to_mono(audio)[0], rate * speed, MEL.sample_rate))


def draw(audio: np.ndarray, settings: Settings, update: int) -> Tensor:
    """The batch (b, nw) of an update. A segment may run from one clip into the next, through their silences."""
    rng = np.random.default_rng((settings.seed, update % 2**32))
    samples = (settings.frames - 1) * MEL.hop_length
    starts = rng.integers(0, len(audio) - samples, settings.batch)
    gains = 10 ** (rng.uniform(-settings.gain_db, settings.gain_db, (settings.batch, 1)) / 20)
    batch = np.stack([audio[start : start + samples] for start in starts]) * gains
    batch = torch.from_numpy(batch.astype(np.float32)).clamp(-1, 1)
    return torch.cat([rounded(batch[::2]), batch[1::2]])


def rounded(audio: Tensor) -> Tensor:
    """Samples as a file of 16 bits gives them back."""
    return (audio * 32767).round() / 32768


# The model


def layout(settings: Settings) -> dict:
    """The config in the layout that vocos publishes."""
    mel = dict(sample_rate=MEL.sample_rate, n_fft=MEL.n_fft, hop_length=MEL.hop_length, n_mels=MEL.n_mels)
    sizes = dict(dim=settings.dim, intermediate_dim=settings.intermediate_dim, num_layers=settings.num_layers)
    head = dict(dim=settings.dim, n_fft=MEL.n_fft, hop_length=MEL.hop_length, padding="center")
    parts = {
        "feature_extractor": ("vocos.feature_extractors.MelSpectrogramFeatures", {**mel, "padding": "center"}),
        "backbone": ("vocos.models.VocosBackbone", {"input_channels": MEL.n_mels, **sizes}),
        "head": ("vocos.heads.ISTFTHead", head),
    }
    return {name: {"class_path": path, "init_args": arguments} for name, (path, arguments) in parts.items()}


class Generator(nn.Module):
    """Vocos, under the names of its published weights."""

    def __init__(self, settings: Settings):
        super().__init__()
        import_torchaudio()
        from vocos.heads import ISTFTHead
        from vocos.models import VocosBackbone

        config = layout(settings)
        self.backbone = VocosBackbone(**config["backbone"]["init_args"])
        self.head = ISTFTHead(**config["head"]["init_args"])
        self.precision = settings.precision

    def forward(self, mel: Tensor) -> Tensor:
        """Log-mel (b, n, d) to samples (b, nw). Phases are worked out in fp32: bf16 has no more than 3 digits."""
        with torch.autocast(mel.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            hidden = self.backbone(mel.transpose(1, 2))
        return self.head(hidden.float())


@torch.no_grad()
def initialise(generator: Generator, sounds: Tensor) -> None:
    """Let the head begin with the sounds' magnitudes (b, nw), and with pulses in the middle of its windows.

    Magnitudes: ridge regression of their logarithms on what the untrained backbone makes of the mels. Phases: a pulse
    in the middle has 0 and pi by turns; with 0 alone it would stand at the window's edge, where nothing is heard.
    """
    window = torch.hann_window(MEL.n_fft)
    spectrum = torch.stft(sounds, MEL.n_fft, MEL.hop_length, window=window, return_complex=True)  # b f n
    wanted = (spectrum.abs() + 1e-4).log().transpose(1, 2).flatten(0, 1).double()  # bn f
    hidden = generator.backbone(log_mel(sounds).transpose(1, 2)).flatten(0, 1).double()  # bn dim
    middle, mean = hidden.mean(0), wanted.mean(0)
    gram = (hidden - middle).T @ (hidden - middle)
    gram += 1e-2 * gram.diagonal().mean() * torch.eye(len(gram))
    weight = torch.linalg.solve(gram, (hidden - middle).T @ (wanted - mean)).T  # f dim
    bins, out = wanted.shape[1], generator.head.out
    out.weight[:bins], out.bias[:bins] = weight.float(), (mean - weight @ middle).float()
    out.bias[bins:] = math.pi * (torch.arange(bins) % 2)


def export(generator: Generator, settings: Settings, folder: Path) -> None:
    """A folder that `load_vocoder` reads. Weights in fp16; the window, a constant, stays exact."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = generator.state_dict()
    tensors = {name: x if name.endswith("window") else x.half() for name, x in tensors.items()}
    partial = folder / ".model.partial"
    write_tensors(partial, tensors)
    (folder / "config.yaml").write_text(yaml.safe_dump(layout(settings), sort_keys=False), encoding="utf-8")
    os.replace(partial, folder / "model.safetensors")


# Training


class Training:
    """Generator, its average, adversary and their optimizers; `update` does one update, `state` is all of it."""

    def __init__(self, settings: Settings, sounds: Tensor, device: str = "cpu"):
        """`sounds`: some of the corpus (b, nw), to start from."""
        torch.manual_seed(settings.seed)
        self.settings, self.done = settings, 0
        self.generator = Generator(settings)
        initialise(self.generator, sounds)
        self.generator.to(device)
        self.average = copy.deepcopy(self.generator).requires_grad_(False)
        self.adversary = Adversary(settings.adversary_channels, settings.precision).to(device)
        self.distance = SpectralDistance().to(device)
        named = dict(self.generator.named_parameters())
        products = {name: x for name, x in named.items() if ".pwconv" in name and x.ndim == 2}
        others = [x for name, x in named.items() if name not in products]
        options = dict(lr=settings.learning_rate, betas=(0.8, 0.95), weight_decay=0.01, fused=True)
        muon = dict(lr=settings.product_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        self.optimizers = {
            "products": torch.optim.Muon(products.values(), **muon),
            "others": torch.optim.AdamW(others, **options),
            "adversary": torch.optim.AdamW(self.adversary.parameters(), **options),
        }
        self.rates = {name: each.param_groups[0]["lr"] for name, each in self.optimizers.items()}

    def state(self) -> dict:
        parts = {name: getattr(self, name).state_dict() for name in ("generator", "average", "adversary")}
        return {"done": self.done, **parts, "optimizers": {name: x.state_dict() for name, x in self.optimizers.items()}}

    def restore(self, state: dict) -> None:
        self.done = state["done"]
        for name in ("generator", "average", "adversary"):
            getattr(self, name).load_state_dict(state[name])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])

    def update(self, wanted: Tensor) -> dict[str, float]:
        """One update on the sounds (b, nw); the parts of its loss, unweighted."""
        s = self.settings
        share = min((self.done + 1) / s.warmup, 1) * _cosine(self.done / s.updates)
        for name, optimizer in self.optimizers.items():
            optimizer.param_groups[0]["lr"] = share * self.rates[name]
        mel = log_mel(wanted)
        made = self.generator(mel)
        parts = {"mel": (audible(log_mel(made)) - audible(mel)).abs().mean()}
        parts |= self.distance.at(self.done, made, wanted, phase=s.phase_weight > 0)
        if self.done >= s.adversary_from * s.updates:
            turn = self.done + 1  # another resolution than the distance's
            parts["adversary"] = self.adversary.own_loss(turn, made, wanted)
            self._step(self.adversary, parts["adversary"], "adversary")
            parts["hinge"], parts["feature"] = self.adversary.losses_of(turn, made, wanted)
        weighted = [getattr(s, f"{name}_weight") * x for name, x in parts.items() if name != "adversary"]
        self._step(self.generator, torch.stack(weighted).sum(), "products", "others")
        self.done += 1
        keep = min(s.ema, self.done / (self.done + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.generator.parameters()), 1 - keep)
        return {name: float(x.detach()) for name, x in parts.items()}

    def _step(self, module: nn.Module, loss: Tensor, *optimizers: str) -> None:
        module.zero_grad(set_to_none=True)
        loss.backward()
        used = [parameter for parameter in module.parameters() if parameter.grad is not None]
        nn.utils.clip_grad_norm_(used, 10.0, error_if_nonfinite=True)
        for name in optimizers:
            self.optimizers[name].step()


def _cosine(progress: float) -> float:
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress))


def audible(mel: Tensor) -> Tensor:
    """A log-mel held at 1e-3, 80 dB under a loud vowel: what lies below is rounding, and not to be learned."""
    return mel.clamp(min=math.log(1e-3))


@torch.no_grad()
def listen(training: Training, clips: list[Tensor]) -> dict[str, float]:
    """Distances of the averaged weights on whole held-out clips."""
    found = []
    for clip in clips:
        mel = log_mel(clip[None])
        made = training.average(mel)
        distances = training.distance(made, clip[None, : made.shape[1]])
        found.append({"mel": (audible(log_mel(made)) - audible(mel)).abs().mean()} | distances)
    return {f"heldout_{name}": float(torch.stack([each[name] for each in found]).mean()) for name in found[0]}


def train(
    out: Path, corpus: Path, settings: Settings, every: int = 250, stop: int | None = None, device: str = "cpu"
) -> Path:
    """Train until `settings.updates`, or `stop`, from where `out` stands. Returns the folder for `load_vocoder`."""
    out.mkdir(parents=True, exist_ok=True)
    _same_settings(out, settings)
    audio = prepare(out, corpus, settings)
    some = torch.cat([draw(audio, settings, -1 - i) for i in range(16)])
    training, log, earlier = Training(settings, some, device), out / "log.jsonl", (0.0, 0.0)
    if (out / "state.pt").is_file():
        state = torch.load(out / "state.pt", map_location=device, weights_only=True)
        training.restore(state)
        earlier = state["minutes"]
    rows = [json.loads(row) for row in log.read_text().splitlines()] if log.is_file() else []
    log.write_text("".join(json.dumps(row) + "\n" for row in rows if row["update"] <= training.done))
    heldout = sorted((corpus / "heldout" / "wavs").glob("*.wav"))[:8]
    heldout = [rounded(read_clip(path)).to(device) for path in heldout]
    end, seen, began = min(stop or settings.updates, settings.updates), [], _clocks()
    while training.done < end:
        seen.append(training.update(draw(audio, settings, training.done).to(device)))
        if training.done % every == 0 or training.done == end:
            passed = tuple(x + y - z for x, y, z in zip(earlier, _clocks(), began, strict=True))
            spent = {"update": training.done, "minutes": passed[0], "processor_minutes": passed[1]}
            means = {name: float(np.mean([x[name] for x in seen if name in x])) for name in seen[-1]}
            row = {name: round(value, 4) for name, value in (spent | means | listen(training, heldout)).items()}
            with open(log, "a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
            save(training, out, passed)
            seen = []
    return out / "vocoder"


def _clocks() -> tuple[float, float]:
    """Minutes on the wall and of processor time: on a busy machine they differ by much."""
    return time.monotonic() / 60, time.process_time() / 60


def _same_settings(out: Path, settings: Settings) -> None:
    path = out / "settings.json"
    if path.is_file() and json.loads(path.read_text()) != asdict(settings):
        raise SystemExit(f"{path} has other settings than this start: repeat them, or choose another folder")
    write_json(path, asdict(settings))


def save(training: Training, out: Path, minutes: tuple[float, float]) -> None:
    torch.save(training.state() | {"minutes": minutes}, out / ".state.partial")
    os.replace(out / ".state.partial", out / "state.pt")
    export(training.average, training.settings, out / "vocoder")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--corpus", type=Path, required=True, help="the folder that make_corpus.py wrote")
    parser.add_argument("--every", type=int, default=250, help="updates between two rows of the log")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--stop", type=int, help="stop after so many updates, to be resumed")
    for each in fields(Settings):
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=type(each.default), default=each.default)
    args = parser.parse_args()
    settings = Settings(**{each.name: getattr(args, each.name) for each in fields(Settings)})
    print(train(args.out, args.corpus, settings, args.every, args.stop, args.device))


if __name__ == "__main__":
    main()
