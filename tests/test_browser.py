"""The widget demo as a person meets it: notebook 05 in JupyterLab, in a real browser, with ipywidgets 8 and 7.7.1.

The second puts ipywidgets 7.7.1, which Colab has, into a folder of its own before everything else (pip, 2 MB); without
a package index that half is skipped. F5KIT_SCREENSHOTS names a folder to keep pictures of the panel in.
"""

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
import torch

from f5kit.audio import read_audio, write_audio

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update".split()
MICROPHONE = ["--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]
WIDGETS_7 = ("ipywidgets==7.7.1", "jupyterlab-widgets<2", "ipython-genutils")
PATIENCE = 240_000  # milliseconds: the kernel imports torch on a busy machine

# What an <audio> element plays: seconds, and the root mean square of its samples.
LISTEN = """async (audio) => {
  const bytes = await (await fetch(audio.src)).arrayBuffer();
  const sound = await new AudioContext().decodeAudioData(bytes);
  const x = sound.getChannelData(0);
  return [sound.duration, Math.sqrt(x.reduce((sum, v) => sum + v * v, 0) / x.length)];
}"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def workspace(dataset, tmp_path_factory) -> Path:
    """A run of the starter voice, and notebook 05 set up for it."""
    import papermill.iorw
    import papermill.parameterize

    from f5kit import Trainer, detect_host, plan_run

    root = tmp_path_factory.mktemp("workspace")
    plan = plan_run("starter", dataset, detect_host("cpu"), updates=2)
    Trainer(plan, dataset, root / "runs" / "my_voice").fit()
    notebook = papermill.iorw.load_notebook_node(str(ROOT / "notebooks" / "05_speak.ipynb"))
    values = {"workspace": str(root), "steps": 8, "text": "Hello from a browser."}
    papermill.iorw.write_ipynb(papermill.parameterize.parameterize_notebook(notebook, values), str(root / "05.ipynb"))
    clip = dataset.path(min(dataset.clips, key=lambda clip: clip.seconds))
    write_audio(root / "mine.wav", read_audio(clip))
    write_audio(root / "microphone.wav", torch.nn.functional.pad(read_audio(clip), (2_400, 2_400)))
    return root


@pytest.fixture(scope="module", params=["8", pytest.param("7.7.1", marks=pytest.mark.widgets7)])
def lab(request, workspace, tmp_path_factory):
    """JupyterLab's address, serving the workspace on this machine alone, with that version of ipywidgets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1", "--IdentityProvider.token=",
               "--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
               f"--ServerApp.root_dir={workspace}"]  # fmt: skip
    shutil.rmtree(workspace / "sounds", ignore_errors=True)
    paths = [str(ROOT)]
    if request.param != "8":
        older = tmp_path_factory.mktemp("widgets7")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(older), *WIDGETS_7]
        if subprocess.run(pip, capture_output=True).returncode:
            pytest.skip("no package index to take ipywidgets 7.7.1 from")
        paths.insert(0, str(older))
        options.append(f"--LabApp.extra_labextensions_path={older}/share/jupyter/labextensions")
    home = {"JUPYTER_CONFIG_DIR": str(workspace / "config"), "JUPYTERLAB_SETTINGS_DIR": str(workspace / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(workspace / f"layouts{request.param}"), "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(paths)}  # fmt: skip
    log = open(workspace / f"lab{request.param}.log", "w")  # noqa: SIM115
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
        raise AssertionError(Path(log.name).read_text())
    yield address, request.param
    server.terminate()
    server.wait(20)


@pytest.fixture(scope="module")
def page(lab, workspace):
    """The notebook after Run All, with its panel ready."""
    playwright = pytest.importorskip("playwright.sync_api")
    address, _ = lab
    microphone = [*MICROPHONE, f"--use-file-for-fake-audio-capture={workspace / 'microphone.wav'}"]
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS, *microphone])
        page = browser.new_page(viewport={"width": 1200, "height": 1400}, permissions=["microphone"])
        page.set_default_timeout(PATIENCE)
        page.goto(address)
        page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
        page.get_by_text("(ipykernel) | Idle").first.wait_for()  # cells run before the kernel is there are forgotten
        page.locator(".lm-MenuBar-item", has_text="Run").click()
        page.locator("[data-command='runmenu:run-all']").click()
        page.get_by_role("button", name="Generate").wait_for()
        page.get_by_text("speech_seconds").first.wait_for()  # the last cell has run
        if page.get_by_text("notified about official").count():
            page.get_by_role("button", name="No", exact=True).click()
        yield page
        browser.close()


@pytest.fixture
def panel(page):
    """The panel, and what it is to say set back."""
    found = page.locator(".jupyter-widgets").filter(has=page.get_by_role("button", name="Generate")).first
    fill(found.get_by_placeholder("Type what to say."), "Hello from a browser.")
    found.get_by_text("21 characters, all known; about").first.wait_for()  # a click may overtake it
    return found


def fill(box, text: str) -> None:
    """Type into a control, and leave it as a keyboard does."""
    box.fill(text)
    box.press("Tab")


def generate(panel, workspace):
    """Click Generate; the seconds and the level of the take once it can be heard."""
    name = f"speech_{len(list((workspace / 'sounds' / 'my_voice').glob('speech_*'))):03d}"
    panel.get_by_role("button", name="Generate").click()
    panel.get_by_text(f"saved as {name}").first.wait_for()
    return panel.locator(f"audio:has(+ a[download^='{name}'])").first.evaluate(LISTEN)


def upload(panel, page, file) -> None:
    """Choose a file as a person does: ipywidgets keeps its input out of the page."""
    with page.expect_file_chooser() as chooser:
        panel.get_by_role("button", name="Upload").click()
    chooser.value.set_files(str(file))


def test_generate_plays_sound_of_the_expected_length(panel, workspace):
    panel.get_by_text("21 characters, all known; about").first.wait_for()
    seconds, level = generate(panel, workspace)
    assert 0.8 < seconds < 3 and level > 0.001
    panel.locator("img[alt^='Spectrograms of the reference']").wait_for()


def test_wrong_input_is_told_beside_the_control(panel, page):
    fill(panel.get_by_placeholder("Type what to say."), "Grüße")
    panel.get_by_text("vocabulary lacks 'ü' (1 times), 'ß' (1 times)").wait_for()
    panel.get_by_role("button", name="Generate").click()
    panel.get_by_text("lacks 'ü' 'ß'").first.wait_for()


def test_two_takes_are_compared(panel, page, workspace, lab):
    fill(panel.get_by_label("seed"), "1")
    generate(panel, workspace)
    fill(panel.get_by_label("seed"), "2")
    generate(panel, workspace)
    panel.locator("td", has_text="A: ").filter(has_text="seed 0").wait_for()  # A stays, B is the newest
    panel.locator("td", has_text="B: ").filter(has_text="seed 2").wait_for()
    assert panel.locator("table audio").count() == 2
    pictures = os.environ.get("F5KIT_SCREENSHOTS")
    panel.screenshot(path=str(Path(pictures or workspace) / f"panel_ipywidgets_{lab[1]}.png"))


def test_an_uploaded_reference_speaks(panel, page, workspace):
    upload(panel, page, workspace / "mine.wav")
    panel.get_by_text("reference_mine.wav: type what it says").wait_for()
    fill(panel.get_by_placeholder("Empty: it will be transcribed."), "What I said.")
    seconds, level = generate(panel, workspace)
    assert seconds > 0.3 and level > 0.001
    (workspace / "no_sound.wav").write_bytes(b"no sound")
    upload(panel, page, workspace / "no_sound.wav")
    panel.get_by_text("reference_no_sound.wav cannot be read as audio").wait_for()


def test_the_microphone_records_a_reference(panel, page, workspace):
    record = panel.get_by_role("button", name="Record a reference with the microphone")
    record.click()
    panel.get_by_text("recording", exact=True).wait_for()
    page.wait_for_timeout(2500)
    record.click()
    panel.get_by_text("recording_1.wav: type what it says").wait_for()
    recorded = read_audio(workspace / "sounds" / "my_voice" / "recording_1.wav")
    assert len(recorded) > 24_000 and recorded.abs().max() > 0.01
    fill(panel.get_by_placeholder("Empty: it will be transcribed."), "What I said.")
    generate(panel, workspace)


def test_a_long_one_is_cancelled(panel, page):
    fill(panel.get_by_placeholder("Type what to say."), "A long text that is said in many parts. " * 200)
    panel.get_by_role("button", name="Generate").click()
    panel.get_by_text("Speaking ...").wait_for()
    panel.get_by_role("button", name="Cancel").click()
    panel.get_by_text("Cancelled after").wait_for()
    assert panel.get_by_role("button", name="Generate").is_enabled()


def test_every_control_is_reached_by_the_keyboard(panel, page, workspace):
    """From the text on, Tab walks to Generate, and Enter there speaks."""
    count = len(list((workspace / "sounds" / "my_voice").glob("speech_*")))
    panel.get_by_placeholder("Type what to say.").focus()
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent.trim()") == "Generate":
            break
    else:
        raise AssertionError("Tab does not reach Generate")
    page.keyboard.press("Enter")
    panel.get_by_text(f"saved as speech_{count:03d}").first.wait_for()
