"""Run notebooks in an environment like Colab's or Kaggle's, and see that what the host had is as it was.

    python tests/hosts/imitate.py colab                      notebooks 00, 01, 02 and 05 in a copy of Colab's versions
    python tests/hosts/imitate.py kaggle --only all          all of them, in Kaggle's
    python tests/hosts/imitate.py colab --python /usr/bin/python3.13

A virtual environment gets the host's versions of every package that f5kit or a notebook kernel meets (the dated lists
beside this file), the host's own modules (google.colab, kaggle_secrets) and its environment variables. f5kit comes as a
wheel. The notebooks' install cell does the rest, papermill runs them from outside, and in the end every file of every
package that was there before is compared with what it was.

What the package index of this machine cannot give is replaced or left out, and listed: torch for CUDA above all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LISTS = {"colab": ["colab-2026-08-19.txt"], "kaggle": ["colab-2026-08-19.txt", "kaggle-overlay.txt"]}
MARKS = {"colab": {"COLAB_RELEASE_TAG": "release-colab_20260819"}, "kaggle": {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}}
# Every name that f5kit imports, that its dependencies import, or that a kernel and its widgets are made of.
MET = """
torch torchaudio numpy scipy einops accelerate huggingface_hub hf-xet safetensors soundfile soxr cffi pycparser
PyYAML matplotlib contourpy cycler fonttools kiwisolver packaging pillow pyparsing python-dateutil six tqdm
ipywidgets ipykernel ipython widgetsnbextension jupyterlab_widgets traitlets jedi parso pexpect ptyprocess
pickleshare backcall decorator prompt_toolkit wcwidth Pygments matplotlib-inline jupyter_client jupyter_core
nest-asyncio pyzmq tornado debugpy psutil filelock fsspec sympy mpmath networkx Jinja2 MarkupSafe typing_extensions
httpx httpcore anyio h11 idna certifi sniffio typer click shellingham rich markdown-it-py mdurl requests urllib3
charset-normalizer regex wandb protobuf platformdirs pydantic pydantic_core annotated-types typing-inspection sentry-sdk
GitPython gitdb smmap einx frozendict setuptools entrypoints ipython-genutils tensorboard tensorboard-data-server
grpcio absl-py Markdown Werkzeug comm papermill datasets pyarrow pandas pytz tzdata tokenizers multiprocess dill xxhash
aiohttp aiosignal aiohappyeyeballs frozenlist multidict propcache yarl attrs flatbuffers
""".split()
ABSENT = {"bitsandbytes", "vocos", "x-transformers", "torchdiffeq", "f5kit"}  # what the hosts lack and f5kit brings


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def host_versions(host: str) -> dict[str, str | None]:
    """{canonical name: version} of the host's list; None for what did not come from the package index."""
    versions: dict[str, str | None] = {}
    for name in LISTS[host]:
        for line in (HERE / name).read_text(encoding="utf-8").splitlines():
            if found := re.match(r"([A-Za-z0-9._-]+)(?:==(\S+)| @ )", line):
                versions[canonical(found[1])] = found[2]
    return versions


def run(*command, **options) -> subprocess.CompletedProcess:
    return subprocess.run([str(part) for part in command], text=True, **options)


def preinstall(python: Path, host: str) -> list[str]:
    """Put the host's versions into the environment. Returns what is not as on the host, a line each."""
    versions, differing = host_versions(host), []
    assert not ABSENT & versions.keys(), f"the list has {ABSENT & versions.keys()}: take them out of ABSENT"
    lines = []
    for name in MET:
        version = versions.get(canonical(name))
        if version is None:
            differing.append(f"{name}: not in the list of this host")
        elif canonical(name) in ("torch", "torchaudio"):
            differing.append(f"{name}: {version} there; here the build that this machine's index has")
        else:
            lines.append(f"{name}=={version}")
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    torch = [line.split(" ;")[0] for line in pinned if re.match(r"torch(audio)?==", line)]
    quiet = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    run(*quiet, torch[0], check=True)  # with what its build needs: for some Pythons the index has one for CUDA alone
    quiet = (*quiet, "--no-deps")
    for line in [*torch[1:], *lines]:
        done = run(*quiet, line, capture_output=True)
        if done.returncode:  # no wheel for this Python: the newest that there is
            name = line.split("==")[0]
            again = run(*quiet, "--only-binary", ":all:", name, capture_output=True)
            differing.append(f"{line}: {'another version' if again.returncode == 0 else 'nothing'} for this Python")
    return differing


def site(python: Path) -> Path:
    told = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", capture_output=True)
    return Path(told.stdout.strip())


def snapshot(folder: Path) -> dict[str, str]:
    """sha256 of every file that a package has installed, compiled Python aside."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            files[path.relative_to(folder).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return files


def build_wheel(folder: Path) -> Path:
    """f5kit as a wheel."""
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT, check=True)
    return next(folder.glob("f5kit-*.whl"))


def write_kernel(folder: Path, python: Path) -> None:
    """A kernel named python3 that is the environment's, for the papermill of this one."""
    spec = folder / "kernels" / "python3"
    spec.mkdir(parents=True, exist_ok=True)
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))


def walk(host: str, folder: Path, wheel: Path, only: str, parameters: dict) -> float:
    """Run the notebooks by notebooks/run.py in the imitated host. Returns the exit status."""
    given = [part for name, value in parameters.items() for part in ("-p", name, str(value))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("COLAB_", "KAGGLE_"))}
    environment |= {**MARKS[host], "JUPYTER_PATH": str(folder), "WANDB_MODE": "disabled"}
    environment |= {"F5KIT_SOURCE": str(wheel), "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "HOME": str(folder / "home")}
    (folder / "home").mkdir(exist_ok=True)
    program = (sys.executable, copy_notebooks(folder) / "run.py", "--workspace", folder / "workspace", "--only", only)
    return run(*program, *given, env=environment, cwd=folder).returncode


def copy_notebooks(folder: Path) -> Path:
    """The notebooks without the clone around them: there the install cell would take the clone's code."""
    target = folder / "notebooks"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for file in [*(ROOT / "notebooks").glob("*.ipynb"), ROOT / "notebooks" / "run.py"]:
        shutil.copy(file, target)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("host", choices=LISTS)
    parser.add_argument("--python", default=sys.executable, help="the interpreter; Colab's is 3.13")
    parser.add_argument("--folder", help="where to work; .venv-<host> beside the sources by default, and kept")
    parser.add_argument("--only", default="00,01,02,05", help="the notebooks; 'all' for all of them")
    options = parser.parse_args()
    folder = Path(options.folder or ROOT / f".venv-{options.host}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "env" / "bin" / "python"
    if not (folder / "differing.json").is_file():
        run(options.python, "-m", "venv", "--clear", folder / "env", check=True)
        differing = preinstall(python, options.host)
        modules = HERE / "modules"
        kept = "google" if options.host == "colab" else "kaggle_secrets.py"
        if options.host == "colab":
            shutil.copytree(modules / kept, site(python) / kept, dirs_exist_ok=True)
        else:
            shutil.copy(modules / kept, site(python))
        (folder / "differing.json").write_text(json.dumps(differing, indent=1))
        (folder / "before.json").write_text(json.dumps(snapshot(site(python))))
    for line in json.loads((folder / "differing.json").read_text()):
        print(f"not as on the host: {line}")
    run(python, "-m", "pip", "uninstall", "-q", "-y", "f5kit", capture_output=True)  # of an earlier walk
    shutil.rmtree(folder / "workspace", ignore_errors=True)
    wheel = build_wheel(folder / "wheel")
    write_kernel(folder, python)
    names = [path.name[:2] for path in sorted((ROOT / "notebooks").glob("*.ipynb")) if not path.name.startswith("03")]
    only = ",".join(names) if options.only == "all" else options.only
    given = {"source": "demo", "consent": "Public domain", "base_model": "tiny", "updates": 4, "steps": 4}
    given["text"] = "A short sentence."
    status = walk(options.host, folder, wheel, only, given)
    before, after = json.loads((folder / "before.json").read_text()), snapshot(site(python))
    changed = sorted(name for name, digest in before.items() if after.get(name) != digest)
    changed = [name for name in changed if not name.startswith("f5kit")]
    added = sorted({name.split("/")[0] for name in after.keys() - before.keys() if name.count("/")})
    print(f"{options.host}: notebooks {only} {'ran' if status == 0 else 'FAILED'}; {len(before)} files of preinstalled")
    print(f"packages, {len(changed)} changed {changed[:5]}; added: {', '.join(a for a in added if 'dist-info' in a)}")
    return 1 if status or changed else 0


if __name__ == "__main__":
    sys.exit(main())
