"""The run plan: from what users know (a voice, a machine, some minutes) to what a trainer needs.

Memory and time are estimated from the model's shape and the machine's name. Nothing is measured here yet; every figure
in the plan says so in its reason.
"""

from __future__ import annotations

import html
import math
from dataclasses import asdict, dataclass

from f5kit.checkpoint import OWN_PRESETS, describe_model, model_folder
from f5kit.config import CHECKPOINTING, OPTIMIZERS, PRECISIONS, ModelConfig, TrainConfig
from f5kit.data import Dataset
from f5kit.errors import UserError
from f5kit.host import Host
from f5kit.optim import learning_rate as scheduled_rate

# Recipes by minutes of voice: updates and learning rate of a finetune. The updates are guesses that were not tuned;
# the rate is upstream's. Between two rows the updates are interpolated on log scales.
RECIPES = {
    1: dict(updates=100, learning_rate=1e-5),
    10: dict(updates=400, learning_rate=1e-5),
    60: dict(updates=1_500, learning_rate=1e-5),
    600: dict(updates=8_000, learning_rate=1e-5),
}
_SAVE_SHARE = 0.05  # of the time that checkpoints may take
_DISK_GB_PER_SECOND = 0.3  # written, read again and hashed: a guess for a rented machine's disk
_PATIENCE = 5  # evaluations, a quarter of the run, without a lower held-out loss

# Training arithmetic a card reaches on transformers of this size, TFLOP/s in its reduced precision: reasoned from its
# data sheet, not measured by us. A name is matched by the first key it contains.
_TFLOPS = {
    "T4": 20, "P100": 8, "V100": 40, "L4": 35, "A10": 45, "RTX 3060": 20, "RTX 3090": 50, "RTX 4090": 110,
    "A100": 120, "H100": 280, "H200": 300,
}  # fmt: skip
_CPU_TFLOPS_PER_CORE = 0.04  # fp32, AVX2

# Bytes kept for the backward pass, per padded frame, block and channel. Counted on F5TTS_v1_Base and _Small;
# "selective" keeps half of what "full" saves (counted on _Small: 68, 36 and 4 bytes of activations alone in fp32).
_ACTIVATION = {
    ("fp32", "none"): 88, ("fp32", "selective"): 50, ("fp32", "full"): 12,
    ("half", "none"): 56, ("half", "selective"): 32, ("half", "full"): 8.5,
}  # fmt: skip
_OPTIMIZER_BYTES = {"adamw": 8.0, "adamw8bit": 2.04}  # per parameter
_SMALL = 50e6  # parameters below which a finetune takes the higher learning rate of a small model
_CONTEXT_GB = 0.6  # what CUDA and its libraries take before the first tensor
_USABLE = 0.92  # share of the memory a plan may fill
_GIB = 2**30


@dataclass(frozen=True)
class RunPlan:
    """What a run will do and what it will cost, with the reason for each choice. Shows itself as a table."""

    model: str
    """What `load_model` takes."""
    train: TrainConfig
    """What the trainer takes."""
    parameters: int
    """Of the model."""
    device: str
    """"cuda", "mps" or "cpu"."""
    device_name: str
    """As its maker calls it."""
    accumulation: int
    """Forward passes in one update, about."""
    predicted_peak_gb: float
    """Memory at the longest batch, estimated."""
    measured_peak_gb: float | None
    """The same, measured by a probe; None when nothing was measured."""
    seconds_per_update: float
    minutes: float
    disk_gb: float
    """Checkpoints and mel cache at their largest."""
    fits: bool
    """Memory and disk suffice."""
    reasons: dict[str, str]
    """Why, by the name of the row."""
    derived: tuple[str, ...] = ()
    """Settings of `train` that were derived, not asked for: a run that is resumed elsewhere keeps its own."""

    def to_dict(self) -> dict:
        """Plain values, ready for JSON."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str, str]]:
        """(what, value, reason) in reading order."""
        t = self.train
        stop = f"the run ends after {t.patience} in vain" if t.patience else "too short a run for a stop rule"
        values = {
            "model": f"{self.model}, {self.parameters / 1e6:.1f} M parameters",
            "device": self.device_name,
            "precision": t.precision,
            "optimizer": t.optimizer,
            "activation checkpointing": t.checkpointing,
            "update": f"{t.update_frames:,} padded frames ({t.update_frames / 93.75:.0f} s of speech)",
            "micro-batch": f"{t.micro_frames:,} padded frames, about {self.accumulation} in an update",
            "updates": f"{t.updates:,}",
            "learning rate": f"{t.learning_rate:g} after {t.warmup_updates} warmup updates, then linearly to 0",
            "EMA": f"horizon {t.ema_horizon} updates",
            "judging": f"every {t.evaluate_every} updates; {stop}",
            "checkpoints": f"every {t.save_every} updates; samples every {t.sample_every}",
            "memory": f"{self.predicted_peak_gb:.1f} GB",
            "time": f"{self.minutes:.0f} minutes, {self.seconds_per_update:.2f} s an update",
            "disk": f"{self.disk_gb:.1f} GB",
            "fits": "yes" if self.fits else "NO",
        }
        return [(name, value, self.reasons.get(name, "")) for name, value in values.items()]

    def __str__(self) -> str:
        return "\n".join(f"{name:>24}  {value:<52} {reason}".rstrip() for name, value, reason in self.rows())

    def _repr_html_(self) -> str:
        body = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows()
        )
        return f"<table><tr><th>plan</th><th></th><th>why</th></tr>{body}</table>"

    def plot_schedule(self):
        """The learning rate over the run, as a matplotlib figure."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 2.2), layout="constrained")
        axes = figure.subplots()
        updates = range(0, self.train.updates, max(self.train.updates // 200, 1))
        axes.plot(updates, [scheduled_rate(u, self.train) for u in updates])
        saves = range(self.train.save_every, self.train.updates + 1, self.train.save_every)
        axes.plot(saves, [scheduled_rate(u, self.train) for u in saves], "o", markersize=3, label="checkpoints")
        axes.legend()
        axes.set(xlabel="update", ylabel="learning rate", title="The schedule of this run")
        axes.grid(alpha=0.3)
        return figure


def plan_run(
    model: str,
    dataset: Dataset,
    host: Host,
    *,
    minutes: float | None = None,
    updates: int | None = None,
    learning_rate: float | None = None,
    optimizer: str = "auto",
    precision: str = "auto",
    update_frames: int | None = None,
    micro_frames: int | None = None,
    checkpointing: str = "auto",
    seed: int = 0,
) -> RunPlan:
    """Derive a run from what is known.

    The length of the run comes from `updates`, else from `minutes` of training, else from the minutes of voice in the
    dataset. Everything else has a default with a reason. The estimates are static: the model's shape and the device's
    name, no measurement.

    Raises UserError for a dataset without clips to train on, a setting that does not exist, or a run whose longest
    clip does not fit the device.
    """
    if not dataset.train:
        raise UserError(f"{dataset.folder} has no clip to train on: see its report.json for why clips were rejected")
    config = describe_model(model)
    parameters = count_parameters(config)
    longest = max(clip.frames for clip in dataset.train)
    total = sum(clip.frames for clip in dataset.train)
    why: dict[str, str] = {"device": host.device_reason}
    checked = dataset.info["normaliser"]
    if checked.partition("+")[2] != config.normaliser.partition("+")[2]:
        why["model"] = f"it reads texts as {config.normaliser}, and the report looked at them as {checked}"
    precision = _choose_precision(precision, host, why)
    optimizer = _choose_optimizer(optimizer, host, why)
    update_frames = update_frames or _choose_update(total, longest, why)
    memory = MemoryModel(config, parameters, precision, optimizer)
    _known("checkpointing", checkpointing, CHECKPOINTING)
    micro_frames, checkpointing = _choose_micro(
        micro_frames, update_frames, longest, memory, host, why, checkpointing
    )
    seconds = update_frames * flops_per_frame(config) / (_tflops(host, why) * 1e12)
    updates = _choose_updates(updates, minutes, dataset.seconds / 60, seconds, why)
    fresh = model in OWN_PRESETS and model_folder(model) is None
    kind = "fresh weights" if fresh else "a small model" if parameters < _SMALL else "usual for a finetune"
    usual = min(RECIPES.items(), key=lambda row: abs(math.log(row[0] * 60 / max(dataset.seconds, 1))))[1]
    rate = learning_rate or {"fresh weights": 1e-3, "a small model": 3e-4}.get(kind, usual["learning_rate"])
    why["learning rate"] = "as given" if learning_rate else kind
    checkpoint_gb = parameters * (8 + _OPTIMIZER_BYTES[optimizer]) / _GIB
    evaluate_every, save_every = _intervals(updates, seconds, checkpoint_gb, why)
    train = TrainConfig(
        updates=updates, learning_rate=rate, warmup_updates=updates // 10, update_frames=update_frames,
        micro_frames=micro_frames, ema_horizon=max(updates // 10, 1), evaluate_every=evaluate_every,
        save_every=save_every, sample_every=max(updates // 4, 1), patience=_PATIENCE * (updates >= 100),
        optimizer=optimizer, precision=precision, checkpointing=checkpointing, seed=seed,
    )  # fmt: skip
    asked = {"updates": "updates", "learning_rate": "learning rate", "optimizer": "optimizer", "precision": "precision"}
    derived = ("warmup_updates", "ema_horizon", *(k for k, row in asked.items() if why[row] != "as given"))
    peak = memory.peak_gb(micro_frames, checkpointing)
    disk = checkpoint_gb * (train.keep_checkpoints + 2) + total * config.mel.n_mels * 4 / _GIB
    why["EMA"] = "a tenth of the run, started afresh"
    why["judging"] = "held-out clips with fixed noise; to wait a quarter of the run is a guess"
    why["memory"] = f"estimated; {host.device_name} has {host.memory_gb:.1f} GB"
    kept = f"{train.keep_checkpoints} checkpoints, the best, and one being written"
    why["disk"] = f"{kept}; {host.disk_free_gb:.0f} GB free"
    fits = peak <= host.memory_gb * _USABLE and disk <= host.disk_free_gb
    return RunPlan(
        model=model, train=train, parameters=parameters, device=host.device, device_name=host.device_name,
        accumulation=math.ceil(update_frames / micro_frames), predicted_peak_gb=peak, measured_peak_gb=None,
        seconds_per_update=seconds, minutes=seconds * updates / 60, disk_gb=disk, fits=fits, reasons=why,
        derived=derived,
    )  # fmt: skip


@dataclass(frozen=True)
class MemoryModel:
    """Bytes of weights, gradients, optimizer, EMA and activations, from the model's shape."""

    config: ModelConfig
    parameters: int
    precision: str
    optimizer: str

    @property
    def static_gb(self) -> float:
        """What does not depend on the batch: fp32 weights, gradients and EMA, optimizer state, 16-bit casts."""
        per_parameter = 4 + 4 + 4 + _OPTIMIZER_BYTES[self.optimizer] + (0 if self.precision == "fp32" else 2)
        return self.parameters * per_parameter / _GIB + _CONTEXT_GB

    def frame_gb(self, checkpointing: str) -> float:
        """What one padded frame keeps for the backward pass."""
        kind = "fp32" if self.precision == "fp32" else "half"
        return _ACTIVATION[kind, checkpointing] * self.config.depth * self.config.dim / _GIB

    def peak_gb(self, frames: int, checkpointing: str) -> float:
        return self.static_gb + frames * self.frame_gb(checkpointing)

    def largest(self, memory_gb: float, checkpointing: str) -> int:
        """The most padded frames that fit."""
        return max(int((memory_gb * _USABLE - self.static_gb) / self.frame_gb(checkpointing)), 0)


def count_parameters(config: ModelConfig) -> int:
    """Parameters of a model of that config, without making one."""
    import torch

    from f5kit.cfm import CFM
    from f5kit.text import Tokenizer

    with torch.device("meta"):
        model = CFM(config, Tokenizer([" ", *(f"#{i}" for i in range(1, config.vocab_size))]))
    return sum(p.numel() for p in model.parameters())


def flops_per_frame(config: ModelConfig) -> float:
    """Forward and backward arithmetic of one frame: six per weight of the linear layers, and a tenth for attention."""
    inner = config.heads * config.dim_head
    block = 4 * config.dim * inner + 2 * config.dim * config.dim * config.ff_mult
    edges = (3 * config.mel.n_mels + config.text_dim) * config.dim + config.dim * (config.dim // 16) * 31 * 2
    return 6 * 1.1 * (config.depth * block + edges)


def _known(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in ("auto", *choices):
        raise UserError(f"{name} is {value!r}; choose one of auto, {', '.join(choices)}")


def _choose_precision(precision: str, host: Host, why: dict[str, str]) -> str:
    _known("precision", precision, PRECISIONS)
    if precision == "auto":
        why["precision"] = host.precision.reason
        return host.precision.value
    why["precision"] = "as given"
    if precision == "fp16" and host.device != "cuda":
        raise UserError(f'precision "fp16" needs a CUDA device and this is {host.device}: choose "fp32" or "bf16"')
    return precision


def _choose_optimizer(optimizer: str, host: Host, why: dict[str, str]) -> str:
    _known("optimizer", optimizer, OPTIMIZERS)
    if optimizer != "auto":
        why["optimizer"] = "as given"
        return optimizer
    if host.device == "cuda" and host.memory_gb < 24:
        why["optimizer"] = "8-bit states leave room on a card below 24 GB"
        return "adamw8bit"
    why["optimizer"] = "fused AdamW is faster where memory is not short"
    return "adamw"


def _choose_update(total: int, longest: int, why: dict[str, str]) -> int:
    frames = min(max(total // 10, 1_600), 19_200)
    why["update"] = "a tenth of the voice, between 17 s and 205 s: a guess, not tuned"
    return max(frames, longest)


def _choose_micro(
    micro, update_frames: int, longest: int, memory: MemoryModel, host: Host, why: dict[str, str], asked: str
):
    """(padded frames, checkpointing) of one forward pass."""
    plain, recomputed = memory.largest(host.memory_gb, "none"), memory.largest(host.memory_gb, "full")
    checkpointing = "none" if plain >= max(longest, update_frames // 4) else "full"
    why["activation checkpointing"] = f"{plain:,} frames fit without it, {recomputed:,} with it (estimated)"
    if asked != "auto":
        checkpointing, why["activation checkpointing"] = asked, "as given"
    room = memory.largest(host.memory_gb, checkpointing)
    if max(room, micro or 0) < longest:
        raise UserError(
            f"the longest clip has {longest:,} frames and about {room:,} fit on {host.device_name} "
            f"({host.memory_gb:.1f} GB): prepare the data with a smaller max_seconds, or choose a smaller model"
        )
    if micro:
        why["micro-batch"] = "as given"
        return max(micro, longest), checkpointing
    why["micro-batch"] = "the most that is estimated to fit, at most one update"
    return max(min(room, update_frames), longest), checkpointing


def _choose_updates(updates, minutes, voice_minutes: float, seconds: float, why: dict[str, str]) -> int:
    if updates:
        why["updates"] = "as given"
        return updates
    if minutes:
        why["updates"] = f"what {minutes:g} minutes are estimated to allow"
        return max(int(minutes * 60 / seconds), 1)
    why["updates"] = f"from {voice_minutes:.0f} minutes of voice: a guess, not tuned"
    points = [(math.log(minutes), math.log(recipe["updates"])) for minutes, recipe in RECIPES.items()]
    x = min(max(math.log(max(voice_minutes, 1e-3)), points[0][0]), points[-1][0])
    for (x0, y0), (x1, y1) in zip(points[:-1], points[1:], strict=True):
        if x <= x1:
            return round(math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0)))
    return RECIPES[max(RECIPES)]["updates"]


def _intervals(updates: int, seconds: float, checkpoint_gb: float, why: dict[str, str]) -> tuple[int, int]:
    """Updates between two evaluations, and between two checkpoints: whole evaluations, at least four in the run."""
    evaluate = max(updates // 20, 1)
    affordable = checkpoint_gb / _DISK_GB_PER_SECOND / _SAVE_SHARE / max(seconds, 1e-9)  # updates a save must be apart
    apart = max(min(math.ceil(affordable / evaluate), 5), 2)
    why["checkpoints"] = f"so that writing {checkpoint_gb:.1f} GB takes about a twentieth of the time, and four or more"
    return evaluate, min(apart * evaluate, updates)


def _tflops(host: Host, why: dict[str, str]) -> float:
    if host.device == "cpu":
        why["time"] = f"estimated for {host.cores} processor cores"
        return _CPU_TFLOPS_PER_CORE * host.cores
    for name, tflops in _TFLOPS.items():
        if name in host.device_name:
            why["time"] = f"estimated from the data sheet of the {name}"
            return tflops
    why["time"] = f"{host.device_name} is not in our table: taken as fast as a T4"
    return _TFLOPS["T4"]
