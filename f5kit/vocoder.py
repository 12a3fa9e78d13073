"""Mel to waveform: Vocos (Siuzdak 2023, arXiv 2306.00814) or BigVGAN (Lee et al. 2022, arXiv 2206.04658), as the mel's
kind asks, where their weights can be had; else the small Vocos that f5kit carries, if it does; else Griffin-Lim.

    b  items    n  mel frames    d  mel bins    f  Fourier bins    nw  samples

All take raw natural-log mels, as `audio.log_mel` makes them, and return float32 samples. n frames of the kind "vocos"
give (n - 1) * hop_length samples, because the first frame stands on the first sample; "bigvgan" gives n * hop_length.
"""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from f5kit.audio import import_torchaudio, mel_filterbank
from f5kit.config import MelConfig
from f5kit.errors import UserError
from f5kit.weights import WithoutWeights, convert_pickle, download, read_tensors

VOCOS_REPOSITORY = "charactr/vocos-mel-24khz"
BIGVGAN_REPOSITORY = "nvidia/bigvgan_v2_24khz_100band_256x"
STARTER_FOLDER = Path(__file__).parent / "starter_voice" / "vocoder"
CONFIGS = ("config.yaml", "config.json")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
BIGVGAN_WEIGHTS = ("model.safetensors", "bigvgan_generator.pt")
_MEL_CLASS = "vocos.feature_extractors.MelSpectrogramFeatures"
_MEL_DEFAULTS = {"sample_rate": 24_000, "n_fft": 1024, "hop_length": 256, "n_mels": 100, "padding": "center"}
_BACKBONE_CLASS, _HEAD_CLASS = "vocos.models.VocosBackbone", "vocos.heads.ISTFTHead"


class Vocoder(nn.Module, ABC):
    """What every vocoder can do. Subclasses fill in `_synthesise`."""

    name: str
    """As `load_vocoder` knows it."""
    why: str = "asked for"
    """Why this one was chosen."""

    def __init__(self, mel: MelConfig):
        super().__init__()
        self.mel_config = mel

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"

    @torch.no_grad()
    def decode(self, mel: Tensor) -> Tensor:
        """Raw log-mel (n, d) or (b, n, d) to samples (nw,) or (b, nw), float32, on the mel's device.

        Raises ValueError for another shape. All items of a batch must be as long as the batch.
        """
        if mel.ndim not in (2, 3) or mel.shape[-1] != self.mel_config.n_mels or mel.shape[-2] < 1:
            expected = f"(n, {self.mel_config.n_mels}) or (b, n, {self.mel_config.n_mels})"
            raise ValueError(f"a mel of shape {tuple(mel.shape)} cannot be decoded; expected {expected}")
        device, n = mel.device, mel.shape[-2]
        batch = mel.to(next(self.buffers()).device, torch.float32).reshape(-1, *mel.shape[-2:])  # b n d
        enough = self.mel_config.n_fft // self.mel_config.hop_length + 1
        if n < enough:  # a Fourier transform does not fit into fewer: lengthen, and cut the sound again
            batch = torch.cat([batch, batch[:, -1:].expand(-1, enough - n, -1)], dim=1)
        hops = n - 1 if self.mel_config.kind == "vocos" else n
        audio = self._synthesise(batch)[:, : hops * self.mel_config.hop_length]  # b nw
        return audio.reshape(*mel.shape[:-2], -1).to(device)

    @abstractmethod
    def _synthesise(self, mel: Tensor) -> Tensor:
        """Log-mel (b, n, d) to samples (b, nw)."""


class GriffinLim(Vocoder):
    """Phases found by iteration (Griffin & Lim 1984; momentum after Perraudin et al. 2013): needs no weights.

    Deterministic: the phases start at zero, and no random number is drawn.
    """

    name = "griffin-lim"

    def __init__(self, mel: MelConfig | None = None, iterations: int = 32):
        super().__init__(mel or MelConfig())
        self.iterations = iterations
        bank = mel_filterbank(self.mel_config).float()  # f d
        self.register_buffer("bank", bank, persistent=False)
        self.register_buffer("inverse", torch.linalg.pinv(bank.double()).float(), persistent=False)  # d f
        window = torch.hann_window(self.mel_config.win_length)
        self.register_buffer("window", window, persistent=False)

    def _synthesise(self, mel: Tensor) -> Tensor:
        c = self.mel_config
        if c.kind == "bigvgan":  # its frames stand half a hop later: one more at each end covers every sample
            mel = torch.cat([mel[:, :1], mel, mel[:, -1:]], dim=1)
        magnitude = self._linear(mel.exp()).transpose(1, 2)  # b f n
        audio = import_torchaudio().functional.griffinlim(
            magnitude, self.window, c.n_fft, c.hop_length, c.win_length, power=1.0, n_iter=self.iterations,
            momentum=0.99, length=None, rand_init=False,
        )  # fmt: skip
        return audio if c.kind == "vocos" else audio[:, c.hop_length // 2 :]

    def _linear(self, mel: Tensor, steps: int = 20) -> Tensor:
        """Mel magnitudes (b, n, d) to non-negative linear ones (b, n, f) whose mel comes close.

        The pseudo-inverse is the start. Cutting its negative values disturbs the mel, and a few
        multiplicative updates (Lee & Seung 2001) mend that: each fits better, and none turns negative.
        """
        magnitude = (mel @ self.inverse).clamp(min=1e-8)  # b n f
        wanted = mel @ self.bank.T
        for _ in range(steps):
            magnitude = magnitude * wanted / (magnitude @ self.bank @ self.bank.T).clamp(min=1e-10)
        return magnitude


class VocosVocoder(Vocoder):
    """Vocos: the published package's own backbone and head, with weights read by `weights.py`."""

    name = "vocos"

    def __init__(
        self, config: dict, tensors: dict[str, Tensor], mel: MelConfig | None = None, origin: str = "vocos"
    ):
        """From a config and tensors in the published layout; `origin` is what error messages call them.

        The config holds "feature_extractor", "backbone" and "head", each a class and its arguments.
        Raises UserError when it names other classes or another mel, or the weights do not fit it.
        """
        super().__init__(mel or MelConfig())
        backbone_class, head_class = _vocos_classes()
        backbone = _arguments(config, "backbone", _BACKBONE_CLASS, origin)
        head = _arguments(config, "head", _HEAD_CLASS, origin)
        _require_same_mel(config, backbone, head, self.mel_config, origin)
        try:
            with WithoutWeights():
                self.backbone, self.head = backbone_class(**backbone), head_class(**head)
        except TypeError as error:
            raise UserError(f"{origin} has arguments that vocos does not take: {error}") from None
        self._load(tensors, origin)
        self.eval()

    @classmethod
    def from_folder(cls, folder: str | Path, mel: MelConfig | None = None) -> VocosVocoder:
        """A folder with config.yaml or config.json, and model.safetensors or pytorch_model.bin."""
        config, weights = (_find(folder, names) for names in (CONFIGS, WEIGHTS))
        return cls(_read_config(config), _read_weights(weights), mel, origin=str(folder))

    @classmethod
    def from_hub(cls, mel: MelConfig | None = None) -> VocosVocoder:
        """The published 24 kHz weights, from the local cache or the Hub. UserError when there is no way."""
        config = _read_config(download(VOCOS_REPOSITORY, "config.yaml"))
        return cls(config, _read_weights(download(VOCOS_REPOSITORY, "pytorch_model.bin")), mel, origin=VOCOS_REPOSITORY)

    @classmethod
    def starter(cls, mel: MelConfig | None = None) -> VocosVocoder:
        """The small one that f5kit carries (benchmarks/starter). UserError when this installation has none."""
        if not STARTER_FOLDER.is_dir():
            raise UserError(f"this f5kit carries no vocoder, there is no {STARTER_FOLDER}: choose 'griffin-lim'")
        vocoder = cls.from_folder(STARTER_FOLDER, mel)
        vocoder.name = "starter"
        return vocoder

    def _load(self, tensors: dict[str, Tensor], origin: str) -> None:
        _load_exactly(self, {k: v for k, v in tensors.items() if not k.startswith("feature_extractor.")}, origin)

    def _synthesise(self, mel: Tensor) -> Tensor:
        return self.head(self.backbone(mel.transpose(1, 2)))


class BigVGANVocoder(Vocoder):
    """BigVGAN v2: the published package's own generator, with weights read by `weights.py`.

    It is heavier than Vocos by far, and takes mels of the kind "bigvgan" only.
    """

    name = "bigvgan"

    def __init__(
        self, config: dict, tensors: dict[str, Tensor], mel: MelConfig | None = None, origin: str = "bigvgan"
    ):
        """From the published config.json and the generator's tensors; `origin` is what error messages call them.

        Raises UserError when the config is for another mel, the weights do not fit it, or the package is absent.
        """
        super().__init__(mel or MelConfig("bigvgan"))
        _require_bigvgan_mel(config, self.mel_config, origin)
        generator, arguments = _bigvgan_class()
        try:
            with WithoutWeights():  # a key of the config chooses among the package's classes only
                self.generator = generator(arguments(config), use_cuda_kernel=False)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"{origin}: bigvgan cannot build what the config describes ({error}): restore it") from None
        normed = any(k.endswith("weight_g") for k in tensors)
        if not normed:  # weights that were saved for inference
            _remove_weight_norm(self.generator)
        _load_exactly(self.generator, tensors, origin)
        if normed:
            _remove_weight_norm(self.generator)
        self.requires_grad_(False).eval()

    @classmethod
    def from_folder(cls, folder: str | Path, mel: MelConfig | None = None) -> BigVGANVocoder:
        """A folder with config.json, and model.safetensors or bigvgan_generator.pt."""
        config, weights = (_find(folder, names) for names in (CONFIGS[1:], BIGVGAN_WEIGHTS))
        return cls(_read_config(config), _read_weights(weights), mel, origin=str(folder))

    @classmethod
    def from_hub(cls, mel: MelConfig | None = None) -> BigVGANVocoder:
        """The published 24 kHz weights, from the local cache or the Hub. UserError when there is no way."""
        config = _read_config(download(BIGVGAN_REPOSITORY, "config.json"))
        weights = _read_weights(download(BIGVGAN_REPOSITORY, BIGVGAN_WEIGHTS[1]))
        return cls(config, weights, mel, origin=BIGVGAN_REPOSITORY)

    def _synthesise(self, mel: Tensor) -> Tensor:
        return self.generator(mel.transpose(1, 2))[:, 0]


def load_vocoder(name: str | Path = "auto", mel: MelConfig | None = None, device: str = "cpu") -> Vocoder:
    """A vocoder on `device`; its `.why` says in a sentence why it is this one.

    name: "vocos", "bigvgan", "starter" (the small Vocos that f5kit carries), "griffin-lim", a local folder of Vocos or
    BigVGAN weights, or "auto": the published one of the mel's kind where its weights are in the local cache or the Hub
    answers, else the starter where there is one for this kind of mel, else Griffin-Lim. Raises UserError when it can't
    be had, and for a vocoder of another kind of mel.
    """
    if name == "griffin-lim":
        vocoder = GriffinLim(mel)
    elif name == "vocos":
        vocoder = VocosVocoder.from_hub(mel)
    elif name == "bigvgan":
        vocoder = BigVGANVocoder.from_hub(mel)
    elif name == "starter":
        vocoder = VocosVocoder.starter(mel)
    elif name == "auto":
        vocoder = _best(mel)
    elif Path(name).is_dir():
        # The mel asked for decides; without one, the published layouts tell themselves apart by their config.
        bigvgan = mel.kind == "bigvgan" if mel else _is_bigvgan(Path(name))
        vocoder = (BigVGANVocoder if bigvgan else VocosVocoder).from_folder(name, mel)
    else:
        choices = "'auto', 'vocos', 'bigvgan', 'starter', 'griffin-lim' or a local folder"
        raise UserError(f"there is no vocoder {str(name)!r}: choose {choices}")
    return vocoder.to(device)


def _best(mel: MelConfig | None) -> Vocoder:
    bigvgan = mel is not None and mel.kind == "bigvgan"
    try:
        vocoder = (BigVGANVocoder if bigvgan else VocosVocoder).from_hub(mel)
        vocoder.why = f"the published weights of {BIGVGAN_REPOSITORY if bigvgan else VOCOS_REPOSITORY}"
    except UserError as error:
        carried = STARTER_FOLDER.is_dir() and not bigvgan
        vocoder = VocosVocoder.starter(mel) if carried else GriffinLim(mel)
        published = "BigVGAN" if bigvgan else "the published Vocos" if carried else "Vocos"
        vocoder.why = f"rougher in sound than {published}, which cannot be had: {error}"
    return vocoder


def _find(folder: str | Path, names: Sequence[str]) -> Path:
    """The first of these files that is in the folder. Raises UserError when none is."""
    for name in names:
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    raise UserError(f"{folder} holds no vocoder, no {' or '.join(names)}: name another folder")


def _is_bigvgan(folder: Path) -> bool:
    file = folder / "config.json"
    return file.is_file() and "upsample_rates" in (_read_config(file) or {})


def _load_exactly(module: nn.Module, tensors: dict[str, Tensor], origin: str) -> None:
    """Replace all weights of a module by float32 ones, name by name. Raises UserError when they do not fit."""
    own = module.state_dict()
    given = {k: v.float() for k, v in tensors.items()}
    wrong = [k for k in sorted(own.keys() | given.keys()) if k not in own or k not in given]
    wrong += [k for k in sorted(own.keys() & given.keys()) if own[k].shape != given[k].shape]
    if wrong:
        raise UserError(
            f"{origin}: weights and config do not belong together, {len(wrong)} tensors differ, "
            f"first {wrong[0]}: restore both from one source"
        )
    module.load_state_dict(given, assign=True)
    module.requires_grad_(False)


def _bigvgan_class() -> tuple[type, type]:
    """The package's generator and the kind of dictionary it reads its config from."""
    import matplotlib

    backend = matplotlib.get_backend()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from bigvgan import BigVGAN
            from bigvgan.env import AttrDict
    except ImportError as error:
        raise UserError(
            f"the vocoder bigvgan does not import ({error}): pip install --no-deps bigvgan, and pip install librosa "
            "(its other declared dependencies serve its own training only)"
        ) from None
    finally:
        matplotlib.use(backend)  # the package switches figures off for the whole process
    return BigVGAN, AttrDict


def _remove_weight_norm(generator: nn.Module) -> None:
    with contextlib.redirect_stdout(io.StringIO()):  # it prints
        generator.remove_weight_norm()


def _require_bigvgan_mel(config: dict, mel: MelConfig, origin: str) -> None:
    """The mel a BigVGAN was trained on is in its config; another one would speak noise, without an error."""
    if not isinstance(config, dict) or "upsample_rates" not in config:
        raise UserError(f"{origin}: config.json describes no BigVGAN, it has no upsample_rates: name another folder")
    if mel.kind != "bigvgan":
        raise UserError(f"{origin}: BigVGAN reads mels of its own kind, and the mel here is {mel.kind}; choose 'vocos'")
    ours = {"sampling_rate": mel.sample_rate, "n_fft": mel.n_fft, "hop_size": mel.hop_length}
    ours |= {"win_size": mel.win_length, "num_mels": mel.n_mels, "fmin": 0}
    theirs = {"fmin": 0, **{name: config.get(name) for name in ours if name in config}}
    for name, value in ours.items():
        if theirs.get(name) != value:
            sides = f"the vocoder has {name} {theirs.get(name)} and the model's mel {value}"
            raise UserError(f"{origin}: {sides}; choose a vocoder that was trained on this mel")
    if config.get("fmax") not in (None, mel.sample_rate / 2):
        raise UserError(f"{origin}: the vocoder's fmax is {config['fmax']} and the model's mel goes to half the rate")


def _vocos_classes() -> tuple[type, type]:
    import_torchaudio()  # vocos imports it, and beside a CPU build of torch that fails without help
    try:
        from vocos.heads import ISTFTHead
        from vocos.models import VocosBackbone
    except ImportError as error:
        raise UserError(f"the package vocos does not import ({error}): pip install vocos") from None
    return VocosBackbone, ISTFTHead


def _arguments(config: dict, part: str, expected: str, origin: str) -> dict:
    """The arguments of one part. Only the expected class is ever built: a config must not choose code."""
    section = config.get(part) if isinstance(config, dict) else None
    named = section.get("class_path") if isinstance(section, dict) else None
    if named != expected:
        raise UserError(f"{origin}: the vocoder config's {part} is {named}; f5kit can build {expected}")
    return dict(section.get("init_args") or {})


def _require_same_mel(config: dict, backbone: dict, head: dict, mel: MelConfig, origin: str) -> None:
    """A vocoder of another mel would speak noise, without an error."""
    ours = {"sample_rate": mel.sample_rate, "n_fft": mel.n_fft, "hop_length": mel.hop_length}
    ours |= {"n_mels": mel.n_mels, "padding": "center"}
    if mel.kind != "vocos":
        raise UserError(f"{origin}: Vocos reads mels of its own kind, and the mel here is {mel.kind}; choose 'bigvgan'")
    features = {**_MEL_DEFAULTS, **_arguments(config, "feature_extractor", _MEL_CLASS, origin)}
    for part in (features, {"n_mels": backbone.get("input_channels")}, {"padding": "same", **head}):
        for name in ours.keys() & part.keys():
            if part[name] != ours[name]:
                sides = f"the vocoder has {name} {part[name]} and the model's mel {ours[name]}"
                raise UserError(f"{origin}: {sides}; choose a vocoder that was trained on this mel")


def _read_config(path: Path) -> dict:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read ({str(error).splitlines()[0]}): restore it") from None


def _read_weights(path: Path) -> dict[str, Tensor]:
    return read_tensors(path if path.suffix == ".safetensors" else convert_pickle(path))
