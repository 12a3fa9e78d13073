"""The notebook widgets, pressed without a browser."""

from __future__ import annotations

import base64
import html
import io
import re
from types import SimpleNamespace

import pytest
import soundfile
import torch

from f5kit.checkpoint import load_model
from f5kit.errors import UserError
from f5kit.inference import Voice
from f5kit.widgets import (
    blind_ab,
    live_progress,
    loss_figure,
    mel_figure,
    players,
    speak_panel,
    table,
)

PNG = b"\x89PNG"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tiny():
    """A voice with fresh weights: it speaks noise, at once."""
    return Voice.load("tiny", vocoder="griffin-lim", device="cpu")


@pytest.fixture
def panel(tiny, tmp_path):
    panel = speak_panel(Voice(tiny.model, tiny.reference, tiny.vocoder), tmp_path / "sounds")
    panel.text.value, panel.steps.value, panel.speed.value = "Hello there.", 4, 2.0
    return panel


def press(panel):
    """Click Generate and wait for what comes of it; returns the status as it reads."""
    panel.button.click()
    panel.wait(120)
    return panel.status.value


def tone(seconds: float = 0.5):
    return 0.1 * torch.sin(torch.arange(int(24_000 * seconds)) / 20), 24_000


def events(updates: int = 40):
    yield {"event": "start", "update": 0}
    for update in range(1, updates + 1):
        yield {"event": "update", "update": update, "loss": 1 / update, "frames": 900, "seconds": 0.01}
        if update % 10 == 0:
            yield {"event": "evaluate", "update": update, "loss_raw": 1.5 / update, "loss_ema": 2 / update}
    yield {"event": "end", "update": updates}


def trainer(updates: int = 40):
    return SimpleNamespace(plan=SimpleNamespace(train=SimpleNamespace(updates=updates)))


def sounds_in(text: str) -> list[bytes]:
    return [base64.b64decode(data) for data in re.findall(r"<audio[^>]*base64,([^\"]+)\"", text)]


def test_players_hold_the_sound_itself_and_escape_captions(tmp_path):
    audio, rate = tone()
    soundfile.write(tmp_path / "a.flac", audio.numpy(), rate)
    speech = SimpleNamespace(audio=audio, sample_rate=rate)
    shown = players({"<a>": tmp_path / "a.flac", "b": (audio, rate), "c": speech})._repr_html_()
    assert "&lt;a&gt;" in shown and "<a>" not in shown
    assert [data[:4] for data in sounds_in(shown)] == [b"RIFF"] * 3
    assert soundfile.info(io.BytesIO(sounds_in(shown)[0])).frames == len(audio)


def test_long_sounds_are_compressed():
    (data,) = sounds_in(players({"long": tone(31)}).text)
    assert len(data) < 31 * 24_000 * 2 / 4


def test_table_takes_rows_and_dicts_and_escapes():
    shown = table([{"a": 1, "b": "<x>"}, {"a": 0.123456}]).text
    assert "&lt;x&gt;" in shown and "0.1235" in shown and shown.count("<tr>") == 3
    assert repr(table([{"a": 1, "b": "<x>"}])) == "a b 1 <x>"  # where no HTML is shown
    assert "free" in table({"free": 2}).text


def test_figures_are_pictures_and_touch_no_backend(tmp_path):
    import matplotlib

    before = matplotlib.get_backend()
    picture = loss_figure(list(events()))
    assert picture._repr_png_()[:4] == PNG
    assert len(picture.figure.axes[0].lines) == 4  # losses, their mean, held out raw and EMA
    assert picture.save(tmp_path / "plots" / "loss.png").stat().st_size > 5_000
    assert mel_figure({"a": torch.randn(50, 100), "b": torch.randn(90, 100)})._repr_png_()[:4] == PNG
    assert loss_figure([])._repr_png_()[:4] == PNG
    assert matplotlib.get_backend() == before


def test_progress_without_a_display_is_a_few_lines(capsys):
    progress = live_progress(every_seconds=1000)  # outside a notebook: lines
    for event in events(1000):
        progress(event, trainer(1000))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 100 + 1  # start, held-out losses, end: an update alone makes no line
    assert lines[1].startswith("update 10/1000, loss ")
    assert "held out raw 0.1500, held out EMA 0.2000" in lines[1]
    assert "min left" in lines[1] and "min left" not in lines[-1]
    assert "90,000 frames/s" in lines[1]


def test_progress_in_a_notebook_updates_one_display(monkeypatch):
    shown = []
    handle = SimpleNamespace(update=lambda value: shown.append(value.data))
    display = lambda value, display_id: shown.append(value.data) or handle  # noqa: E731
    monkeypatch.setattr("IPython.display.display", display)
    progress = live_progress(every_seconds=1000, live=True)
    for event in events():
        progress(event, trainer())
    assert len(shown) == 1 + 4 + 1
    assert '<progress max="40" value="40"' in shown[-1] and "data:image/png" in shown[-1]


def test_progress_names_skipped_batches(capsys):
    progress = live_progress(every_seconds=1000)
    progress({"event": "start", "update": 3}, trainer())
    progress({"event": "skip", "update": 3, "step": 5, "reason": "loss is nan", "clips": ["a"]}, trainer())
    assert "skipped a batch: loss is nan" in capsys.readouterr().out


def test_panel_speaks_saves_and_offers_the_file(panel):
    panel.seed.value = 7
    told = press(panel)
    (path,) = panel.files
    speech = panel.voice.speak("Hello there.", speed=2.0, steps=4, seed=7, progress=False)
    assert soundfile.info(path).frames == len(speech.audio) and path.name == "speech_000_seed7.wav"
    assert f'download="{path.name}"' in panel.sound.value and sounds_in(panel.sound.value)
    assert f"{speech.seconds:.1f} s of sound" in told and str(path.parent.parent) not in told
    assert not panel.button.disabled and panel.stop.disabled
    assert panel.bar.value == panel.bar.max == 4
    assert f'<img alt="Spectrograms of the reference and of {path.name}"' in panel.picture.value
    panel.format.value = "flac"
    press(panel)
    assert panel.files[1].suffix == ".flac" and soundfile.info(panel.files[1]).format == "FLAC"


def test_what_was_typed_last_is_said_though_the_click_came_first(panel, monkeypatch):
    """The text arrives while the panel lets its controls settle."""
    monkeypatch.setattr("f5kit.panel.time.sleep", lambda seconds: setattr(panel.text, "value", "Typed last."))
    press(panel)
    assert list(panel.takes) == ["1: Typed last. (as loaded, seed 0)"]


def test_panel_tells_what_is_typed(panel):
    panel.text.value = "Some words to say. " * 60
    assert "1140 characters, all known; about" in panel.text_note.value and "parts" in panel.text_note.value
    panel.text.value = "\u017elu\u0165 \u0165"
    assert "lacks '\u0165' (2 times), '\u017e' (1 times)" in html.unescape(panel.text_note.value)
    assert 'role="alert"' in panel.text_note.value
    panel.text.value = "x" * 20_001
    assert "20,001 characters; one take holds 20,000" in panel.text_note.value
    panel.text.value = ""
    assert panel.text_note.value == ""


def test_panel_shows_faults_as_a_sentence(panel):
    panel.text.value = ""
    assert "the text is empty: write what the voice should say" in press(panel)
    panel.text.value = "\u017elu\u0165"
    assert "vocabulary" in press(panel) and "Traceback" not in panel.status.value
    panel.reference_text.value = " "
    assert "the reference needs its words" in press(panel)
    assert not panel.button.disabled and not panel.files


def test_panel_cancels_within_a_step(panel):
    panel.steps.max = 1000
    panel.steps.value = 1000
    panel.button.click()
    assert panel.button.disabled and not panel.stop.disabled
    panel.generate()  # does nothing while it speaks
    panel.stop.click()
    panel.wait(60)
    assert "Cancelled after" in panel.status.value and "of 1000 steps" in panel.status.value
    assert not panel.button.disabled and panel.stop.disabled and not panel.files


def test_two_takes_side_by_side(panel):
    press(panel)
    assert panel.history.layout.display == "none"
    panel.seed.value = 1
    press(panel)
    assert panel.history.layout.display == "" and len(sounds_in(panel.pair.value)) == 2
    assert "seed 0" in panel.first.value and "seed 1" in panel.second.value
    panel.first.value = panel.second.value
    assert len(set(sounds_in(panel.pair.value))) == 1
    panel.seed.value = 2
    press(panel)
    assert "seed 2" in panel.second.value and "seed 1" in panel.first.value


def test_panel_speaks_with_chosen_weights(panel, tiny, tmp_path):
    from f5kit.checkpoint import export_model

    model = load_model("tiny")
    with torch.no_grad():
        model.transformer.proj_out.bias.fill_(0.5)
    export_model(model, tmp_path / "other", torch.float32)
    own = speak_panel(panel.voice, tmp_path / "more", weights={"update_2 raw": (tmp_path / "other", "raw")})
    own.text.value, own.steps.value = "Hello there.", 4
    press(own)
    own.weights.value = "update_2 raw"
    # changed while it speaks, which moves the bar
    own.bar.observe(lambda change: change["new"] and setattr(own.weights, "value", "as loaded"), "value")
    press(own)
    assert list(own.takes)[-1] == "2: Hello there. (update_2 raw, seed 0)"
    own.bar.unobserve_all()
    own.weights.value = "update_2 raw"
    assert own.voice is not panel.voice and len(own.files) == 2, own.status.value
    first, second = (soundfile.read(path)[0] for path in own.files)
    assert len(first) == len(second) and (first != second).any()


@pytest.mark.parametrize("version", [7, 8])
def test_panel_takes_an_uploaded_reference(panel, version, tmp_path):
    audio, rate = tone(2)
    soundfile.write(tmp_path / "mine.wav", audio.numpy(), rate)
    content = (tmp_path / "mine.wav").read_bytes()
    file = {"name": "mine.wav", "content": memoryview(content)}
    uploads = {7: {"mine.wav": {"content": content}}, 8: (file,)}
    panel._take_upload({"new": uploads[version]})
    assert panel.reference.value == "reference_mine.wav" and panel.reference_text.value == ""
    panel.reference_text.value = "Mine."
    press(panel)
    assert len(panel.files) == 1, panel.status.value
    panel.reference.value = panel.reference.options[0]
    assert panel.reference_text.value.startswith("Alice")
    press(panel)
    assert len(panel.files) == 2
    panel._take_upload({"new": {"noise.wav": {"content": b"no sound"}}})
    assert "noise.wav cannot be read as audio" in panel.reference_note.value
    assert panel.reference.value != "reference_noise.wav"


def test_panel_takes_a_recording(panel, tmp_path):
    audio, rate = tone(2)
    soundfile.write(tmp_path / "mine.wav", audio.numpy(), rate)
    panel.recorder.wav = base64.b64encode((tmp_path / "mine.wav").read_bytes()).decode()
    assert panel.reference.value == "recording_1.wav"
    assert soundfile.info(panel.folder / "recording_1.wav").frames == len(audio)


def test_panel_keeps_to_what_ipywidgets_7_has(panel):
    """Version 7.7.1 has fewer widgets, and no `tooltip` but on buttons."""
    import ipywidgets

    kinds = {type(widget).__name__ for widget in vars(panel).values() if isinstance(widget, ipywidgets.Widget)}
    assert kinds <= {"Dropdown", "FileUpload", "Textarea", "FloatSlider", "IntSlider", "IntText", "Button", "HTML",
                     "IntProgress", "HBox", "VBox", "Recorder"}  # fmt: skip
    for name in ("reference", "upload", "reference_text", "text", "speed", "steps", "guidance", "seed", "weights",
                 "format", "button", "stop", "bar", "first", "second"):  # fmt: skip
        assert getattr(panel, name).description, f"{name} has no label"


def test_blind_comparison_hides_counts_and_reveals():
    pairs = [{"older": tone(0.1 + i / 10), "tuned": tone(0.15 + i / 10)} for i in range(6)]
    test = blind_ab(pairs, seed=3)
    while len(test.votes) < 6:
        assert "older" not in test.status.value + test.sounds.value
        assert len(sounds_in(test.sounds.value)) == 2
        test.buttons[test.sides[len(test.votes)].index("tuned")].click()
    assert test.votes == ["tuned"] * 6
    told = "older 0, tuned 6, no difference 0; chance alone is as clear in 3% of such tests"
    assert test.status.value == told
    assert all(button.disabled for button in test.buttons)
    assert len({tuple(side) for side in test.sides}) == 2  # neither voice is always the first
    with pytest.raises(UserError, match="same two names"):
        blind_ab([{"a": tone()}])
