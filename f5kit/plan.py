"""The run plan: from what users know (a voice, a machine, some minutes) to what a trainer needs.

Memory is counted on the meta device (memory.py), time is estimated from the card's data sheet (cards.py), and the
fastest way that fits is picked (pick.py). Where the card is in this machine, a real update with the longest batch
corrects both (trial.py); else the plan says that nothing was measured, and holds for a named card as well:
plan_run("F5TTS_v1_Base", dataset, named_host("T4")).
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from f5kit.checkpoint import OWN_PRESETS, describe_model, model_folder
from f5kit.config import CHECKPOINTING, OPTIMIZERS, PRECISIONS, ModelConfig, TrainConfig
from f5kit.data import Dataset
from f5kit.errors import UserError
from f5kit.host import Host
from f5kit.memory import OPTIMIZER_BYTES, MemoryModel, count_parameters
from f5kit.optim import learning_rate as scheduled_rate
from f5kit.pick import CONTEXT_GB, USABLE, Picker, Way
from f5kit.trial import Trial, try_update

__all__ = ["RunPlan", "plan_run", "count_parameters"]

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
_JUDGING_SHARE = 0.2  # of the time that held-out losses may take
_PATIENCE = 0.25  # of the run, without a lower held-out loss
_COMPILED_MINUTES = 10  # of a run, from which compiled code is tried

_SESSION_MINUTES = {"colab": 12 * 60, "kaggle": 12 * 60}  # the longest that the hosts let a session run
_LORA_RATE = 1e-4  # adapters start from nothing and learn at ten times the rate of weights
_SMALL = 50e6  # parameters below which a finetune takes the higher learning rate of a small model
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
    """Memory at the longest batch, counted, with what CUDA and its libraries take."""
    measured_peak_gb: float | None
    """The same, measured by a trial; None when nothing was measured."""
    seconds_per_update: float
    minutes: float
    disk_gb: float
    """Checkpoints and mel cache at their largest."""
    fits: bool
    """Memory and disk suffice."""
    fits_session: bool
    """The run is done before the host ends the session; else it is resumed in the next one."""
    frames_per_second: float
    """Padded frames of mel."""
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
            "model": f"{self.model}, {self.parameters / 1e6:.1f} M parameters" + self._adapters(),
            "device": self.device_name,
            "precision": t.precision,
            "optimizer": t.optimizer + (", average in the machine's memory" if t.ema_offload else ""),
            "activation checkpointing": t.checkpointing,
            "compiled code": "yes" if t.compile else "no",
            "update": f"{t.update_frames:,} padded frames ({t.update_frames / 93.75:.0f} s of speech)",
            "micro-batch": f"{t.micro_frames:,} padded frames, about {self.accumulation} in an update",
            "updates": f"{t.updates:,}",
            "learning rate": f"{t.learning_rate:g} after {t.warmup_updates} warmup updates, then linearly to 0",
            "EMA": f"horizon {t.ema_horizon} updates",
            "judging": f"every {t.evaluate_every} updates; {stop}",
            "checkpoints": f"every {t.save_every} updates; samples every {t.sample_every}",
            "memory": f"{self.predicted_peak_gb:.1f} GB predicted" + self._measured(),
            "speed": f"{self.frames_per_second:,.0f} frames a second, {self.seconds_per_update:.2f} s an update",
            "time": f"{self.minutes:.0f} minutes",
            "disk": f"{self.disk_gb:.1f} GB",
            "fits": "yes" if self.fits else "NO",
            "fits in this session": "yes" if self.fits_session else "no: it goes on in the next one",
        }
        return [(name, value, self.reasons.get(name, "")) for name, value in values.items()]

    def _adapters(self) -> str:
        return f", adapters of rank {self.train.lora_rank}" if self.train.lora_rank else ""

    def _measured(self) -> str:
        return "" if self.measured_peak_gb is None else f", {self.measured_peak_gb:.1f} GB measured"

    def __str__(self) -> str:
        return "\n".join(f"{name:>24}  {value:<52} {reason}".rstrip() for name, value, reason in self.rows())

    def _repr_html_(self) -> str:
        body = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows()
        )
        return f"<table><tr><th>plan</th><th></th><th>why</th></tr>{body}</table>"

    def beside(self, events: Sequence[dict]) -> dict[str, str]:
        """What a run took, from its events, beside what was predicted: rows for a table."""
        updates = [event for event in events if event["event"] == "update"]
        peaks = [event["gpu_peak_gb"] + CONTEXT_GB for event in events if "gpu_peak_gb" in event]
        seconds = sum(event["seconds"] for event in updates) / max(len(updates), 1)
        minutes = sum(event["minutes"] for event in events if event["event"] == "end")
        memory = f"{max(peaks):.1f} GB" if peaks else "not measured: no GPU"
        return {
            "memory": f"{self.predicted_peak_gb:.1f} GB predicted, {memory}",
            "an update": f"{self.seconds_per_update:.2f} s predicted, {seconds:.2f} s taken",
            "the run": f"{self.minutes:.1f} minutes predicted for updates, {minutes:.1f} taken with judging and saving",
        }

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
    lora_rank: int = 0,
    session_minutes: float | None = None,
    measure: bool | None = None,
    seed: int = 0,
) -> RunPlan:
    """Derive a run from what is known.

    The length of the run comes from `updates`, else from `minutes` of training, else from the minutes of voice in the
    dataset. Everything else has a default with a reason. With a `lora_rank` adapters are trained in place of the
    weights. `session_minutes` is how long the host lets a session run, where that is known. `measure`: try a real
    update with the longest batch; None does so where the host's GPU is in this machine.

    Raises UserError for a dataset without clips to train on, a setting that does not exist, or a run whose longest
    clip does not fit the device.
    """
    why: dict[str, str] = {"device": host.device_reason}
    precision = _choose_precision(precision, host, why)
    _known("optimizer", optimizer, OPTIMIZERS)
    _known("checkpointing", checkpointing, CHECKPOINTING)
    picker = _make_picker(describe_model(model), dataset, host, precision, update_frames, lora_rank, why)
    wishes = {"checkpointing": checkpointing, "optimizer": optimizer, "micro_frames": micro_frames}
    way, trial = _choose_way(picker, wishes, measure, why)
    updates = _choose_updates(updates, minutes, dataset.seconds / 60, way.seconds, why)
    compiled = _choose_compiling(picker, way, trial, way.seconds * updates / 60, why)
    cost = _Cost.of(picker, way, compiled or trial, compiled is not None)
    rate = _choose_rate(learning_rate, model, picker.memory, dataset.seconds, why)
    train = TrainConfig(
        updates=updates, learning_rate=rate, update_frames=picker.update_frames, micro_frames=way.micro_frames,
        optimizer=way.optimizer, precision=precision, checkpointing=way.checkpointing, ema_offload=way.ema_offload,
        compile=compiled is not None, lora_rank=lora_rank, seed=seed,
        **_choose_rhythm(updates, dataset, picker.update_frames, cost, why),
    )  # fmt: skip
    asked = {"updates": "updates", "learning_rate": "learning rate", "optimizer": "optimizer", "precision": "precision"}
    derived = ("warmup_updates", "ema_horizon", *(k for k, row in asked.items() if why[row] != "as given"))
    disk = cost.checkpoint_gb * (train.keep_checkpoints + 2)
    disk += sum(clip.frames for clip in dataset.train) * picker.memory.config.mel.n_mels * 4 / _GIB
    kept = f"{train.keep_checkpoints} checkpoints, the best, and one being written"
    why["disk"] = f"{kept}; {host.disk_free_gb:.0f} GB free"
    run_minutes = cost.seconds * updates / 60
    return RunPlan(
        model=model, train=train, parameters=picker.memory.parameters, device=host.device, device_name=host.device_name,
        accumulation=way.passes, predicted_peak_gb=way.allocated_gb + CONTEXT_GB,
        measured_peak_gb=cost.peak_gb if trial else None, seconds_per_update=cost.seconds, minutes=run_minutes,
        disk_gb=disk, fits=cost.peak_gb <= host.memory_gb * USABLE and disk <= host.disk_free_gb,
        fits_session=_fits_session(run_minutes, session_minutes, host, why),
        frames_per_second=picker.update_frames / cost.seconds, reasons=why, derived=derived,
    )  # fmt: skip


def _make_picker(
    config: ModelConfig, dataset: Dataset, host: Host, precision: str, update_frames: int | None, lora_rank: int,
    why: dict[str, str],
) -> Picker:  # fmt: skip
    """What is picked from: the memory model of the longest clip, on this host. Raises UserError without clips."""
    if not dataset.train:
        raise UserError(f"{dataset.folder} has no clip to train on: see its report.json for why clips were rejected")
    checked = dataset.info["normaliser"]
    if checked.partition("+")[2] != config.normaliser.partition("+")[2]:
        why["model"] = f"it reads texts as {config.normaliser}, and the report looked at them as {checked}"
    longest = max(clip.frames for clip in dataset.train)
    total = sum(clip.frames for clip in dataset.train)
    update_frames = max(update_frames or _choose_update(total, why), longest)
    device = "cuda" if host.device == "cuda" else "cpu"
    memory = MemoryModel(config, device, precision, longest, _tokens(dataset, longest), lora_rank)
    return Picker(memory, host, update_frames)


@dataclass(frozen=True)
class _Cost:
    """What a way of training costs."""

    seconds: float
    """An update."""
    peak_gb: float
    """With what CUDA and its libraries take."""
    checkpoint_gb: float

    @classmethod
    def of(cls, picker: Picker, way: Way, trial: Trial | None, compiled: bool) -> _Cost:
        """As a trial measured it; else as it was counted."""
        memory = picker.memory
        states = memory.trained * (OPTIMIZER_BYTES[way.optimizer] or 2.04)
        return cls(
            seconds=_seconds(picker, trial) if compiled else way.seconds,
            peak_gb=(trial.reserved_gb if trial else way.allocated_gb) + CONTEXT_GB,
            checkpoint_gb=(8 * memory.parameters + states) / _GIB,
        )


def _choose_way(picker: Picker, wishes: dict, measure: bool | None, why: dict[str, str]) -> tuple[Way, Trial | None]:
    """The best way that fits, tried where that can be done: what the trial tells corrects the choice, up to twice."""
    way, trial = _best_way(picker, wishes), None
    if _is_here(picker.host) if measure is None else measure:
        for _ in range(3):
            tried, trial = way, _try(picker, way)
            _correct(picker, way, trial)
            way = _best_way(picker, wishes)
            if trial.shortage is None and replace(way, seconds=0, allocated_gb=0) == replace(
                tried, seconds=0, allocated_gb=0
            ):
                break
    if trial and trial.shortage:
        trial = None
    _explain(picker, way, trial, wishes, why)
    return way, trial


def _best_way(picker: Picker, wishes: dict) -> Way:
    """The best one that fits. Raises UserError when none does."""
    memory, host = picker.memory, picker.host
    if ways := picker.ways(**wishes):
        return ways[0]
    room = max(picker.largest(kind, name, offload) for kind in CHECKPOINTING
               for name, offload in (("adamw", False), ("paged_adamw8bit", True)))  # fmt: skip
    raise UserError(
        f"the longest clip has {memory.longest:,} frames and about {room:,} fit on {host.device_name} "
        f"({host.memory_gb:.1f} GB): prepare the data with a smaller max_seconds, or choose a smaller model"
    )


def _try(picker: Picker, way: Way, compile: bool = False) -> Trial:
    """A real update."""
    memory = picker.memory
    train = TrainConfig(
        updates=1, learning_rate=1e-9, warmup_updates=0, update_frames=picker.update_frames, ema_horizon=1,
        micro_frames=way.micro_frames, evaluate_every=1, save_every=1, optimizer=way.optimizer,
        precision=memory.precision, checkpointing=way.checkpointing, ema_offload=way.ema_offload, compile=compile,
        lora_rank=memory.lora_rank,
    )  # fmt: skip
    passes = min(way.passes, 2)
    return try_update(memory.config, train, picker.host.device, memory.longest, memory.tokens, passes=passes)


def _seconds(picker: Picker, trial: Trial) -> float:
    """Of an update, by what a trial took."""
    return trial.seconds_per_pass * picker.update_frames / trial.frames + trial.seconds_per_update


def _correct(picker: Picker, way: Way, trial: Trial) -> None:
    """What a trial says of the estimates."""
    memory = picker.memory
    if trial.shortage:
        memory.correction *= 1.2
        return
    step = memory.step(trial.frames, way.checkpointing).peak * memory.correction / _GIB
    counted = memory.allocated_gb(trial.frames, way.checkpointing, way.optimizer, way.ema_offload, way.passes > 1)
    memory.correction *= max((trial.reserved_gb - (counted - step)) / step, 0.5)
    picker.slower *= _seconds(picker, trial) / way.seconds


def _choose_compiling(picker: Picker, way: Way, trial: Trial | None, minutes: float, why: dict) -> Trial | None:
    """The trial of compiled blocks, where they save more of a run of so many minutes than compiling takes."""
    reason, compiled = None, None
    if trial is None:
        reason = "tried on the card alone"
    elif minutes < _COMPILED_MINUTES:
        reason = f"not tried: a run of less than {_COMPILED_MINUTES} minutes"
    elif way.checkpointing == "selective":
        reason = "not tried: selective recomputing has to see every operation"
    else:
        try:
            compiled = _try(picker, way, compile=True)
        except Exception as error:  # the machine has no compiler, or its card is too old for one
            reason = f"does not work here ({type(error).__name__})"
    if compiled and compiled.shortage:
        reason, compiled = "tried: it does not fit", None
    if compiled:
        saved = 1 - _seconds(picker, compiled) / _seconds(picker, trial)
        reason = f"measured: {saved:.0%} of the time saved, {compiled.seconds_to_begin:.0f} s to compile"
        fits = compiled.reserved_gb + CONTEXT_GB <= picker.host.memory_gb * USABLE
        pays = saved * minutes * 60 > 2 * compiled.seconds_to_begin  # once to train and once to judge
        compiled = compiled if fits and pays and compiled.finite else None
    why["compiled code"] = reason
    return compiled


def _is_here(host: Host) -> bool:
    import torch

    return host.device == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_name() == host.device_name


def _explain(picker: Picker, way: Way, trial: Trial | None, wishes: dict, why: dict[str, str]) -> None:
    """Reasons for what was picked."""
    host = picker.host
    plain = picker.largest("none", way.optimizer, way.ema_offload)
    given = {name: "as given" for name, wish in wishes.items() if wish not in ("auto", None)}
    fits = f"{plain:,} frames fit in a pass without it"
    reason = fits if way.checkpointing == "none" else f"{fits}, {way.micro_frames:,} with it, which is faster"
    why["activation checkpointing"] = given.get("checkpointing", reason)
    plainest = "as fast as any here, and exact" if host.device == "cuda" else "fused AdamW is the fastest here"
    makeshift = f"the states of AdamW leave too little room in {host.memory_gb:.1f} GB"
    why["optimizer"] = given.get("optimizer", plainest if way.optimizer == "adamw" else makeshift)
    why["micro-batch"] = given.get("micro_frames", "the most that fits, at most one update")
    why.setdefault("update", "as given")
    how = "counted on the meta device" if trial is None else "counted, and tried with the longest batch"
    why["memory"] = f"{how}; {host.device_name} has {host.memory_gb:.1f} GB"
    why["speed"] = picker.source if trial is None else "measured with the longest batch"
    why["time"] = "updates alone; judging, samples and checkpoints come on top"


def _fits_session(minutes: float, session_minutes: float | None, host: Host, why: dict[str, str]) -> bool:
    allowed = session_minutes or _SESSION_MINUTES.get(host.platform)
    if allowed is None:
        why["fits in this session"] = "this machine ends no session by itself, as far as is known"
        return True
    why["fits in this session"] = f"{allowed:.0f} minutes are allowed, of which a tenth is kept for the rest"
    return minutes <= 0.9 * allowed


def _tokens(dataset: Dataset, longest: int) -> int:
    """Letters of the densest text, over the frames of the longest clip."""
    densest = max(len(clip.text) / clip.frames for clip in dataset.train)
    return min(math.ceil(densest * longest), longest)


def _choose_rate(given: float | None, model: str, memory: MemoryModel, seconds: float, why: dict[str, str]) -> float:
    if given:
        why["learning rate"] = "as given"
        return given
    if memory.lora_rank:
        why["learning rate"] = "usual for adapters"
        return _LORA_RATE
    fresh = model in OWN_PRESETS and model_folder(model) is None
    kind = "fresh weights" if fresh else "a small model" if memory.parameters < _SMALL else "usual for a finetune"
    usual = min(RECIPES.items(), key=lambda row: abs(math.log(row[0] * 60 / max(seconds, 1))))[1]
    why["learning rate"] = kind
    return {"fresh weights": 1e-3, "a small model": 3e-4}.get(kind, usual["learning_rate"])


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


def _choose_update(total: int, why: dict[str, str]) -> int:
    why["update"] = "a tenth of the voice, between 17 s and 205 s: a guess, not tuned"
    return min(max(total // 10, 1_600), 19_200)


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


def _choose_rhythm(updates: int, dataset: Dataset, update_frames: int, cost: _Cost, why: dict[str, str]) -> dict:
    """When the learning rate has risen, how far the average reaches, and the updates between judgements, checkpoints
    and samples."""
    judge = _choose_judging(updates, sum(clip.frames for clip in dataset.judged) / update_frames)
    why["EMA"] = "a tenth of the run, started afresh"
    why["judging"] = "8 to 20 times a run, by its price, on clips held out; to wait a quarter of the run is a guess"
    return {
        "warmup_updates": updates // 10, "ema_horizon": max(updates // 10, 1), "evaluate_every": judge,
        "save_every": _choose_saving(updates, judge, cost.seconds, cost.checkpoint_gb, why),
        "sample_every": max(updates // 4, 1),
        "patience": math.ceil(_PATIENCE * updates / judge) * (updates >= 100),
    }  # fmt: skip


def _choose_judging(updates: int, judged: float) -> int:
    """Updates between two held-out losses, `judged` being the frames they look at, in updates: a twentieth of the run,
    or more where they would take more than their share of the time, and an eighth at most."""
    price = 8 * judged / 3  # raw and EMA, four times each, and without the backward pass
    return max(min(math.ceil(price / _JUDGING_SHARE), updates // 8), updates // 20, 1)


def _choose_saving(updates: int, evaluate: int, seconds: float, checkpoint_gb: float, why: dict[str, str]) -> int:
    """Updates between two checkpoints: whole evaluations, at least four in the run."""
    affordable = checkpoint_gb / _DISK_GB_PER_SECOND / _SAVE_SHARE / max(seconds, 1e-9)  # updates a save must be apart
    apart = max(min(math.ceil(affordable / evaluate), updates // 4 // evaluate), 2)
    why["checkpoints"] = f"so that writing {checkpoint_gb:.1f} GB takes about a twentieth of the time, and four or more"
    return min(apart * evaluate, updates)
