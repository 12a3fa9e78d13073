"""What preparation found, in numbers and in one figure: report.json and report.png."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path

from f5kit.audit import CHECKS
from f5kit.journal import Journal, measure
from f5kit.text import coverage
from f5kit.verdicts import TextOptions, usual_pace

_USED = "status != 'rejected'"
_LEVELS = ("peak", "rms_dbfs", "clipped", "leading", "trailing", "snr", "bandwidth", "pause")


def summarise(journal: Journal, texts: TextOptions, how: str) -> dict:
    """Counts, spreads and histograms over all clips; levels are those of the recordings as they came."""
    value = journal.value
    status = dict(tuple(row) for row in journal.all("SELECT status, count(*) FROM clips GROUP BY status"))
    seconds = value(f"SELECT sum(seconds) FROM clips WHERE {_USED}")
    report = {"seen": sum(status.values())} | {k: status.get(k, 0) for k in ("accepted", "repaired", "rejected")}
    for name in ("train", "heldout"):
        report[name] = value("SELECT count(*) FROM clips WHERE split = ?", name)
    report |= {
        "split": how,
        "seconds": round(seconds, 3),
        "recorded_seconds": round(value("SELECT total(seconds) FROM inputs"), 3),
    }
    report["durations"] = _spread(journal, "seconds")
    report["duration_histogram"] = _histogram(journal, "seconds", 1.0)
    report["text_lengths"] = _spread(journal, "length(text)")
    report["characters"], report["coverage"] = _characters(journal, texts)
    report["levels"] = {name: _spread(journal, measure(name)) for name in _LEVELS}
    report["level_histogram"] = _histogram(journal, measure("rms_dbfs"), 1.0)
    report["snr_histogram"] = _histogram(journal, measure("snr"), 2.0)
    middle, far = usual_pace(journal)
    odd = journal.all(
        f"SELECT id, pace FROM clips WHERE {_USED} AND abs(pace - {middle!r}) > {far!r} ORDER BY id LIMIT 1000"
    )
    report["characters_per_second"] = _spread(journal, "pace") | {
        "outliers": {r["id"]: round(r["pace"], 2) for r in odd}
    }
    report["pace_histogram"] = _histogram(journal, "pace", 1.0)
    report["speakers"] = {
        row[0] or "": round(row[1] / 60, 3)
        for row in journal.all(
            f"SELECT speaker, sum(clips.seconds) AS s FROM clips JOIN inputs i ON i.id = input WHERE {_USED} "
            "GROUP BY speaker ORDER BY s DESC LIMIT 1000"
        )
    }
    found = journal.all(f"SELECT key, count(*) FROM clips, json_each(flags) WHERE {_USED} GROUP BY key")
    report["flags"] = dict(tuple(row) for row in found)
    report["worst"] = _worst(journal, middle)
    mean, square = journal.base.execute(
        f"SELECT sum({measure('mel_sum')}) / sum({measure('mel_count')}), sum({measure('mel_square')}) / "
        f"sum({measure('mel_count')}) FROM clips WHERE split = 'train'"
    ).fetchone()
    report["mel_mean"], report["mel_std"] = round(mean, 6), round((square - mean**2) ** 0.5, 6)
    return report


def _spread(journal: Journal, expression: str) -> dict[str, float]:
    """The least, the middle and the greatest."""
    least, most = journal.base.execute(
        f"SELECT min({expression}), max({expression}) FROM clips WHERE {_USED}"
    ).fetchone()
    return {"min": round(least, 4), "median": round(journal.median(expression), 4), "max": round(most, 4)}


def _histogram(journal: Journal, expression: str, step: float) -> dict[str, list]:
    """Clips between edges that are `step` apart."""
    place = f"CAST(({expression}) / {step} + 10000 AS INTEGER) - 10000"  # CAST cuts towards zero
    counts = {
        row[0]: row[1] for row in journal.all(f"SELECT {place} AS p, count(*) FROM clips WHERE {_USED} GROUP BY p")
    }
    places = range(min(counts), max(counts) + 1)
    return {"edges": [p * step for p in [*places, places.stop]], "clips": [counts.get(p, 0) for p in places]}


def _characters(journal: Journal, texts: TextOptions) -> tuple[dict[str, int], dict[str, dict]]:
    """How often each character is written, and what the tokenizer lacks of them."""
    counts: Counter = Counter()
    for row in journal.all(f"SELECT text FROM clips WHERE {_USED}"):
        counts.update(row["text"])
    lacking: dict[str, dict] = {}
    if texts.tokenizer is not None:
        used = (row["text"] for row in journal.all(f"SELECT text FROM clips WHERE {_USED}"))
        missing = coverage(used, texts.tokenizer)
        lacking = {token: {"count": m.count, "examples": list(m.examples)} for token, m in missing.items()}
    return dict(counts.most_common()), lacking


def _worst(journal: Journal, pace: float) -> dict[str, list[str]]:
    """The ten clips that each check ranks worst; of those that only flag, the ones that are flagged."""
    level = journal.median(measure("rms_dbfs"))
    worst = {}
    for name, check in CHECKS.items():
        rank, where = check.rank, _USED
        if rank in ("{flag}", "{cer}"):
            rank = "cer" if rank == "{cer}" else "length(text)"
            where += f" AND json_extract(flags, '$.\"{name}\"') IS NOT NULL"
        else:
            for key in _LEVELS + ("offset",):
                rank = rank.replace(f"{{{key}}}", measure(key))
            rank = rank.replace("{median_rms}", repr(level)).replace("{median_pace}", repr(pace))
        rows = journal.all(f"SELECT id, {rank} AS r FROM clips WHERE {where} ORDER BY r DESC, id LIMIT 10")
        nothing = name == "clipping"  # most clips have none of it
        worst[name] = [row["id"] for row in rows if row["r"] is not None and not (nothing and row["r"] <= 0)]
    return worst


def draw_summary(path: Path, report: dict) -> None:
    """Durations, characters, levels, noise and pace side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 3.2), layout="constrained")
    FigureCanvasAgg(figure)  # a canvas of its own: pyplot and a notebook's backend stay as they are
    durations, characters, *others = figure.subplots(1, 5, width_ratios=(1, 1.4, 1, 1, 1))
    _bars(durations, report["duration_histogram"], f"{report['seconds'] / 60:.1f} minutes", "seconds")
    most = list(report["characters"].items())[:40]
    characters.bar(range(len(most)), [count for _, count in most])
    characters.set_xticks(range(len(most)), ["\u2423" if c == " " else c for c, _ in most], fontsize=7)
    characters.set(title=f"{len(report['characters'])} characters", ylabel="times", yscale="log")
    titles = (("level", "levels as recorded", "dB below full scale"), ("snr", "speech over noise", "dB"),
              ("pace", "pace", "characters a second"))  # fmt: skip
    for axes, (name, title, unit) in zip(others, titles, strict=True):
        _bars(axes, report[f"{name}_histogram"], title, unit)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the figure's font does not have every script
        figure.savefig(path, dpi=110)


def _bars(axes, histogram: dict, title: str, unit: str) -> None:
    edges = histogram["edges"]
    axes.bar(edges[:-1], histogram["clips"], width=edges[1] - edges[0], align="edge")
    axes.set(title=title, xlabel=unit, ylabel="clips")
