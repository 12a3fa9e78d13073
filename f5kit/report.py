"""What the judge found: figures with their intervals, as data, as a table that can be listened to, and as a picture."""

from __future__ import annotations

import html
import json
from pathlib import Path

import numpy
from torch import Tensor

from f5kit.audio import player, write_audio
from f5kit.provenance import Provenance
from f5kit.scores import SpeakerScale, interval

RATE = 24_000  # Hz, of every sound in a report
RECORDINGS = "recordings"  # the system that the others are measured by

MEASURES = {
    "wer": "word errors per word",
    "wer_ratio": "word errors over those of the recordings",
    "cer": "character errors per character",
    "decoys": "share of sentences that win among decoys",
    "similarity": "speaker similarity: others 0, recordings 1",
    "mcd": "mel-cepstral distance to the recording, dB",
    "duration_error": "error of the length, as a share of it",
    "dnsmos": "predicted quality (DNSMOS), 1 to 5",
}
"""What is measured of each system, in the report's order."""

class Report:
    """What the judge found. Shows itself as a table and players in a notebook."""

    def __init__(
        self, sentences: list[str], sounds: dict[str, list[Tensor]], rows: list[dict], about: dict,
        scale: SpeakerScale | None = None,
    ):  # fmt: skip
        self.sentences = sentences
        self.sounds = sounds
        """{system: (nw,) at 24 kHz for each sentence}."""
        self.rows = rows
        """One dict for each system and sentence: text, what was heard, counts and scores (None where there is none)."""
        self.about = about
        """Settings, the recogniser and why it is this one, and notes on what could not be measured."""
        self.summary: dict[str, dict[str, dict | None]] = _summarise(rows, scale, about["seed"])
        """{system: {measure: {"value", "low", "high", "sentences"} or None}}, low to high the 95 % interval."""

    def __repr__(self) -> str:
        return f"Report({len(self.sounds)} systems, {len(self.sentences)} sentences, {self.about['recogniser']})"

    def to_dict(self) -> dict:
        """All but the sounds, as plain data."""
        return {"about": self.about, "measures": MEASURES, "summary": self.summary, "sentences": self.rows}

    def save(self, folder: str | Path) -> Path:
        """Write report.json, and the sounds as sounds/SYSTEM_NUMBER.wav. Returns the folder."""
        folder = Path(folder)
        for system, sounds in self.sounds.items():
            for number, audio in enumerate(sounds, 1):
                told = Provenance(None if system == RECORDINGS else True, "" if system == RECORDINGS else system)
                write_audio(folder / "sounds" / f"{_file_name(system)}_{number:03d}.wav", audio, RATE, told)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        return folder

    def table(self) -> list[dict[str, str]]:
        """The summary, a dict of short strings for each system: "0.12 (0.08 to 0.17)"."""
        used = [m for m in MEASURES if any(figures[m] for figures in self.summary.values())]
        return [
            {"system": system, **{m.replace("_", " "): _written(figures[m]) for m in used}}
            for system, figures in self.summary.items()
        ]

    def merit(self, system: str) -> float:
        """One number to choose a system by: its similarity, at most 1, less the word errors beyond the recordings'.

        Errors per word weigh as much as the way from another speaker to the right one. Where no similarity was
        measured the errors alone count.
        """
        figures = self.summary[system]
        base = self.summary.get(RECORDINGS, figures)["wer"]["value"]
        similarity = min(figures["similarity"]["value"], 1.0) if figures["similarity"] else 0.0
        return similarity - max(0.0, figures["wer"]["value"] - base)

    def figure(self):
        """Bars with intervals: errors, decoys, similarity and distance of every system. A matplotlib Figure."""
        from matplotlib.figure import Figure

        titles = {"wer": "word errors per word", "decoys": "wins among decoys", "similarity": "speaker similarity",
                  "mcd": "mel-cepstral distance, dB"}  # fmt: skip
        shown = [m for m in titles if any(figures[m] for figures in self.summary.values())]
        figure = Figure(figsize=(2.6 * len(shown) + 2, 0.35 * len(self.summary) + 0.8), layout="constrained")
        for axes, measure in zip(figure.subplots(1, len(shown), sharey=True, squeeze=False)[0], shown, strict=True):
            for place, (system, figures) in enumerate(self.summary.items()):
                if found := figures[measure]:
                    value, color = found["value"], "tab:green" if system == RECORDINGS else "tab:blue"
                    ends = [[max(value - found["low"], 0)], [max(found["high"] - value, 0)]]
                    axes.barh(place, value, xerr=ends, color=color, capsize=3)
            axes.set_title(titles[measure], fontsize=9)
            axes.set_yticks(range(len(self.summary)), list(self.summary), fontsize=8)
        axes.invert_yaxis()
        return figure

    def _repr_html_(self, shown: int = 3) -> str:
        rows = self.table()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
        body = ["".join(f"<td>{html.escape(value)}</td>" for value in row.values()) for row in rows]
        notes = "".join(f"<br>{html.escape(note)}" for note in self.about["notes"])
        return (
            f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in body)}</table>"
            f"<p>{len(self.sentences)} sentences, 95 % intervals; heard by {html.escape(self.about['recogniser'])}."
            f"{notes}</p>{self.listen(shown)}"
        )

    def listen(self, shown: int = 3) -> str:
        """HTML: the first sentences as every system says them, each with a player and what was heard in it."""
        heard = {(row["system"], row["number"]): row["heard"] for row in self.rows}
        lines = []
        for number, sentence in enumerate(self.sentences[:shown], 1):
            lines.append(f'<tr><th colspan="3" style="text-align:left">{html.escape(sentence)}</th></tr>')
            for system, sounds in self.sounds.items():
                words = html.escape(heard[system, number] or "nothing")
                play = player(sounds[number - 1], RATE, "MP3")
                lines.append(f"<tr><td>{html.escape(system)}</td><td>{play}</td><td><i>{words}</i></td></tr>")
        return f"<table>{''.join(lines)}</table>"


# ---- From rows to figures


def _summarise(rows: list[dict], scale: SpeakerScale | None, seed: int) -> dict:
    """Every measure of every system, with its interval."""
    by_system: dict[str, list[dict]] = {}
    for row in rows:
        by_system.setdefault(row["system"], []).append(row)
    recorded = by_system.get(RECORDINGS)
    return {system: _figures(own, recorded, scale, seed) for system, own in by_system.items()}


def _figures(rows: list[dict], recorded: list[dict] | None, scale: SpeakerScale | None, seed: int) -> dict:
    def share(counts, of):
        return counts.sum(-1) / of.sum(-1)

    def mean(values):
        return values.mean(-1)

    figures = dict.fromkeys(MEASURES)
    figures["wer"] = _figure(share, seed, _column(rows, "word_errors"), _column(rows, "words"))
    figures["cer"] = _figure(share, seed, _column(rows, "character_errors"), _column(rows, "characters"))
    figures["decoys"] = _figure(mean, seed, _column(rows, "decoy_won"))
    figures["mcd"] = _figure(mean, seed, _column(rows, "mcd"))
    figures["duration_error"] = _figure(mean, seed, numpy.abs(_column(rows, "duration_error")))
    figures["dnsmos"] = _figure(mean, seed, _column(rows, "dnsmos"))
    if recorded:  # in pairs: the same sentences of the system and of the recordings
        figures["wer_ratio"] = _figure(share, seed, _column(rows, "word_errors"), _column(recorded, "word_errors"))
    if recorded and scale:
        figures["similarity"] = _figure(scale.scaled, seed, _column(rows, "cosine"), _column(recorded, "cosine"))
    return figures


def _column(rows: list[dict], key: str) -> numpy.ndarray:
    return numpy.array([numpy.nan if row[key] is None else float(row[key]) for row in rows])


def _figure(statistic, seed: int, *columns: numpy.ndarray) -> dict | None:
    """A value with its interval over the sentences that have one; None where there is none.

    A ratio to recordings that were understood without an error is no number: None. In draws where only they come to
    that, it is beyond every bound: "high" is None.
    """
    there = ~numpy.isnan(numpy.stack(columns)).any(0)
    if not there.any():
        return None
    columns = tuple(column[there] for column in columns)
    with numpy.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(*columns))
    if not numpy.isfinite(value):
        return None
    low, high = (round(end, 4) if numpy.isfinite(end) else None for end in interval(statistic, *columns, seed=seed))
    return {"value": round(value, 4), "low": low, "high": high, "sentences": int(there.sum())}


# ---- Small things


def _written(figure: dict | None) -> str:
    if figure is None:
        return ""
    low, high = ("?" if figure[end] is None else f"{figure[end]:.2f}" for end in ("low", "high"))
    return f"{figure['value']:.2f} ({low} to {high})"


def _file_name(system: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in system)
