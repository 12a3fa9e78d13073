"""Run the notebooks one after the other with papermill, and gather what they found.

    python notebooks/run.py --demo                               all, offline, on the bundled recordings
    python notebooks/run.py -p source recordings/ -p voice anna  your own; 02 trains, 03 is left out
    python notebooks/run.py --only 02,05 -p run_name slow -p learning_rate 5e-6

From an installed wheel: python -m f5kit.notebooks.run, with the same options.

Everything lands in the workspace (f5kit_workspace, or runs/demo for the demo): the executed notebooks in
notebooks/, and what all stages and runs reported in result.json. Started again, it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
import time
from pathlib import Path

import papermill
from nbclient.exceptions import DeadKernelError

HERE = Path(__file__).resolve().parent
CLONE = HERE.parent if (HERE.parent / "pyproject.toml").is_file() else None  # None in an installed wheel
NAMES = sorted(path.stem for path in HERE.glob("[0-9][0-9]_*.ipynb"))
UNATTENDED = [name for name in NAMES if not name.startswith("03")]  # 03 is 02 for another kind of GPU
OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}


class Stream:
    """A file for the notebooks' printed lines: set in from the left, so that stages stand out."""

    def __init__(self):
        self.at_start = True

    def write(self, text: str) -> None:
        for line in text.splitlines(keepends=True):
            print(("    " if self.at_start else "") + line, end="")
            self.at_start = line.endswith("\n")

    def flush(self) -> None:
        sys.stdout.flush()


def read_value(text: str):
    """A parameter from the command line: a Python literal when it reads as one, else the text."""
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        return text


def chosen(only: str | None, demo: bool) -> list[str]:
    """The notebooks to run, in order. `only` is "02,05": the starts of their names."""
    if not only:
        return NAMES if demo else UNATTENDED
    starts = [start.strip() for start in only.split(",") if start.strip()]
    unknown = [start for start in starts if not any(name.startswith(start) for name in NAMES)]
    if unknown:
        raise SystemExit(f"--only: no notebook starts with {unknown[0]!r}; there are {', '.join(NAMES)}")
    return [name for name in NAMES if any(name.startswith(start) for start in starts)]


def known_parameters(names: list[str]) -> dict[str, set[str]]:
    """The parameters that each notebook's form has."""
    return {name: set(papermill.inspect_notebook(str(HERE / f"{name}.ipynb"))) for name in names}


def check_parameters(given: dict, known: dict[str, set[str]]) -> None:
    """Papermill only warns of a name no notebook has, and the run then ignores what was asked."""
    for name in given:
        if not any(name in own for own in known.values()):
            there = sorted(set().union(*known.values()))
            raise SystemExit(f"-p {name}: none of {', '.join(known)} has it; there are {', '.join(there)}")


def run_stage(name: str, workspace: Path, values: dict) -> float:
    """Execute one notebook and return its seconds. A failing cell ends the program with its own sentence."""
    executed = workspace / "notebooks" / f"{name}.ipynb"
    executed.parent.mkdir(parents=True, exist_ok=True)
    print(f"{name}", flush=True)
    started = time.monotonic()
    try:
        papermill.execute_notebook(
            str(HERE / f"{name}.ipynb"), str(executed), values, kernel_name="python3", cwd=str(HERE),
            progress_bar=False, stdout_file=Stream(), extra_arguments=["--log-level=CRITICAL"],
        )  # fmt: skip
    except papermill.PapermillExecutionError as error:
        said = error.evalue if error.ename == "UserError" else f"{error.ename}: {error.evalue}"
        raise SystemExit(f"{name} stopped: {said}\n(the cell is in {executed})") from None
    except DeadKernelError:
        raise SystemExit(f"{name} stopped: its kernel died, most often for want of memory") from None
    seconds = time.monotonic() - started
    print(f"{name}: {seconds:.0f} s", flush=True)
    return seconds


def read_results(folder: Path) -> list[dict]:
    """The result.json of every folder in `folder`."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*/result.json"))]


def gather(workspace: Path, seconds: dict[str, float]) -> dict:
    """Everything the stages reported, as one dict; also written to workspace/result.json."""
    path = workspace / "result.json"
    before = json.loads(path.read_text(encoding="utf-8"))["seconds"] if path.is_file() else {}
    found, runs = read_results(workspace / "results"), read_results(workspace / "runs")
    setup = next((r for r in found if r["notebook"] == "00_setup"), {})
    result = {
        "host": setup.get("host"),
        "versions": setup.get("versions"),
        "seconds": {**before, **{name: round(value, 1) for name, value in seconds.items()}},
        "losses": {r["run"]: r["losses"] for r in runs},
        "sounds": [sound for r in (*found, *runs) for sound in r.get("sounds", [])],
        "runs": {r["run"]: r for r in runs},
        "stages": {r["notebook"]: r for r in found},
    }
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def farewell(workspace: Path, result: dict) -> None:
    """Three lines: what to listen to, what to look at, what to open next."""
    spoken = result["stages"].get("05_speak", {}).get("sounds") or result["sounds"][-1:]
    plots = sorted(str(p) for p in workspace.glob("plots/*.png"))
    print(f"Listen to {', '.join(spoken) or 'nothing yet: no stage made a sound'}")
    print(f"Look at {', '.join(plots) or 'nothing yet: no stage drew a plot'}")
    print(f"Read {workspace / 'result.json'} for all figures, and the notebooks as executed beside it")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demo", action="store_true", help="offline, bundled recordings, in runs/demo")
    parser.add_argument("--only", metavar="02,05", help="these notebooks alone")
    parser.add_argument("--workspace", help="the folder all stages read and write")
    parser.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    options = parser.parse_args(arguments)
    names = chosen(options.only, options.demo)
    known = known_parameters(names)
    given = {name: read_value(value) for name, value in options.p}
    check_parameters(given, known)
    usual = (CLONE or Path.cwd()) / "runs" / "demo" if options.demo else "f5kit_workspace"
    workspace = Path(options.workspace or usual).resolve()
    os.environ.update({"F5KIT_PROGRESS": "plain", **(OFFLINE if options.demo else {})})
    if not os.environ.get("F5KIT_SOURCE"):  # kernels take the code that lies beside these notebooks
        places = [str(CLONE or HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    seconds = {}
    for name in names:
        values = {"workspace": str(workspace), "demo": options.demo} | given
        if options.demo and name.startswith("03"):  # a few updates, in a run folder of its own
            usual = given.get("run_name") or given.get("voice", "my_voice")
            values |= {"run_name": f"{usual}_a100", "updates": 2}
        seconds[name] = run_stage(name, workspace, {key: values[key] for key in known[name] & values.keys()})
    farewell(workspace, gather(workspace, seconds))


if __name__ == "__main__":
    main()
