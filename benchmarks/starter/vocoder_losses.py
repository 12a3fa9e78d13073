"""What the starter vocoder is trained to lower: distances between two sounds, and the losses of a light adversary.

    b  items    nw  samples    f  Fourier bins    n  frames
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from f5kit.audio import import_torchaudio

WINDOWS = (512, 1024, 2048)
"""Samples: hops are a quarter of them. Short ones show pulses, long ones harmonics."""
FLOOR = 3e-3
"""Magnitudes far below this, 70 dB under a loud vowel, are as good as silence."""


class SpectralDistance(nn.Module):
    """Distances of spectra at several resolutions: {"convergence", "log", "phase"}.

    convergence, log: of magnitudes (Yamamoto et al. 2020, Parallel WaveGAN, arXiv 1910.11480). phase: of phase steps
    from frame to frame and from bin to bin, which are the instantaneous frequency and the group delay (Ai & Ling 2023,
    APNet, arXiv 2305.07952, there as angles). Here they are points on the circle, which need no unwrapping, and loud
    bins count more.
    """

    def __init__(self, windows: tuple[int, ...] = WINDOWS):
        super().__init__()
        for size in windows:
            self.register_buffer(f"window_{size}", torch.hann_window(size), persistent=False)
        self.sizes = windows

    def forward(self, made: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        """The mean over all resolutions, of two (b, nw) float32."""
        found = [self.at(turn, made, wanted) for turn in range(len(self.sizes))]
        return {name: torch.stack([each[name] for each in found]).mean() for name in found[0]}

    def at(self, turn: int, made: Tensor, wanted: Tensor, phase: bool = True) -> dict[str, Tensor]:
        """Of the resolution whose turn it is. `phase` False leaves that distance, the dearest, out."""
        size = self.sizes[turn % len(self.sizes)]
        window = getattr(self, f"window_{size}")
        ours, theirs = (
            torch.stft(x, size, size // 4, size, window, return_complex=True) for x in (made, wanted)
        )  # b f n
        a, b = magnitude(ours), magnitude(theirs)
        found = {
            "convergence": (a - b).norm() / b.norm().clamp(min=1e-3),
            "log": ((a + FLOOR).log() - (b + FLOOR).log()).abs().mean(),
        }
        if phase:
            apart = torch.view_as_real(ours * theirs.conj()) / (a * b)[..., None]  # b f n 2, on the circle
            found["phase"] = (_step_distance(apart, b, 1) + _step_distance(apart, b, 2)) / 2
        return found


def magnitude(spectrum: Tensor) -> Tensor:
    """Of complex numbers; its gradient is finite at 0, where that of `abs` is not defined."""
    return (torch.view_as_real(spectrum).square().sum(-1) + 1e-10).sqrt()


def _step_distance(apart: Tensor, weight: Tensor, dim: int) -> Tensor:
    """Mean distance of two sounds' phase steps along a dimension of (b, f, n), 0 to 2, as points on the circle.

    Their steps differ by as much as `apart`, the phase between the two (b, f, n, 2), changes.
    """
    steps = (apart.diff(dim=dim).square().sum(-1) + 1e-8).sqrt()
    count = weight.shape[dim] - 1
    weight = (weight.narrow(dim, 1, count) * weight.narrow(dim, 0, count)).sqrt()
    return (weight * steps).sum() / weight.sum().clamp(min=1e-3)


class Adversary(nn.Module):
    """Spectrogram discriminators of several window lengths, vocos' own class with fewer channels and bands.

    One of them judges each update, in turn: a third of the cost. The band above 9 kHz, where most of the corpus has no
    sound, is left out.
    """

    def __init__(self, channels: int, precision: str = "bf16", windows: tuple[int, ...] = WINDOWS):
        super().__init__()
        self.half = precision == "bf16"
        import_torchaudio()
        from vocos.discriminators import DiscriminatorR
        from vocos.loss import DiscriminatorLoss, FeatureMatchingLoss, GeneratorLoss

        bands = ((0.0, 0.1), (0.1, 0.25), (0.25, 0.5), (0.5, 0.75))
        self.judges = nn.ModuleList(DiscriminatorR(size, channels=channels, bands=bands) for size in windows)
        self.losses = DiscriminatorLoss(), GeneratorLoss(), FeatureMatchingLoss()

    def own_loss(self, turn: int, made: Tensor, wanted: Tensor) -> Tensor:
        """Hinge loss of telling the sounds (b, nw) apart. It gives no gradient to `made`."""
        score, _ = self._judge(turn, torch.cat([wanted, made.detach()]))
        real, fake = score.float().chunk(2)
        return self.losses[0]([real], [fake])[0].squeeze()

    def losses_of(self, turn: int, made: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """(hinge loss of not being found out, distance of the features), to be lowered through `made`."""
        self.requires_grad_(False)
        with torch.no_grad():
            _, real = self._judge(turn, wanted)
        score, fake = self._judge(turn, made)
        self.requires_grad_(True)
        features = self.losses[2]([[x.float() for x in real]], [[x.float() for x in fake]])
        return self.losses[1]([score.float()])[0].squeeze(), features.squeeze() / len(real)

    def _judge(self, turn: int, audio: Tensor) -> tuple[Tensor, list[Tensor]]:
        with torch.autocast(audio.device.type, torch.bfloat16, enabled=self.half):
            return self.judges[turn % len(self.judges)](audio)
