"""What a notebook shows: sounds with players, tables, and figures of losses and mels.

All of it is HTML and PNG, so it needs no widgets. Nothing here changes the matplotlib backend.
"""

from __future__ import annotations

import base64
import html
import io
import re
import statistics
from pathlib import Path

from f5kit.provenance import tag

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
    with soundfile.SoundFile(data, "w", int(rate), 1, format=kind) as file:
        tag(file, getattr(sound, "provenance", None))  # a player's sound can be kept, too
        file.write(audio)
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


def latency_figure(latency: dict[int, list[float]]) -> Picture:
    """Seconds of answers by how many callers asked at once, {callers: seconds of each answer}, and their medians."""
    figure, (axis,) = _axes(6, 3)
    crowds = list(latency)
    for crowd, seconds in latency.items():
        axis.plot([crowd] * len(seconds), seconds, "o", color="tab:blue", alpha=0.5)
    axis.plot(crowds, [statistics.median(latency[crowd]) for crowd in crowds], color="tab:orange", label="median")
    axis.set(xlabel="callers at once", ylabel="seconds to the whole answer", xticks=crowds, ylim=(0, None))
    axis.legend()
    return Picture(figure)


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
