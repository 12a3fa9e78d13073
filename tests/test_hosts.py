"""Colab and Kaggle imitated: their versions, their modules, notebooks by papermill, and nothing of theirs changed.

Slow, and it installs: `pytest -m hosts` runs it, plain `pytest` does not. What is quick about the imitation is tested
always.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOSTS = ROOT / "tests" / "hosts"
sys.path.insert(0, str(HOSTS))

import imitate  # noqa: E402

from f5kit.errors import UserError  # noqa: E402
from f5kit.host import secret  # noqa: E402
from f5kit.places import mount_drive  # noqa: E402


@pytest.mark.hosts
@pytest.mark.parametrize("host", ["colab", "kaggle"])
def test_notebooks_run_there_and_change_nothing(host):
    done = subprocess.run([sys.executable, HOSTS / "imitate.py", host], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " 0 changed" in done.stdout


def test_the_list_is_the_one_that_is_dated():
    versions = imitate.host_versions("colab")
    assert len(versions) > 600
    assert (versions["ipywidgets"], versions["ipython"]) == ("7.7.1", "7.34.0")
    assert versions["torch"] == "2.11.0+cu128" and versions["google-colab"] is None
    assert imitate.host_versions("kaggle")["ipywidgets"] == "8.1.5"
    assert not imitate.ABSENT & versions.keys()
    lacking = {"comm", "papermill", "einx", "jedi", "gitpython", "gitdb", "smmap"}
    assert {imitate.canonical(n) for n in imitate.MET} - versions.keys() == lacking


@pytest.fixture
def colab(monkeypatch, tmp_path):
    """google.colab can be imported, and nothing but COLAB_RELEASE_TAG says that this is Colab."""
    monkeypatch.syspath_prepend(str(HOSTS / "modules"))
    monkeypatch.delenv("KAGGLE_KERNEL_RUN_TYPE", raising=False)
    monkeypatch.delenv("A_SECRET", raising=False)
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")
    google = sys.modules.get("google")  # protobuf's namespace may be there already
    if google is not None:
        monkeypatch.setattr(google, "__path__", [*google.__path__, str(HOSTS / "modules" / "google")])
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("google.colab")]:
        del sys.modules[name]


def test_colabs_userdata_in_all_its_moods(colab, monkeypatch):
    assert secret("A_SECRET") is None  # the page does not answer
    (colab / "stores.json").write_text('{"colab": {"A_SECRET": "  told  ", "CLOSED": null}}')
    monkeypatch.setenv("HOST_SECRETS", str(colab / "stores.json"))
    assert secret("A_SECRET") == "told"
    assert secret("CLOSED") is None and secret("MISSING") is None


def test_a_drive_that_is_refused_is_told(colab, monkeypatch):
    monkeypatch.setenv("HOST_DRIVE", "refused")
    if not Path("/content/drive/MyDrive").is_dir():
        with pytest.raises(UserError, match=r"Google Drive was not mounted \(ValueError\): allow it"):
            mount_drive()
