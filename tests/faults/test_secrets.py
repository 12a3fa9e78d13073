"""F10: canary secrets in every place that f5kit reads secrets from, all notebooks, crashes; then a search of all files.

Environment, Kaggle's store, Colab's store and the file that a login leaves: each holds canaries of its own. The
notebooks publish to a local Hub and log to wandb (offline), so that the secrets are really used.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from hub_server import serve  # noqa: E402

SHORT = {"base_model": "tiny", "updates": 3, "steps": 2, "text": "A short sentence.", "wandb": True}
JUDGED = {"pairs": 1, "newest": 1, "sentences": 2, "others": 2, "recogniser": "pocketsphinx"}
NAMES = ("HF_TOKEN", "WANDB_API_KEY", "HUGGING_FACE_HUB_TOKEN")


def canary(source: str, name: str) -> str:
    """As long as a real token and of its letters, so that nothing rejects it for its shape."""
    return ("hf_" if "WANDB" not in name else "") + f"canary{source}{name.replace('_', '')}".ljust(38, "x")[:38]


def traces(folder: Path, secrets: set[str], spared: set[Path]) -> list[str]:
    """Files below the folder that hold a secret, as text of either width or in base64."""
    forms = {}
    for secret in secrets:
        coded = {base64.b64encode(b"\0" * k + secret.encode())[4:-4] for k in range(3)}  # whatever stands before it
        for form in (secret.encode(), secret.encode("utf-16-le"), *coded):
            forms[form] = secret
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and path not in spared:
            data = path.read_bytes()
            found += [f"{path.relative_to(folder)}: {secret}" for form, secret in forms.items() if form in data]
    return found


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A folder that is home, workspace and temporary folder at once; an environment full of secrets."""
    folder = tmp_path_factory.mktemp("host")
    stores = {store: {name: canary(store, name) for name in NAMES} for store in ("kaggle", "colab")}
    (folder / "stores.json").write_text(json.dumps(stores))
    for name in ("home", "tmp", "hf"):
        (folder / name).mkdir()
    (folder / "hf" / "token").write_text(canary("login", "HF_TOKEN"))
    modules = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "hosts" / "modules")])
    kept = {k: v for k, v in os.environ.items() if k not in (*NAMES, "F5KIT_SOURCE", "HF_HUB_OFFLINE")}
    environment = {
        **kept, "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "HF_HOME": str(folder / "hf"),
        "HOST_SECRETS": str(folder / "stores.json"), "PYTHONPATH": modules, "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "offline", "HF_HUB_DISABLE_XET": "1", "IPYTHONDIR": str(folder / "home" / "ipython"),
    }  # fmt: skip
    secrets = {canary(source, name) for source in ("kaggle", "colab", "env", "login") for name in NAMES}
    return folder, environment, secrets


def road(folder: Path, environment: dict, *arguments: str, **parameters) -> subprocess.CompletedProcess:
    given = [part for name, value in parameters.items() for part in ("-p", name, str(value))]
    program = [sys.executable, str(ROOT / "notebooks/run.py"), "--workspace", str(folder / "workspace")]
    done = subprocess.run([*program, *arguments, *given], capture_output=True, text=True, env=environment, cwd=folder)
    with open(folder / "printed.txt", "a", encoding="utf-8") as file:
        file.write(done.stdout + done.stderr)
    return done


def crash(folder: Path, environment: dict, monkeypatch) -> None:
    """A cell that dies in the middle of a push, with a full traceback in the notebook that papermill leaves."""
    cell = (
        "import pathlib\nfrom f5kit import publish\nfrom f5kit.host import secret\ntoken = secret('HF_TOKEN')\n"
        "assert token\nfolder = next(pathlib.Path('workspace/exports').iterdir())\n"
        "(folder / 'export.json').write_text('{ no JSON')\npublish(folder, 'you/voice', token=token, dry_run=False)\n"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, folder / "crash.ipynb")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    executed = folder / "crashed.ipynb"
    with pytest.raises(papermill.PapermillExecutionError):
        papermill.execute_notebook(folder / "crash.ipynb", executed, cwd=str(folder), progress_bar=False)
    assert "Traceback" in executed.read_text(encoding="utf-8")


def test_no_secret_is_in_any_file(host, recordings, monkeypatch, report):
    folder, environment, secrets = host
    about = {"source": recordings, "consent": "Public domain", **JUDGED, **SHORT}
    with serve(canary("kaggle", "HF_TOKEN")) as hub:
        kaggle = {**environment, "HF_ENDPOINT": hub.endpoint, "KAGGLE_KERNEL_RUN_TYPE": "Batch"}
        kaggle["WANDB_API_KEY"] = canary("env", "WANDB_API_KEY")
        done = road(folder, kaggle, "--only", "00,01,02,04,05", **about)
        assert done.returncode == 0, done.stderr + done.stdout[-2000:]
        done = road(folder, kaggle, "--only", "06", repo_id="you/voice", text=SHORT["text"])
        assert done.returncode == 0, done.stderr + done.stdout[-2000:]
        assert hub.repositories["you/voice"].private  # the secret was found in Kaggle's store and used
        leaked = [n for n, data in hub.repositories["you/voice"].files.items() if b"canary" in data]
        colab = {**environment, "HF_ENDPOINT": hub.endpoint, "COLAB_RELEASE_TAG": "release-colab"}
        refused = road(folder, colab, "--only", "06", repo_id="you/voice", text=SHORT["text"])
        assert refused.returncode == 1 and "401" in refused.stderr  # Colab's token is none that this Hub knows
        named = {**environment, "HF_ENDPOINT": hub.endpoint, **{name: canary("env", name) for name in NAMES}}
        refused = road(folder, named, "--only", "06", repo_id="you/voice", text=SHORT["text"])
        assert refused.returncode == 1 and "401" in refused.stderr
        crash(folder, named, monkeypatch)
    spared = {folder / "stores.json", folder / "hf" / "token"}
    found = traces(folder, secrets, spared)
    assert not found and not leaked, (found, leaked)
    files = sum(path.is_file() for path in folder.rglob("*"))
    assert files > 60  # notebooks, logs, checkpoints, cards, wandb's own files
    leaks = len({line.rpartition(": ")[2] for line in found})
    report("F10", injected=len(secrets), survived=len(secrets) - leaks, silent=leaks)


def test_the_search_finds_what_is_there(tmp_path):
    secret = canary("env", "HF_TOKEN")
    forms = [secret.encode(), secret.encode("utf-16-le"), base64.b64encode(b"a:" + secret.encode())]
    for number, data in enumerate(forms):
        (tmp_path / f"{number}.bin").write_bytes(b"before" + data + b"after")
    assert len({line.split(":")[0] for line in traces(tmp_path, {secret}, set())}) == 3
