"""A look at the machine before anything is spent on it: what it is, what fits, how long it takes, what it will keep.

Each row of the report has a name, a value and, where there is more to know, a sentence. Times are the run plan's own
estimates for a stated amount of voice; nothing is downloaded, and no secret is shown.
"""

from __future__ import annotations

import html
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from f5kit.checkpoint import describe_model
from f5kit.config import MelConfig
from f5kit.data import Clip, Dataset
from f5kit.errors import UserError
from f5kit.host import GIB, GPU, Host, TorchFacts, detect_host, probe_torch, secret
from f5kit.plan import plan_run

QUOTA = {
    "colab": "free Colab lends a T4 for some hours and may take it back at any time: keep the run on Drive",
    "kaggle": "Kaggle lends about 30 GPU hours a week, 12 hours a session, and keeps 20 GB of /kaggle/working",
    "local": "this machine is yours: nothing ends the run but you",
}
LASTS = {
    "colab": "until the session ends; `backup='drive'` in notebook 02 keeps it",
    "kaggle": "in a saved version: Save & Run All, and add its output as an input of the next",
    "local": "until deleted",
}
SECRETS = {"HF_TOKEN": "needed to publish, and to keep runs on the Hub", "WANDB_API_KEY": "needed to log to wandb"}
_MINUTES = 10.0  # of voice, for the estimate
_DISK = 10.0  # GB that a finetune of the published model wants
_RAM = 8.0  # GB that loading it wants


@dataclass(frozen=True)
class Preflight:
    """The report. Shows itself as a table."""

    host: Host
    rows: tuple[tuple[str, str, str], ...]
    """(name, value, what to know about it)."""

    def __getitem__(self, name: str) -> str:
        return next(value for key, value, _ in self.rows if key == name)

    def __str__(self) -> str:
        return "\n".join(f"{name:>20}  {value:<34} {note}".rstrip() for name, value, note in self.rows)

    def _repr_html_(self) -> str:
        cells = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(text)}</td>" for text in row) + "</tr>"
            for row in self.rows
        )
        return f"<table>{cells}</table>"


def preflight(
    model: str = "F5TTS_v1_Base",
    *,
    minutes: float = _MINUTES,
    workspace: str | Path | None = None,
    probe: Callable[[], TorchFacts] | None = None,
) -> Preflight:
    """Look at this machine and estimate a finetune of `model` on `minutes` of voice.

    workspace: the folder whose disk counts. probe: as in `detect_host`, for machines that are not there.
    """
    facts = (probe or probe_torch)()
    host = detect_host(probe=lambda: facts)
    rows = [("device", host.device_name, host.device_reason)]
    rows += _gpu_rows(facts.gpu, host) if facts.gpu else []
    rows += [("precision", str(host.precision.value), host.precision.reason)]
    rows += [("RAM", f"{host.ram_gb:.1f} GB", "" if host.ram_gb >= _RAM else "loading the published model wants 8 GB")]
    rows += [("processor cores", str(host.cores), "")]
    free = _free_gb(Path(workspace)) if workspace else host.disk_free_gb
    rows += [("free disk", f"{free:.0f} GB", "" if free >= _DISK else f"a finetuning run wants about {_DISK:.0f} GB")]
    rows += [("files last", LASTS[host.platform], ""), ("quota", QUOTA[host.platform], "")]
    rows += [(name, "found" if secret(name) else "not set", note) for name, note in SECRETS.items()]
    rows += _estimate(model, minutes, host)
    return Preflight(host, tuple(rows))


def _gpu_rows(gpu: GPU, host: Host) -> list[tuple[str, str, str]]:
    """What the GPU is, and the two traps: kernels that are missing, and a bf16 that is only imitated."""
    kernels = "" if host.device == "cuda" else "no kernels for this GPU: it is there and cannot be used"
    rows = [("GPU memory", f"{gpu.memory_bytes / GIB:.1f} GB", "")]
    rows += [("capability", f"{gpu.capability[0]}.{gpu.capability[1]} ({gpu.sm})", kernels)]
    rows += [("torch is built for", " ".join(gpu.arch_list) or "not told", "")]
    if (7, 0) <= gpu.capability < (8, 0):
        rows += [("bf16", "imitated", f"torch claims bf16 on {gpu.sm}; it is emulated and slow, so fp16 is used")]
    driver = _driver()
    return [*rows, ("driver", driver, "")] if driver else rows


def _driver() -> str:
    """The NVIDIA driver's version; empty where none tells."""
    if not shutil.which("nvidia-smi"):
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told[0] if told else ""


def _free_gb(folder: Path) -> float:
    folder = folder.absolute()
    return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free / GIB


def _estimate(model: str, minutes: float, host: Host) -> list[tuple[str, str, str]]:
    """What a finetune takes here, by the run plan; on a CPU and on Metal that is said as it is."""
    what = f"{model} on {minutes:g} minutes of voice"
    try:
        plan = plan_run(model, described_voice(minutes, describe_model(model).normaliser), host, measure=False)
    except (UserError, OSError) as error:
        return [("finetuning", "not estimated", str(error))]
    hours = plan.minutes / 60
    time = f"about {plan.minutes:.0f} minutes" if hours < 2 else f"about {hours:.0f} hours"
    honest = {
        "cpu": "a CPU is enough to hear a voice and to try the small `starter`; finetuning wants a GPU",
        "mps": "Metal trains in fp32, and the time is a guess: nobody has measured it",
    }
    fits = "fits" if plan.fits else "does NOT fit"
    speed = f"{plan.train.update_frames / plan.seconds_per_update:,.0f} frames of mel a second"
    note = f"{plan.train.updates:,} updates, {plan.predicted_peak_gb:.1f} GB of memory, {plan.disk_gb:.1f} GB of disk"
    return [
        ("expected speed", speed, "estimated from the machine's name, not measured"),
        ("finetuning", f"{time}, {fits}", f"{what}: {note}"),
        *([("mind", honest[host.device], "")] if host.device in honest else []),
    ]


def described_voice(minutes: float, normaliser: str = "basic", seconds: float = 6.0) -> Dataset:
    """A dataset by its figures alone: clips of `seconds` each, no file behind any of them. For plans only."""
    mel = MelConfig()
    frames = round(seconds * mel.frames_per_second)
    count = max(2, round(minutes * 60 / seconds))
    splits = ["heldout"] + ["train"] * (count - 1)
    clips = [Clip(f"{i:05d}", "", "x" * 80, seconds, frames, split, -23.0, 40.0) for i, split in enumerate(splits)]
    return Dataset(Path("."), {"name": "described", "mel": {}, "normaliser": normaliser}, clips, "")
