"""What a notebook shows: training progress, sounds side by side, figures, a speaking panel, a blind test.

All of it is HTML, PNG and the ipywidgets that versions 7.7 (Colab) and 8 share. Nothing here opens a port or
changes the matplotlib backend. Whatever a button does is a method, so tests press it without a browser.
"""

from __future__ import annotations

import base64
import html
import io
import math
import os
import random
import re
import time
from dataclasses import replace
from pathlib import Path

from f5kit.errors import UserError
from f5kit.inference import LONGEST_REFERENCE, read_reference

SILENCE = -11.5  # log(1e-5), the floor of a log-mel

# ---- HTML and sounds


class Html:
    """A piece of HTML that a notebook shows when it ends a cell."""

    def __init__(self, text: str):
        self.text = text

    def _repr_html_(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", self.text)).split())


class Picture:
    """A matplotlib figure that a notebook shows whether or not pyplot was ever imported; `save` writes it."""

    def __init__(self, figure):
        self.figure = figure

    def __repr__(self) -> str:
        return "a picture"

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        self.figure.savefig(data, format="png", dpi=100, bbox_inches="tight")
        return data.getvalue()

    def save(self, path) -> Path:
        """Write a PNG and return its path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self._repr_png_())
        return path


def _encode(sound) -> tuple[bytes, str]:
    """Bytes and MIME type of a Speech, a path, or an (audio, sample rate) pair. Long sounds become MP3."""
    import soundfile

    if isinstance(sound, str | Path):
        audio, rate = soundfile.read(str(sound), dtype="float32")
    else:
        audio, rate = sound if isinstance(sound, tuple) else (sound.audio, sound.sample_rate)
        audio = getattr(audio, "numpy", lambda: audio)()
    kind = "WAV" if len(audio) <= 30 * rate else "MP3"
    data = io.BytesIO()
    soundfile.write(data, audio, rate, format=kind)
    return data.getvalue(), "audio/wav" if kind == "WAV" else "audio/mpeg"


def audio_html(sound, download: str | None = None) -> str:
    """An HTML player with the sound inside it; with a file name in `download`, a link to keep it as well."""
    data, mime = _encode(sound)
    url = f"data:{mime};base64,{base64.b64encode(data).decode()}"
    link = f' <a download="{html.escape(download)}" href="{url}">download</a>' if download else ""
    return f'<audio controls preload="auto" src="{url}"></audio>{link}'


def players(sounds: dict, columns: int = 2) -> Html:
    """Players side by side. `sounds` maps a caption to a Speech, a path, or an (audio, sample rate) pair."""
    cells = [
        f'<td style="text-align:left">{html.escape(str(caption))}<br>{audio_html(sound)}</td>'
        for caption, sound in sounds.items()
    ]
    rows = [f"<tr>{''.join(cells[i : i + columns])}</tr>" for i in range(0, len(cells), columns)]
    return Html(f"<table>{''.join(rows)}</table>" if rows else "<p>No sounds to play.</p>")


def table(rows: list[dict] | dict) -> Html:
    """A table of rows that share their keys, or of one dict's names and values."""
    if isinstance(rows, dict):
        rows = [{"": name, " ": value} for name, value in rows.items()]
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [_line("th", names)] + [_line("td", [row.get(name, "") for name in names]) for row in rows]
    return Html(f"<table>{''.join(lines)}</table>")


def _line(tag: str, values: list) -> str:
    cells = (f'<{tag} style="text-align:left">{html.escape(_short(value))}</{tag}>' for value in values)
    return f"<tr>{''.join(cells)}</tr>"


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---- Figures


def _axes(width: float, height: float, rows: int = 1):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height * rows), layout="constrained")
    return figure, figure.subplots(rows, 1, squeeze=False)[:, 0]


def loss_figure(events: list[dict], updates: int | None = None) -> Picture:
    """The losses of a run over its updates, from the events of a run folder.

    Training losses are faint, with their running mean: they differ from update to update in clips and noise.
    Held-out losses are points, each taken on the same clips with the same noise.
    """
    figure, (axes,) = _axes(8, 3.2)
    # A resumed run repeats the updates since its last checkpoint: the later event of an update counts.
    trained = {e["update"]: e["loss"] for e in events if e["event"] == "update"}
    judged = {e["update"]: e for e in events if e["event"] == "evaluate"}
    if trained:
        x, y = list(trained), list(trained.values())
        axes.plot(x, y, color="tab:blue", alpha=0.25, linewidth=1)
        axes.plot(x, _running_mean(y, max(1, len(y) // 30)), color="tab:blue", label="training")
    for key, color, label in (("loss_raw", "tab:orange", "held out, raw"), ("loss_ema", "tab:green", "EMA")):
        points = [(update, e[key]) for update, e in judged.items() if e.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=color, label=label, markersize=4)
    axes.set(xlabel="update", ylabel="loss", xlim=(0, updates) if updates else None)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    return Picture(figure)


def _running_mean(values, width: int) -> list[float]:
    """The mean of each value and up to `width` values before it."""
    spans = (values[max(0, i - width) : i + 1] for i in range(len(values)))
    return [sum(span) / len(span) for span in spans]


def mel_figure(mels: dict, seconds_per_frame: float = 256 / 24_000) -> Picture:
    """Log-mel spectrograms, each (n, 100), one above the other on one time axis and one colour scale."""
    figure, rows = _axes(8, 2.0, len(mels))
    pictures = {caption: mel.detach().cpu().float().numpy().T for caption, mel in mels.items()}
    loudest = max(float(picture.max()) for picture in pictures.values())
    longest = max(p.shape[1] for p in pictures.values()) * seconds_per_frame
    for axes, (caption, picture) in zip(rows, pictures.items(), strict=True):
        extent = (0, picture.shape[1] * seconds_per_frame, 0, picture.shape[0])
        axes.imshow(picture, origin="lower", aspect="auto", extent=extent, vmin=SILENCE, vmax=loudest)
        axes.set(title=caption, ylabel="mel bin", xlim=(0, longest))
    rows[-1].set_xlabel("seconds")
    return Picture(figure)


# ---- Progress while training


def is_live() -> bool:
    """Whether someone may be watching: in a notebook kernel, unless F5KIT_PROGRESS=plain asks for lines."""
    if os.environ.get("F5KIT_PROGRESS") == "plain":
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


class LiveProgress:
    """A trainer callback that shows how far a run is: bar and curve in a notebook, else a line now and then.

    `samples` is a SampleCallback that stands earlier in the list: its newest sounds get players.
    `every_seconds` is the time between two refreshes (default 2 in a notebook, 10 for lines).
    """

    def __init__(self, samples=None, every_seconds: float | None = None, live: bool | None = None):
        self.live, self.samples = is_live() if live is None else live, samples
        self.every_seconds = every_seconds or (2.0 if self.live else 10.0)
        self.events: list[dict] = []
        self.updates = 0  # of the whole run
        self._shown_at = self._curve_at = -math.inf
        self._curve = ""
        self._handles: dict = {}

    def __call__(self, event: dict, trainer) -> None:
        if event["event"] == "start":
            self.updates = trainer.plan.train.updates
            self._started, self._from = time.monotonic(), event["update"]
        self.events.append(event)
        telling = event["event"] in ("start", "evaluate", "skip", "end")
        if telling or time.monotonic() - self._shown_at >= self.every_seconds:
            self._shown_at = time.monotonic()
            self._show("progress", self._picture()) if self.live else print(self.line(), flush=True)
        if event["event"] == "save" and self.live and self.samples:
            at = f"update {event['update']}"
            self._show("sounds", players({f"{at}, {k}": v for k, v in self.samples.latest.items()}).text)

    def line(self) -> str:
        """One line of text: update, loss, held-out loss, speed, minutes left, and what happened last."""
        last = self.events[-1]
        update, parts = last["update"], [f"update {last['update']}/{self.updates}"]
        recent = [e for e in self.events[-400:] if e["event"] == "update"][-20:]
        if recent:
            parts.append(f"loss {sum(e['loss'] for e in recent) / len(recent):.3f}")
            frames, seconds = (sum(e.get(key, 0) for e in recent) for key in ("frames", "seconds"))
            parts += [f"{frames / seconds:,.0f} frames/s"] if seconds else []
        if last["event"] == "evaluate":
            judged = {"raw": last.get("loss_raw"), "EMA": last.get("loss_ema")}
            parts += [f"held out {name} {loss:.4f}" for name, loss in judged.items() if loss is not None]
        elif last["event"] == "skip":
            parts.append(f"skipped a batch: {last['reason']}")
        left = (self.updates - update) * (time.monotonic() - self._started) / max(1, update - self._from)
        if last["event"] != "end" and update > self._from:
            parts.append(f"{left / 60:.1f} min left")
        return ", ".join(parts)

    def _picture(self) -> str:
        if time.monotonic() - self._curve_at > 5 * self.every_seconds or self.events[-1]["event"] == "end":
            png = loss_figure(self.events, self.updates)._repr_png_()
            self._curve = f'<br><img src="data:image/png;base64,{base64.b64encode(png).decode()}">'
            self._curve_at = time.monotonic()
        update = self.events[-1]["update"]
        bar = f'<progress max="{self.updates}" value="{update}" style="width:60%"></progress>'
        return f"{bar}<br>{html.escape(self.line())}{self._curve}"

    def _show(self, place: str, text: str) -> None:
        """Put HTML into a display of its own, which later calls for the same place replace."""
        from IPython.display import HTML, display

        if place in self._handles:
            self._handles[place].update(HTML(text))
        else:
            self._handles[place] = display(HTML(text), display_id=True)


# ---- A panel to speak with


class SpeakPanel:
    """A form with a Generate button, a player and a download link, for a loaded Voice.

    Every sentence is also written to `folder`. The reference is the one the voice was loaded with, a clip of
    `dataset`, or an uploaded recording. The widgets are attributes; `generate` is what the button does.
    """

    def __init__(self, voice, folder: str | Path = ".", dataset=None):
        import ipywidgets as w

        wide, self.voice, self.folder, self.files = w.Layout(width="95%"), voice, Path(folder), []
        self._own = own = voice.reference
        clips = [clip for clip in dataset.clips if clip.seconds <= LONGEST_REFERENCE] if dataset else []
        self._references = {f"{own.name} (as loaded)": (None, own.text)}  # label -> (path, text)
        self._references |= {clip.id: (dataset.path(clip), clip.text) for clip in clips}
        self.reference = w.Dropdown(options=list(self._references), description="reference")
        self.upload = w.FileUpload(accept="audio/*", multiple=False, description="own recording")
        self.reference_text = w.Textarea(value=own.text, description="it says", layout=wide)
        self.reference.observe(self._show_text, "value")
        self.upload.observe(self._take_upload, "value")
        self.text = w.Textarea(placeholder="Type what to say.", description="text", layout=wide)
        self.speed = w.FloatSlider(value=1.0, min=0.5, max=2.0, step=0.05, description="speed")
        self.steps = w.IntSlider(value=32, min=4, max=64, description="steps")
        self.guidance = w.FloatSlider(value=2.0, min=0.0, max=5.0, step=0.1, description="guidance")
        self.seed = w.IntText(value=0, description="seed")
        self.button = w.Button(description="Generate", button_style="primary")
        self.status, self.sound = w.HTML(), w.HTML()
        self.button.on_click(self.generate)
        rows = [w.HBox([self.reference, self.upload]), self.reference_text, self.text]
        rows += [w.HBox([self.speed, self.steps]), w.HBox([self.guidance, self.seed])]
        self.box = w.VBox([*rows, self.button, self.status, self.sound])

    def _show_text(self, change) -> None:
        self.reference_text.value = self._references[change["new"]][1]

    def _take_upload(self, change) -> None:
        """Write an uploaded recording to the folder and choose it; its words are for the user to type."""
        files = change["new"]
        if not files:
            return
        if isinstance(files, dict):  # ipywidgets 7: {name: {"content": ...}}; 8: ({"name", "content"},)
            files = [{"name": name, **file} for name, file in files.items()]
        path = self.folder / f"reference_{Path(files[0]['name']).name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(files[0]["content"]))
        self._references[path.name] = (path, "")
        self.reference.options = list(self._references)
        self.reference.value = path.name

    def generate(self, _button=None) -> None:
        """Speak what the form says; a fault becomes a sentence under the button."""
        if self.button.disabled:
            return
        self.button.disabled = True
        self.status.value = "Speaking ..."
        try:
            speech = self._speak()
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"speech_{len(self.files):03d}_seed{self.seed.value}.wav"
            self.files.append(speech.save(path))
            self.sound.value = audio_html(speech, download=path.name)
            seconds = len(speech.audio) / speech.sample_rate
            self.status.value = html.escape(f"{seconds:.1f} s of sound, saved as {path}")
        except UserError as error:
            self.status.value = f"<b>{html.escape(str(error))}</b>"
        except Exception as error:  # shown here, because the traceback of a callback is lost on Colab
            self.status.value = f"<b>{html.escape(f'{type(error).__name__}: {error}')}</b>"
        finally:
            self.button.disabled = False

    def _speak(self):
        path, text = self._references[self.reference.value][0], self.reference_text.value.strip()
        if not text:
            raise UserError("the reference needs its words: type what the recording says")
        own = replace(self._own, text=text)
        self.voice.reference = read_reference(path, text, self.voice.model) if path else own
        return self.voice.speak(
            self.text.value, speed=self.speed.value, steps=self.steps.value, cfg_strength=self.guidance.value,
            seed=self.seed.value, progress=False,
        )  # fmt: skip

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.box)


# ---- A blind comparison


class BlindAB:
    """Compare two voices without knowing which is which.

    `pairs` holds dicts of two sounds by name, the same names in each. Pairs and sides are shuffled by `seed`.
    `vote` is what the buttons do; `summary` names the voices at the end.
    """

    def __init__(self, pairs: list[dict], seed: int = 0):
        import ipywidgets as w

        names = [tuple(sorted(pair)) for pair in pairs]
        if not pairs or len(set(names)) != 1 or len(names[0]) != 2:
            raise UserError(f"blind_ab needs pairs of the same two names; these have {sorted(set(names))}")
        dice = random.Random(seed)
        self.names, self.pairs = names[0], dice.sample(pairs, len(pairs))
        self.sides = [dice.sample(self.names, 2) for _ in pairs]
        self.votes: list[str | None] = []  # the preferred name, None for no difference
        self.status, self.sounds = w.HTML(), w.HTML()
        self.buttons = [w.Button(description=text) for text in ("First", "Second", "No difference")]
        for choice, button in enumerate(self.buttons):
            button.on_click(lambda _button, choice=choice: self.vote(choice))
        self.box = w.VBox([self.status, self.sounds, w.HBox(self.buttons)])
        self._show()

    def vote(self, choice: int) -> None:
        """Prefer the first (0) or second (1) sound of the pair on show, or neither (2)."""
        if len(self.votes) == len(self.pairs):
            return
        self.votes.append([*self.sides[len(self.votes)], None][choice])
        self._show()

    def summary(self) -> str:
        """How often each was preferred, and how often chance alone would prefer one side as clearly."""
        counts = {name: self.votes.count(name) for name in self.names}
        n, most = sum(counts.values()), max(counts.values())
        by_chance = sum(math.comb(n, k) for k in range(n + 1) if max(k, n - k) >= most) / 2**n
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        none = self.votes.count(None)
        return f"{told}, no difference {none}; chance alone is as clear in {by_chance:.0%} of such tests"

    def _show(self) -> None:
        done = len(self.votes)
        if done == len(self.pairs):
            self.status.value, self.sounds.value = html.escape(self.summary()), ""
        else:
            self.status.value = f"Pair {done + 1} of {len(self.pairs)}: which do you prefer?"
            sounds = [self.pairs[done][name] for name in self.sides[done]]
            self.sounds.value = players(dict(zip(("First", "Second"), sounds, strict=True))).text
        for button in self.buttons:
            button.disabled = done == len(self.pairs)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.box)


live_progress, speak_panel, blind_ab = LiveProgress, SpeakPanel, BlindAB  # as notebooks call them
