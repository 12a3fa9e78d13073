"""What a model is and how it is trained: frozen dataclasses, and the published presets by name.

Everything here is plain data. A config is written beside the weights it belongs to, because two published
layouts (F5TTS_v1_Base and F5TTS_Base) have equal names and shapes and differ only in what is written here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace

from f5kit.errors import UserError

BACKBONES = ("dit", "unett", "mmdit")
MEL_KINDS = ("vocos", "bigvgan")
OPTIMIZERS = ("adamw", "adamw8bit", "paged_adamw8bit")
PRECISIONS = ("fp32", "bf16", "fp16")
CHECKPOINTING = ("none", "selective", "full")
SKIPS = ("concat", "add", "none")
LONGEST_CHUNK = 25.0  # seconds; published models have heard 30 at most


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def _one_of(owner: str, name: str, value, choices) -> None:
    _require(value in choices, f"{owner}.{name} is {value!r}; choose one of {', '.join(map(str, choices))}")


@dataclass(frozen=True)
class MelConfig:
    """The log-mel spectrogram that model and vocoder agree on (F5-TTS paper, section 4: 100 bins at 24 kHz)."""

    kind: str = "vocos"
    """Which definition: "vocos" (HTK filterbank, frames centred on their first sample) or "bigvgan" (Slaney
    filterbank of equal areas, frames centred between their samples)."""
    sample_rate: int = 24_000
    """Hz."""
    n_fft: int = 1024
    """Samples in one Fourier transform."""
    hop_length: int = 256
    """Samples between two frames: 93.75 frames are one second."""
    win_length: int = 1024
    """Samples under the Hann window."""
    n_mels: int = 100
    """Bins."""

    def __post_init__(self):
        _one_of("MelConfig", "kind", self.kind, MEL_KINDS)

    @property
    def frames_per_second(self) -> float:
        return self.sample_rate / self.hop_length


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of one CFM model, and the reading of text and mels that its weights were trained for."""

    name: str
    """The preset or the user's own name."""
    backbone: str
    """"dit" (F5-TTS), "unett" (E2 TTS) or "mmdit"."""
    dim: int
    """Width of the transformer."""
    depth: int
    """Number of blocks."""
    heads: int
    """Attention heads of `dim_head` channels each."""
    ff_mult: float
    """Feed-forward width as a multiple of `dim`."""
    text_dim: int
    """Width of the text embedding."""
    conv_layers: int
    """ConvNeXt V2 blocks over the text embedding."""
    vocab_size: int = 2545
    """Tokens in the vocabulary; the embedding has one row more, row 0, for filler."""
    dim_head: int = 64
    """Channels of one attention head."""
    text_mask_padding: bool = True
    """v1: filler positions of the text stay zero. v0: they are embedded like letters."""
    average_upsampling: bool = False
    """Spread the text over the item's frames in place of leaving it at the start."""
    letter_lengths: bool = False
    """Spread it by how long each letter lasts, and not evenly: aligned where the mel is known, and expected by the text
    blocks where it is not (Glow-TTS, arXiv 2005.11129). Needs average_upsampling."""
    pe_attn_head: int | None = None
    """How many heads get rotary positions: None is all (v1), 1 is the first only (v0)."""
    qk_norm: str | None = None
    """None or "rms_norm": normalise queries and keys of each head."""
    long_skip_connection: bool = False
    """Join the input of the first block to the output of the last."""
    skip_connect_type: str = "concat"
    """UNetT alone: how a later block gets the input of its early counterpart: "concat", "add" or "none"."""
    dropout: float = 0.0
    """In attention output and feed-forward. 0 for finetuning: then a resumed run is exact."""
    tokenizer: str = "char"
    """How normalised text becomes tokens: "char", "pinyin", "custom" or "byte"."""
    normaliser: str = "basic"
    """How text is cleaned before it is tokenized: "basic", "published", "none", and "basic+numbers:vi" and the like."""
    mel: MelConfig = field(default_factory=MelConfig)
    """The mel definition."""
    mel_mean: float = 0.0
    """Subtracted from raw log-mels inside the model. Published models: 0."""
    mel_std: float = 1.0
    """Divides raw log-mels inside the model. Published models: 1."""
    longest_chunk: float = LONGEST_CHUNK
    """Seconds of reference and new speech in one piece, up to which these weights are understood well. Longer texts are
    cut; behind a long reference a piece still has room for 4 s."""

    def __post_init__(self):
        _one_of("ModelConfig", "backbone", self.backbone, BACKBONES)
        _one_of("ModelConfig", "qk_norm", self.qk_norm, (None, "rms_norm"))
        _require(self.mel_std > 0, f"ModelConfig.mel_std is {self.mel_std}; it divides the mel and must be above 0")
        _require(self.longest_chunk > 0, f"ModelConfig.longest_chunk is {self.longest_chunk}; it must be above 0 s")
        _require(
            self.text_mask_padding or not self.average_upsampling,
            "ModelConfig.average_upsampling needs text_mask_padding=True: it spreads the letters that are not filler",
        )
        _require(
            self.average_upsampling or not self.letter_lengths,
            "ModelConfig.letter_lengths needs average_upsampling=True: it says how the text is spread",
        )
        _one_of("ModelConfig", "skip_connect_type", self.skip_connect_type, SKIPS)
        self._check_backbone()

    def _check_backbone(self) -> None:
        """A setting that the backbone would pass over in silence is refused."""
        only_dit = [name for name in ("average_upsampling", "long_skip_connection") if getattr(self, name)]
        _require(
            self.backbone == "dit" or not only_dit,
            f"ModelConfig has {' and '.join(only_dit)} with the backbone {self.backbone!r}, and only dit has that: "
            "leave it out",
        )
        _require(
            self.backbone != "unett" or self.depth % 2 == 0,
            f"ModelConfig.depth is {self.depth}; unett joins the first half of its blocks to the second: "
            "take an even number",
        )
        _require(
            self.backbone != "mmdit" or (self.text_dim, self.conv_layers, self.pe_attn_head) == (self.dim, 0, None),
            f"ModelConfig has text_dim {self.text_dim}, conv_layers {self.conv_layers} and pe_attn_head "
            f"{self.pe_attn_head}; mmdit has text as wide as itself, no text blocks and positions in every head: "
            f"set them to {self.dim}, 0 and None",
        )

    def to_dict(self) -> dict:
        """Plain values, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> ModelConfig:
        """The config that `to_dict` wrote. Raises UserError for fields this version does not know."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        _require(not unknown, f"the model config has unknown fields {unknown}; a newer f5kit wrote it: update f5kit")
        return cls(**{**values, "mel": MelConfig(**values.get("mel", {}))})

    def replace(self, **changes) -> ModelConfig:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def having_heard(self, seconds: Sequence[float]) -> ModelConfig:
        """The config of these weights once they are trained on clips of so many seconds, any number above 0: chunks may
        be as long as all but the longest twentieth of the clips."""
        heard = sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1]
        return self.replace(longest_chunk=min(max(self.longest_chunk, heard), LONGEST_CHUNK))


@dataclass(frozen=True)
class TrainConfig:
    """How one run trains. `plan_run` derives it from what users know; they seldom write one by hand."""

    updates: int
    """Optimizer updates in the whole run."""
    learning_rate: float
    """The peak of the schedule."""
    warmup_updates: int
    """Updates until the peak; a linear decay to 0 follows."""
    update_frames: int
    """Padded mel frames in one update."""
    micro_frames: int
    """Padded mel frames in one forward pass: changes memory and speed, never the result."""
    ema_horizon: int
    """Updates over which the running average of the weights forgets."""
    evaluate_every: int
    """Updates between two held-out losses."""
    save_every: int
    """Updates between two checkpoints."""
    keep_checkpoints: int = 3
    """How many checkpoints to keep, beside the best one."""
    optimizer: str = "adamw"
    """"adamw", or "adamw8bit" (bitsandbytes); "paged_adamw8bit" lets its states leave a GPU that is full."""
    precision: str = "fp32"
    """Autocast type of the forward pass; weights stay fp32."""
    checkpointing: str = "none"
    """"full" recomputes each block in the backward pass: far less memory, about a third more arithmetic.
    "selective" recomputes only the cheap parts between matrix products and attention."""
    compile: bool = False
    """torch.compile the backbone's blocks."""
    weight_decay: float = 0.01
    """Of AdamW."""
    grad_clip: float = 1.0
    """Largest norm of the gradient of one update."""
    seed: int = 0
    """Keys the data order and all randomness."""
    workers: int = 1
    """Threads that make batches ahead; 0 makes them when they are due."""
    sample_every: int = 0
    """Updates between two sets of spoken samples; 0: with each checkpoint."""
    patience: int = 0
    """Evaluations without a lower held-out loss after which the run ends; 0: never."""
    keep_every: int = 0
    """Checkpoints at multiples of this many updates are kept for ever; 0: none."""
    ema_offload: bool = False
    """Keep the running average in the machine's memory and not on the GPU."""
    lora_rank: int = 0
    """Train adapters of this rank in place of the weights (lora.py); 0: train the weights."""

    def __post_init__(self):
        _one_of("TrainConfig", "optimizer", self.optimizer, OPTIMIZERS)
        _one_of("TrainConfig", "precision", self.precision, PRECISIONS)
        _one_of("TrainConfig", "checkpointing", self.checkpointing, CHECKPOINTING)
        for name in ("updates", "update_frames", "micro_frames", "ema_horizon", "evaluate_every", "save_every"):
            value = getattr(self, name)
            _require(value >= 1, f"TrainConfig.{name} is {value}; it must be at least 1")
        _require(self.lora_rank >= 0, f"TrainConfig.lora_rank is {self.lora_rank}; take 4 to 32, or 0 for no adapters")
        _require(self.learning_rate > 0, f"TrainConfig.learning_rate is {self.learning_rate}; it must be above 0")
        _require(
            0 <= self.warmup_updates < self.updates or self.updates == 1,
            f"TrainConfig.warmup_updates is {self.warmup_updates} of {self.updates} updates; take a tenth or less",
        )

    def to_dict(self) -> dict:
        """Plain values, ready for JSON."""
        return asdict(self)


# What upstream's weights were trained to read; only v1_Small was planned for plain characters.
_READS = dict(tokenizer="pinyin", normaliser="published")
_V1 = dict(backbone="dit", ff_mult=2, text_dim=512, conv_layers=4)
_V0 = dict(**_V1, text_mask_padding=False, pe_attn_head=1, **_READS)
_E2 = dict(backbone="unett", ff_mult=4, text_dim=100, conv_layers=0, text_mask_padding=False, pe_attn_head=1,
           **_READS)  # fmt: skip

# The kit's own small models read printable ASCII, and mels scaled by the mean and deviation of levelled speech. The
# starter voice has heard clips of 9 s and less; it was found to be understood as well up to 12 s, and less beyond.
_OWN = dict(backbone="dit", ff_mult=2, vocab_size=95, average_upsampling=True, qk_norm="rms_norm",
            mel_mean=-2.0, mel_std=1.5, longest_chunk=12.0)  # fmt: skip

PRESETS: dict[str, ModelConfig] = {
    config.name: config
    for config in (
        ModelConfig("tiny", dim=64, depth=2, heads=2, dim_head=32, text_dim=32, conv_layers=1, **_OWN),
        ModelConfig("starter", dim=256, depth=6, heads=4, text_dim=128, conv_layers=4, letter_lengths=True, **_OWN),
        ModelConfig("F5TTS_v1_Base", dim=1024, depth=22, heads=16, **_V1, **_READS),
        ModelConfig("F5TTS_Base", dim=1024, depth=22, heads=16, **_V0),
        ModelConfig("F5TTS_v1_Small", dim=768, depth=18, heads=12, **_V1, normaliser="published"),
        ModelConfig("F5TTS_Small", dim=768, depth=18, heads=12, **_V0),
        ModelConfig("E2TTS_Base", dim=1024, depth=24, heads=16, **_E2),
        ModelConfig("E2TTS_Small", dim=768, depth=20, heads=12, **_E2),
    )
}

