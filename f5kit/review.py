"""The report of a dataset, to look at and to listen to: a page that opens anywhere, and a panel to take clips out with.

Both show what each check ranks worst, with players. What is unticked goes to decisions.json in the dataset's folder
(the page offers that file for download), and the next preparation leaves those clips out.
"""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path

from f5kit.audio import player
from f5kit.audit import CHECKS
from f5kit.data import Dataset
from f5kit.weights import write_json
from f5kit.widgets import Html, table

_SECONDS = 12.0  # of a clip in a player
_STYLE = """<style>
.f5 {font: 14px/1.45 system-ui, sans-serif; max-width: 1100px; color: #222; background: #fff; padding: 4px 12px}
.f5 table {border-collapse: collapse}
.f5 td, .f5 th {text-align: left; padding: 3px 10px; border-bottom: 1px solid #ddd}
.f5 .counts b {font-size: 22px; margin-right: 5px} .f5 .counts span {margin-right: 26px} .f5 audio {height: 30px}
.f5 .accepted {color: #197a3e} .f5 .repaired {color: #a36a00} .f5 .rejected {color: #b3261e}
.f5 summary {cursor: pointer; font-weight: 600; padding: 4px 0} .f5 img {max-width: 100%}
</style>"""
_SCRIPT = """<script>
for (const box of document.querySelectorAll('.f5 .keep')) box.onchange = () => {
  for (const twin of document.querySelectorAll('.f5 .keep')) if (twin.value == box.value) twin.checked = box.checked;
  const out = new Set([...document.querySelectorAll('.f5 .keep:not(:checked)')].map(b => b.value));
  const link = document.querySelector('.f5 .save');
  const text = JSON.stringify({drop: [...out].sort()}, null, 1);
  link.href = URL.createObjectURL(new Blob([text], {type: 'application/json'}));
  link.textContent = 'save decisions.json (' + out.size + ' taken out)';
};
</script>"""


def _player(path: Path) -> str:
    """A player with the beginning of a clip inside it."""
    import soundfile
    import torch

    with soundfile.SoundFile(str(path)) as file:
        return player(torch.from_numpy(file.read(round(_SECONDS * file.samplerate), "float32")), file.samplerate, "MP3")


def dataset_report(dataset: Dataset) -> Html:
    """The report as HTML. It is also written to report.html in the dataset's folder, which needs nothing beside it."""
    report, all_rows = dataset.report, dataset.rows()
    wanted = {name for ids in report["worst"].values() for name in ids}
    rows = {row["id"]: row for row in all_rows if row["id"] in wanted}
    rejected = [row for row in all_rows if row["status"] == "rejected"][:200]
    parts = [f"<h2>{html.escape(dataset.name)}</h2>", _counts(report), _picture(dataset.folder / "report.png")]
    parts += ["<h3>What the checks found</h3>", _checks(dataset, report, rows)]
    parts += ["<h3>Rejected</h3>", _rejected(dataset, rejected, report["rejected"])]
    parts += ["<h3>Letters</h3>", _letters(report), "<h3>Minutes of each speaker</h3>"]
    parts.append(table({name or "(not named)": minutes for name, minutes in report["speakers"].items()}).text)
    body = f'{_STYLE}<div class="f5">{"".join(parts)}</div>{_SCRIPT}'
    page = f'<!DOCTYPE html><html><head><meta charset="utf-8"><title>{html.escape(dataset.name)}</title></head>'
    (dataset.folder / "report.html").write_text(f"{page}<body>{body}</body></html>", encoding="utf-8")
    return Html(body)


def _counts(report: dict) -> str:
    names = ("seen", "accepted", "repaired", "rejected", "train", "heldout")
    counts = "".join(f'<span class="{name}"><b>{report[name]:,}</b>{name}</span>' for name in names)
    kept = f"{report['seconds'] / 60:.1f} minutes of clips from {report['recorded_seconds'] / 60:.1f} minutes recorded"
    errors = report["duration_errors"]
    told = (
        f"How long a held-out text takes is guessed {errors['fitted']:.0%} wrong, and {errors['by_bytes']:.0%} by "
        "upstream's rule, a length for each byte"
    )
    return f'<p class="counts">{counts}</p><p>{kept}; held out: {html.escape(report["split"])}. {told}.</p>'


def _picture(path: Path) -> str:
    return f'<img src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'


def _checks(dataset: Dataset, report: dict, rows: dict[str, dict]) -> str:
    parts = ["<p>Untick what you do not want. <a class='save' download='decisions.json'>Nothing is taken out yet</a>"]
    parts.append("; put the file into the dataset's folder and prepare again.</p>")
    for name, check in CHECKS.items():
        ids = [identity for identity in report["worst"][name] if identity in rows]
        flagged = report["flags"].get(name, 0)
        lines = "".join(_worst_line(dataset, rows[identity], name) for identity in ids)
        shown = f"<table>{lines}</table>" if ids else "<p>none</p>"
        count = f"{flagged:,} flagged" if flagged else "none flagged"
        opened = " open" if flagged and lines else ""
        told = f"<summary>{name}: {count}</summary><i>{html.escape(check.says)}</i>"
        parts.append(f"<details{opened}>{told}{shown}</details>")
    return "".join(parts)


def _worst_line(dataset: Dataset, row: dict, check: str) -> str:
    identity = html.escape(row["id"])
    why = html.escape(row["flags"].get(check) or _measured(row, check))
    tick = f'<input type="checkbox" class="keep" value="{identity}" checked>'
    cells = tick, identity, _player(dataset.folder / row["audio"]), why, html.escape(row["text"][:200])
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _measured(row: dict, check: str) -> str:
    m, pace = row["measures"], len(row["text"]) / row["seconds"]
    told = {
        "clipping": f"{m['clipped']:.2%} clipped", "noise": f"{m['snr']:.0f} dB above the noise",
        "silence": f"longest pause {m['pause']:.2f} s", "bandwidth": f"up to {m['bandwidth'] / 1000:.1f} kHz",
        "level": f"{m['rms_dbfs']:.0f} dBFS", "offset": f"{m['offset']:+.4f}",
        "pace": f"{pace:.1f} characters a second",
    }  # fmt: skip
    return told.get(check, "")


def _rejected(dataset: Dataset, rows: list[dict], count: int) -> str:
    lines = "".join(
        f"<tr><td>{html.escape(row['id'])}</td><td>{html.escape('; '.join(row['reasons']))}</td>"
        f"<td>{_player(dataset.folder / row['audio']) if row['audio'] and place < 20 else ''}</td></tr>"
        for place, row in enumerate(rows)
    )
    more = f"<p>and {count - len(rows):,} more in report.jsonl</p>" if count > len(rows) else ""
    return f"<table>{lines}</table>{more}" if rows else "<p>nothing</p>"


def _letters(report: dict) -> str:
    known = " ".join(f"{html.escape(c)}&nbsp;<small>{n:,}</small>" for c, n in list(report["characters"].items())[:300])
    lacking = [
        {"missing": repr(token), "times": m["count"], "as in": ", ".join(m["examples"])}
        for token, m in report["coverage"].items()
    ]
    return f"<p>{known}</p>" + (table(lacking[:100]).text if lacking else "")


class ReviewPanel:
    """The clips of a dataset with a tick each, by what a check found. `save` is what the button does."""

    def __init__(self, dataset: Dataset, page: int = 8):
        import ipywidgets as w

        self.dataset, self.page, self.start = dataset, page, 0
        self.dropped: set[str] = set(_read_decisions(dataset.folder))
        found = [name for name in CHECKS if dataset.report["flags"].get(name)]
        self.check = w.Dropdown(options=[*found, "repaired", "rejected", "all"], description="show")
        self.check.observe(self._first, "value")
        self.back, self.forth = w.Button(description="Back"), w.Button(description="More")
        self.back.on_click(lambda _: self._turn(-page))
        self.forth.on_click(lambda _: self._turn(page))
        self.save_button = w.Button(description="Save", button_style="primary")
        self.save_button.on_click(self.save)
        self.status, self.rows = w.HTML(), w.VBox([])
        self.box = w.VBox([w.HBox([self.check, self.back, self.forth, self.save_button]), self.status, self.rows])
        self._first()

    def _first(self, _change=None) -> None:
        self.start = 0
        self._show()

    def _turn(self, by: int) -> None:
        self.start = max(0, self.start + by)
        self._show()

    def listed(self) -> list[dict]:
        """The rows on show."""
        name, found, passed = self.check.value, [], 0
        for row in self.dataset.rows():
            if name == "all" or row["status"] == name or name in row["flags"]:
                passed += 1
                if self.start < passed <= self.start + self.page:
                    found.append(row)
        return found

    def _show(self) -> None:
        import ipywidgets as w

        lines = []
        for row in self.listed():
            tick = w.Checkbox(value=row["id"] not in self.dropped, description=row["id"], indent=False)
            tick.observe(lambda change, name=row["id"]: self.keep(name, change["new"]), "value")
            why = "; ".join([*row["flags"].values(), *row["reasons"]])
            sound = _player(self.dataset.folder / row["audio"]) if row["audio"] else ""
            shown = f"{sound}<br>{html.escape(row['text'][:300])}<br><i>{html.escape(why[:300])}</i>"
            lines.append(w.HBox([tick, w.HTML(shown)]))
        self.rows.children = lines
        told = "Listen, untick what is no good, save, and prepare again."
        self.status.value = f"{len(self.dropped)} clips are unticked. {told}"

    def keep(self, name: str, kept: bool) -> None:
        """Tick or untick a clip."""
        (self.dropped.discard if kept else self.dropped.add)(name)

    def save(self, _button=None) -> None:
        """Write decisions.json, which the next preparation reads."""
        write_json(self.dataset.folder / "decisions.json", {"drop": sorted(self.dropped)})
        self.status.value = f"Saved: {len(self.dropped)} clips are left out when the recordings are prepared again."

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.box)


def _read_decisions(folder: Path) -> list[str]:
    path = folder / "decisions.json"
    return json.loads(path.read_text(encoding="utf-8"))["drop"] if path.is_file() else []
