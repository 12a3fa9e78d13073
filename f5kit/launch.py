"""Train from a command line, on one device or on several.

    python -m f5kit.launch data/my_voice runs/my_voice --model F5TTS_v1_Base --processes 2      two GPUs of one machine

Started by `accelerate launch`, each process trains its share; two machines need a drive that both see, for the dataset
and the run folder, and one command each (README). A notebook cannot start processes that share its GPUs' memory, so
`launch` runs this module beside it, and the notebook's own Trainer then finds the run done.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from f5kit.data import load_dataset
from f5kit.errors import UserError
from f5kit.host import detect_host
from f5kit.plan import plan_run
from f5kit.trainer import Trainer

# Options that go to `plan_run` as they are, with their types.
_OPTIONS = {
    "updates": int, "minutes": float, "learning_rate": float, "optimizer": str, "precision": str, "update_frames": int,
    "micro_frames": int, "checkpointing": str, "lora_rank": int, "seed": int,
}  # fmt: skip


def launch(dataset: str | Path, run: str | Path, model: str, processes: int, **options) -> None:
    """Train in so many processes, and wait for them. `options` are those of `plan_run`, and max_minutes.

    What they print passes through. Raises UserError when they fail.
    """
    given = [str(part) for k, v in options.items() if v is not None for part in (f"--{k.replace('_', '-')}", v)]
    about = [str(dataset), str(run), "--model", str(model), *given]
    cuda = detect_host().device == "cuda"
    starter = ["accelerate.commands.launch", "--num_processes", str(processes), "--num_machines", "1"]
    starter += ["--dynamo_backend", "no", "--mixed_precision", "no", *(["--multi_gpu"] if processes > 1 else [])]
    if not cuda:  # accelerate's own launcher starts several CPU processes through MPI alone
        starter = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, "-m", *starter, "-m", "f5kit.launch", *about]
    code = subprocess.run(command, env=os.environ).returncode
    if code:
        raise UserError(f"training in {processes} processes ended with {code}: what they printed above says why")


def report(event: dict, trainer: Trainer) -> None:
    """One line a judgement, a save, and anything unusual."""
    kind = event["event"]
    if kind in ("update", "machine", "sample"):
        return
    about = {k: round(v, 4) if isinstance(v, float) else v for k, v in event.items() if k not in ("event", "update")}
    told = " ".join(f"{k}={v}" for k, v in about.items())
    print(f"update {event['update']}/{trainer.config.updates} {kind} {told}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m f5kit.launch", description=__doc__.splitlines()[0])
    parser.add_argument("dataset", help="a folder that notebook 01 or prepare_dataset made")
    parser.add_argument("run", help="the run folder")
    parser.add_argument("--model", default="F5TTS_v1_Base", help="what load_model takes")
    parser.add_argument("--processes", type=int, default=1, help="on this machine")
    parser.add_argument("--max-minutes", type=float, help="the host's time limit")
    parser.add_argument("--change", action="store_true", help="let a resumed run take new settings")
    for name, kind in _OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    options = vars(parser.parse_args(arguments))
    chosen = {name: options[name] for name in _OPTIONS if options[name] is not None}
    try:
        if options["processes"] > 1 and "RANK" not in os.environ:
            launch(options["dataset"], options["run"], options["model"], options["processes"], **chosen,
                   max_minutes=options["max_minutes"])  # fmt: skip
            return
        dataset = load_dataset(options["dataset"])
        alone = "RANK" not in os.environ  # several processes would try their updates on one GPU, and plan differently
        plan = plan_run(options["model"], dataset, detect_host(), **chosen, measure=None if alone else False)
        Trainer(plan, dataset, options["run"], [report], change=options["change"],
                max_minutes=options["max_minutes"]).fit()  # fmt: skip
    except UserError as error:
        raise SystemExit(f"UserError: {error}") from None


if __name__ == "__main__":
    main()
