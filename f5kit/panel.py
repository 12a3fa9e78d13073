"""The speaking panel: a reference, a text and settings in, takes to hear, compare and keep out.

It holds to what ipywidgets 7.7 and 8 share. A take is made in a thread of its own, so that Cancel is heard. Every
control has a label and is reached by the keyboard; what is wrong with an input is said beside it.
"""

from __future__ import annotations

import base64
import html
import threading
import time
from dataclasses import replace
from pathlib import Path

from f5kit.checkpoint import WEIGHTS, RunFolder, load_model
from f5kit.errors import UserError
from f5kit.inference import Voice
from f5kit.reference import LONGEST_REFERENCE, read_reference, read_sound
from f5kit.show import audio_html, mel_figure, players
from f5kit.speech import LONGEST_TEXT, Cancelled, Speech
from f5kit.text import coverage

FORMATS = ("wav", "flac", "mp3")
AS_LOADED = "as loaded"
# Seconds between a click and the reading of the controls: the page keeps back what is typed while an earlier change is
# still being worked on, and a click overtakes it.
SETTLING = 0.3


def run_weights(run: str | Path | RunFolder) -> dict[str, tuple[Path, str]]:
    """{label: (checkpoint folder, "raw" or "ema")} of a run, the newest first: the panel's choice of weights."""
    run = run if isinstance(run, RunFolder) else RunFolder(run)
    return {
        f"{checkpoint.name} {weights}": (checkpoint.path, weights)
        for checkpoint in reversed(run.checkpoints())
        for weights, file in WEIGHTS.items()
        if (checkpoint.path / file).is_file()
    }


class SpeakPanel:
    """A form around a loaded Voice. Every take is also written to `folder`.

    The reference is the one the voice was loaded with, a clip of `dataset`, an upload or a recording of the microphone.
    `weights` maps labels to (source, "raw" or "ema"), as `run_weights` makes them. The widgets are attributes;
    `generate`, `cancel` and `wait` are what the buttons do and what a caller without a browser needs.
    """

    def __init__(self, voice: Voice, folder: str | Path = ".", dataset=None, weights: dict | None = None):
        self.folder, self.files, self.takes = Path(folder), [], {}
        self._voices = {AS_LOADED: voice}  # label -> Voice, of the one in use and the one that was loaded
        self._sources, self._own = dict(weights or {}), voice.reference
        clips = [clip for clip in dataset.clips if clip.seconds <= LONGEST_REFERENCE] if dataset else []
        self._references = {f"{self._own.name} ({AS_LOADED})": (None, self._own.text)}  # label -> (path, text)
        self._references |= {clip.id: (dataset.path(clip), clip.text) for clip in clips}
        self._stop, self._thread = threading.Event(), None
        self._make_inputs()
        self._make_outputs()
        self._show_coverage()

    # ---- The widgets

    def _make_inputs(self) -> None:
        import ipywidgets as w

        wide = w.Layout(width="95%")
        self.reference = w.Dropdown(options=list(self._references), description="reference")
        self.upload = w.FileUpload(accept="audio/*", multiple=False, description="Upload")
        self.reference_text = w.Textarea(value=self._own.text, description="it says", layout=wide,
                                         placeholder="Empty: it will be transcribed.")  # fmt: skip
        self.reference_note, self.text_note = w.HTML(), w.HTML()
        self.text = w.Textarea(placeholder="Type what to say.", description="text", layout=wide)
        self.speed = w.FloatSlider(value=1.0, min=0.5, max=2.0, step=0.05, description="speed")
        self.steps = w.IntSlider(value=32, min=4, max=64, description="steps")
        self.guidance = w.FloatSlider(value=2.0, min=0.0, max=5.0, step=0.1, description="guidance")
        self.seed = w.IntText(value=0, description="seed")
        self.weights = w.Dropdown(options=[AS_LOADED, *self._sources], description="weights")
        self.format = w.Dropdown(options=FORMATS, description="save as")
        self.reference.observe(self._show_words, "value")
        self.upload.observe(self._take_upload, "value")
        self.text.observe(lambda change: self._show_coverage(), "value")
        try:
            from f5kit.recorder import make_recorder

            self.recorder = make_recorder(LONGEST_REFERENCE)
            self.recorder.observe(self._take_recording, "wav")
        except UserError as error:
            self.recorder = w.HTML(_note(error))

    def _make_outputs(self) -> None:
        import ipywidgets as w

        self.button = w.Button(description="Generate", button_style="primary")
        self.stop = w.Button(description="Cancel", disabled=True)
        self.bar = w.IntProgress(value=0, min=0, max=1, description="progress")
        self.status, self.sound, self.picture, self.pair = w.HTML(), w.HTML(), w.HTML(), w.HTML()
        self.first, self.second = (w.Dropdown(options=[], description=name) for name in ("take A", "take B"))
        self.button.on_click(self.generate)
        self.stop.on_click(self.cancel)
        for choice in (self.first, self.second):
            choice.observe(lambda change: self._show_pair(), "value")
        self.history = w.VBox([w.HBox([self.first, self.second]), self.pair])
        self.history.layout.display = "none"
        rows = [w.HBox([self.reference, self.upload, self.recorder]), self.reference_text, self.reference_note]
        rows += [self.text, self.text_note, w.HBox([self.speed, self.steps]), w.HBox([self.guidance, self.seed])]
        rows += [w.HBox([self.weights, self.format]), w.HBox([self.button, self.stop, self.bar])]
        self.box = w.VBox([*rows, self.status, self.sound, self.picture, self.history])

    # ---- Inputs

    @property
    def voice(self) -> Voice:
        """The voice of the chosen weights."""
        return self._voices.get(self.weights.value, self._voices[AS_LOADED])

    def _show_words(self, change) -> None:
        self.reference_text.value = self._references[change["new"]][1]
        self.reference_note.value = ""

    def _show_coverage(self) -> None:
        """Below the text: how much it is, or what stands against it."""
        text, tokenizer = self.text.value, self.voice.model.tokenizer
        if not text.strip():
            self.text_note.value = ""
            return
        if len(text) > LONGEST_TEXT:
            self.text_note.value = _note(f"{len(text):,} characters; one take holds {LONGEST_TEXT:,}")
            return
        lacking = coverage([text], tokenizer)
        if lacking:
            listed = ", ".join(f"{token!r} ({missing.count} times)" for token, missing in list(lacking.items())[:10])
            self.text_note.value = _note(f"the model's vocabulary lacks {listed}: write the text without them")
            return
        try:
            plan = self.voice.plan(text, speed=self.speed.value)
        except UserError as error:
            self.text_note.value = _note(error)
            return
        seconds = sum(length for _, length in plan)
        parts = f" in {len(plan)} parts" if len(plan) > 1 else ""
        self.text_note.value = f"{len(text)} characters, all known; about {seconds:.1f} s of speech{parts}"

    def _take_upload(self, change) -> None:
        """Keep an uploaded recording and choose it."""
        files = change["new"]
        if not files:
            return
        # ipywidgets 7 gives {name: {"content": ...}}, 8 gives ({"name": ..., "content": ...},)
        name, file = next(iter(files.items())) if isinstance(files, dict) else (files[0]["name"], files[0])
        self._keep_reference(f"reference_{Path(name).name}", bytes(file["content"]))

    def _take_recording(self, change) -> None:
        from f5kit.recorder import recorded

        if change["new"]:
            count = sum(label.startswith("recording_") for label in self._references)
            self._keep_reference(f"recording_{count + 1}.wav", recorded(change["new"]))

    def _keep_reference(self, name: str, content: bytes) -> None:
        """Write a recording to the folder and choose it; its words are for the user to type, or for a recogniser."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / name
        path.write_bytes(content)
        try:
            read_sound(path, self.voice.model.config.mel.sample_rate)
        except UserError as error:
            self.reference_note.value = _note(error)
            return
        self._references[name] = (path, "")
        self.reference.options = list(self._references)
        self.reference.value = name
        self.reference_text.value = ""
        self.reference_note.value = html.escape(f"{name}: type what it says, or leave that to a recogniser")

    # ---- Making a take

    def generate(self, _button=None) -> None:
        """Speak the text in a thread; `wait` waits for it. A second call while it speaks does nothing."""
        if self.button.disabled:
            return
        self.button.disabled, self.stop.disabled = True, False
        self._stop = threading.Event()
        self.bar.value, self.bar.max = 0, 1
        self.status.value = _told("Speaking ...")
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def cancel(self, _button=None) -> None:
        """Stop the take that is being made."""
        self._stop.set()
        self.stop.disabled = True

    def wait(self, seconds: float | None = None) -> None:
        """Until the take is made, or was cancelled or refused."""
        if self._thread:
            self._thread.join(seconds)

    def _work(self) -> None:
        time.sleep(SETTLING)
        started, weights = time.monotonic(), self.weights.value
        try:
            voice = self._prepare()
            speech = voice.speak(
                self.text.value, speed=self.speed.value, steps=self.steps.value, cfg_strength=self.guidance.value,
                seed=self.seed.value, progress=self._show_progress, cancel=self._stop,
            )  # fmt: skip
            self._show_take(voice, speech, weights, time.monotonic() - started)
        except Cancelled as error:
            self.status.value = _told(f"{str(error).capitalize()}.")
        except UserError as error:
            self.status.value = _note(error)
        except Exception as error:  # shown here, because the traceback of a thread is lost in a notebook
            self.status.value = _note(f"{type(error).__name__}: {error}")
        finally:
            self.button.disabled, self.stop.disabled = False, True

    def _prepare(self) -> Voice:
        """The voice with the chosen weights and reference. Raises UserError for what can't serve."""
        label = self.weights.value
        if label not in self._voices:
            self.status.value = _told(f"Loading {html.escape(label)} ...")
            loaded, (source, weights) = self._voices[AS_LOADED], self._sources[label]
            model = load_model(source, weights=weights, device=loaded.model.device.type)
            fresh = Voice(model, self._own, loaded.vocoder, loaded.precision, loaded.pace)
            self._voices = {AS_LOADED: loaded, label: fresh}
        path, words = self._references[self.reference.value][0], self.reference_text.value.strip()
        if path is None:
            if not words:
                raise UserError("the reference needs its words: type what the recording says")
            self.voice.model.tokenizer.encode(words)
            return self.voice.with_reference(replace(self._own, text=words))
        reference = read_reference(path, words, self.voice.model)
        if reference.note:
            self.reference_text.value = reference.text
            self.reference_note.value = html.escape(reference.note)
        return self.voice.with_reference(reference)

    def _show_progress(self, done: int, total: int) -> None:
        self.bar.max = total
        if done == total or done - self.bar.value >= total / 100:  # not a message for every step of many
            self.bar.value = done

    def _show_take(self, voice: Voice, speech: Speech, weights: str, seconds: float) -> None:
        """Save a take, play and draw it, and put it into the history."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"speech_{len(self.files):03d}_seed{speech.seed}.{self.format.value}"
        self.files.append(speech.save(path))
        self.sound.value = audio_html(speech, download=path.name)
        png = mel_figure({"reference": voice.reference.mel, "speech": speech.mel})._repr_png_()
        shown = f"Spectrograms of the reference and of {path.name}"
        source = f"data:image/png;base64,{_text(png)}"
        self.picture.value = f'<img alt="{html.escape(shown)}" style="max-width:100%" src="{source}">'
        notes = [f"{chunk.text.strip()[:30]}: {note}" for chunk in speech.chunks for note in chunk.notes]
        told = f"{speech.seconds:.1f} s of sound, made in {seconds:.1f} s, saved as {path.name} in {self.folder.name}"
        self.status.value = _told(html.escape("; ".join([told, *notes])))
        label = f"{len(self.takes) + 1}: {speech.text[:30]} ({weights}, seed {speech.seed})"
        self.takes[label] = path
        self._show_history()

    def _show_history(self) -> None:
        """Both choices hold all takes; by default A is the one before the last, and B the last."""
        labels = list(self.takes)
        kept = self.first.value if len(labels) > 2 else labels[max(0, len(labels) - 2)]
        for choice, value in ((self.first, kept), (self.second, labels[-1])):
            choice.options = labels
            choice.value = value
        self.history.layout.display = "" if len(labels) > 1 else "none"
        self._show_pair()

    def _show_pair(self) -> None:
        chosen = [("A", self.first.value), ("B", self.second.value)]
        if all(label in self.takes for _, label in chosen) and len(self.takes) > 1:
            self.pair.value = players({f"{side}: {label}": self.takes[label] for side, label in chosen}).text

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.box)


def _note(message) -> str:
    """What is wrong, beside the control; read out by screen readers."""
    return f'<b role="alert">{html.escape(str(message))}</b>'


def _told(text: str) -> str:
    return f'<span role="status">{text}</span>'


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
