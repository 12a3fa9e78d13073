"""The report of a dataset: a page that needs nothing beside it, ticks that the next preparation obeys."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy
import pytest
import soundfile

from f5kit.prepare import prepare_dataset
from f5kit.review import ReviewPanel, dataset_report
from f5kit.text import Tokenizer, english_vocab

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "f5kit" / "demo_voice"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def messy(tmp_path_factory) -> Path:
    """Thirty clips of the demo voice as people send them: some noisy, clipped, quiet, misread, unreadable, doubled."""
    folder = tmp_path_factory.mktemp("messy") / "recordings"
    (folder / "wavs").mkdir(parents=True)
    dice, lines = numpy.random.default_rng(0), (DEMO / "metadata.csv").read_text(encoding="utf-8").splitlines()[:30]
    for n, line in enumerate(lines):
        name, text = line.split("|")
        audio, rate = soundfile.read(DEMO / "wavs" / f"{name}.flac", dtype="float32")
        if n in (3, 4):
            audio = audio + dice.normal(0, 0.05, len(audio)).astype("float32")
        elif n == 7:
            loudest = numpy.quantile(abs(audio), 0.994)
            audio = numpy.clip(audio, -loudest, loudest)
        elif n == 8:
            audio = numpy.clip(audio * 30, -1, 1)
        elif n == 9:
            audio = audio * 0.03
        elif n == 10:
            audio = audio + 0.1
        elif n == 11:
            text = "Too short."
        elif n == 12:
            text = "Thank you. Thank you. Thank you. Thank you."
        elif n == 13:
            text = text.replace("e", "é")
        soundfile.write(folder / "wavs" / f"{name}.wav", audio, rate, subtype="PCM_24")
        lines[n] = f"{name}|{text}|{'Ann' if n % 3 else 'Bob'}"
    (folder / "wavs" / "demo_0020.wav").write_bytes(b"<html>404</html>")
    (folder / "metadata.csv").write_text("\n".join(["name|text|speaker", *lines]), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def dataset(messy):
    out = messy.parent / "voice"
    return prepare_dataset(messy, out, tokenizer=Tokenizer(english_vocab()), language="en", progress=False)


def test_what_is_wrong_is_on_the_page_with_a_player(dataset):
    page = dataset_report(dataset).text
    written = (dataset.folder / "report.html").read_text(encoding="utf-8")
    assert page in written and not re.search(r"(?:src|href)=[\"']https?:", written)  # nothing is fetched
    assert "demo_0020.wav cannot be read as audio" in page and "is clipped for" in page
    for check in ("noise", "level", "pace", "repeats", "letters", "clipping"):
        assert dataset.report["flags"][check] >= 1, check
        section = re.search(rf"<details open><summary>{check}:.*?</details>", page, re.DOTALL)
        assert section and "<audio" in section[0]
    assert set(dataset.report["worst"]["noise"][:2]) == {"demo_0004", "demo_0005"}
    assert "Ann" in page and "Bob" in page and "é" in dataset.report["coverage"]


def test_what_is_unticked_is_left_out_next_time(dataset, messy, tmp_path):
    shutil.copytree(dataset.folder, tmp_path / "voice")
    from f5kit.data import load_dataset

    panel = ReviewPanel(load_dataset(tmp_path / "voice"), page=3)
    panel.check.value = "noise"
    listed = [row["id"] for row in panel.listed()]
    assert set(listed) <= {"demo_0004", "demo_0005"} and len(panel.rows.children) == len(listed)
    assert "<audio" in panel.rows.children[0].children[1].value
    panel.rows.children[0].children[0].value = False
    panel.save()
    assert json.loads((tmp_path / "voice" / "decisions.json").read_text()) == {"drop": [listed[0]]}
    panel.check.value = "all"
    assert len(panel.rows.children) == 3
    panel._turn(3)
    assert panel.listed()[0]["id"] == "demo_0004"
    options = {"tokenizer": Tokenizer(english_vocab()), "language": "en", "name": dataset.name}
    again = prepare_dataset(messy, tmp_path / "voice", progress=False, **options)
    assert listed[0] not in {clip.id for clip in again.clips}
    assert ReviewPanel(again).dropped == {listed[0]}


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
def test_the_page_works_in_a_browser(dataset, tmp_path):
    """Sounds play, ticks make a file. The README's picture is taken here: F5KIT_SCREENSHOT says where it goes."""
    playwright = pytest.importorskip("playwright.sync_api")
    dataset_report(dataset)
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1160, "height": 900})
        page.set_default_timeout(240_000)
        page.goto((dataset.folder / "report.html").as_uri())
        sound = page.locator("audio").first
        loaded = "a.onloadedmetadata = () => done(a.duration); a.onerror = fail; a.load()"
        seconds = sound.evaluate(f"a => new Promise((done, fail) => {{ {loaded} }})")
        assert seconds > 1
        tick = page.locator("details[open] .keep").first
        name = tick.get_attribute("value")
        tick.uncheck()
        link = page.locator(".save")
        assert link.inner_text() == "save decisions.json (1 taken out)"
        with page.expect_download() as download:
            link.click()
        download.value.save_as(tmp_path / "decisions.json")
        assert json.loads((tmp_path / "decisions.json").read_text()) == {"drop": [name]}
        tick.check()
        path = os.environ.get("F5KIT_SCREENSHOT") or str(tmp_path / "report.png")
        page.screenshot(path=path)
        assert Path(path).stat().st_size > 30_000
        browser.close()
