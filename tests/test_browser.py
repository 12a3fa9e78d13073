"""The widget demo as a person meets it: notebook 05 in JupyterLab, in a real browser."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update".split()

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def workspace(dataset, tmp_path_factory) -> Path:
    """A run of a tiny model, and notebook 05 set up for it."""
    import papermill.iorw
    import papermill.parameterize

    from f5kit import Trainer, detect_host, plan_run

    root = tmp_path_factory.mktemp("workspace")
    plan = plan_run("tiny", dataset, detect_host("cpu"), updates=2)
    Trainer(plan, dataset, root / "runs" / "my_voice").fit()
    notebook = papermill.iorw.load_notebook_node(str(ROOT / "notebooks" / "05_speak.ipynb"))
    values = {"workspace": str(root), "steps": 4, "text": "Hello from a browser."}
    papermill.iorw.write_ipynb(papermill.parameterize.parameterize_notebook(notebook, values), str(root / "05.ipynb"))
    return root


@pytest.fixture(scope="module")
def lab(workspace):
    """JupyterLab's address, serving the workspace on this machine alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1", "--IdentityProvider.token=",
               "--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
               f"--ServerApp.root_dir={workspace}"]  # fmt: skip
    home = {"JUPYTER_CONFIG_DIR": str(workspace / "config"), "JUPYTERLAB_SETTINGS_DIR": str(workspace / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(workspace / "layouts"), "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT)}  # fmt: skip
    log = open(workspace / "lab.log", "w")  # noqa: SIM115
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *options], env={**os.environ, **home}, stdout=log, stderr=log
    )
    address = f"http://127.0.0.1:{port}/lab/tree/05.ipynb"
    for _ in range(240):
        try:
            urllib.request.urlopen(address, timeout=1)
            break
        except OSError:
            time.sleep(0.5)
    else:
        raise AssertionError((workspace / "lab.log").read_text())
    yield address
    server.terminate()
    server.wait(20)


def test_run_all_then_generate_plays_a_sound(lab, workspace):
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1200, "height": 1400})
        page.set_default_timeout(240_000)  # the kernel imports torch on a busy machine
        page.goto(lab)
        page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
        page.get_by_text("(ipykernel) | Idle").first.wait_for()  # cells run before the kernel is there are forgotten
        page.locator(".lm-MenuBar-item", has_text="Run").click()
        page.locator("[data-command='runmenu:run-all']").click()
        generate = page.get_by_role("button", name="Generate")
        generate.wait_for()
        panel = page.locator(".jupyter-widgets").filter(has=generate).first
        assert panel.locator("audio").count() == 0
        generate.click()
        panel.locator("audio").first.wait_for(state="attached")
        assert (workspace / "sounds" / "my_voice" / "speech_000_seed0.wav").stat().st_size > 1_000

        box = panel.get_by_placeholder("Type what to say.")
        box.fill("Grüße")  # letters that the model's vocabulary lacks
        box.press("Tab")
        generate.click()
        page.get_by_text("lacks 'ü' 'ß'").first.wait_for()
        generate.scroll_into_view_if_needed()
        page.screenshot(path=str(workspace / "panel.png"))
        browser.close()
