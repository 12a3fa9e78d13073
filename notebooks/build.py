"""Make the notebooks from their sources.

    python notebooks/build.py            write notebooks/*.ipynb
    python notebooks/build.py --check    exit 1 when a notebook differs from its source

A source is Python in percent format: `# %% [markdown]` opens prose, `# %% [parameters]` the one form of a
notebook, `# %% [check]` code whose output is the same each time it runs (nbval compares it), `# %%` any other
code, and `# %% [install]` stands for the cells of source/install.py, the same in every notebook.
`<<name>>` becomes a value of the notebook's row in NOTEBOOKS, so that one source can yield two notebooks that
differ by that table alone. Badges and links come from pyproject.toml.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "source"

T4 = {"gpu": "T4"}
NOTEBOOKS: dict[str, dict[str, str]] = {
    "00_setup": {"source": "00_setup", **T4},
    "01_prepare_data": {"source": "01_prepare_data", **T4},
    "02_finetune_t4": {
        "source": "02_finetune",
        "gpu": "T4",
        "number": "02",
        "title": "Finetune on a 16 GB GPU",
        "machine": "a 16 GB GPU: the free T4 of Colab or Kaggle will do",
        "ways": "half precision with loss scaling (fp16), 8-bit Adam and recomputed activations",
    },
    "03_finetune_a100": {
        "source": "02_finetune",
        "gpu": "A100",
        "number": "03",
        "title": "Finetune on a 40 or 80 GB GPU",
        "machine": "a GPU of 40 GB or more, such as Colab's A100 (Kaggle lends none: take notebook 02 there)",
        "ways": "bfloat16 and larger batches",
    },
    "04_choose_checkpoint": {"source": "04_choose_checkpoint", **T4},
    "05_speak": {"source": "05_speak", **T4},
    "06_publish": {"source": "06_publish", **T4},
    "07_serve": {"source": "07_serve", **T4},
}
FOLLOWS = {"02_finetune_t4": "04_choose_checkpoint"}  # 03 stands beside 02, not after it
COLAB_BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
KAGGLE_BADGE = "https://kaggle.com/static/images/open-in-kaggle.svg"


def project() -> dict[str, str]:
    """{"version", "repository"} of pyproject.toml (tomllib needs Python 3.11; two patterns do not)."""
    text = (HERE.parent / "pyproject.toml").read_text(encoding="utf-8")
    version = re.search(r'^version\s*=\s*"([^"]+)"', text, re.MULTILINE)
    repository = re.search(r'^Repository\s*=\s*"(https://github\.com/[^"]+?)/?"', text, re.MULTILINE)
    if not version or not repository:
        raise SystemExit("pyproject.toml needs a version, and a Repository on github.com")
    return {"version": version[1], "repository": repository[1]}


def links(name: str, about: dict[str, str]) -> dict[str, str]:
    """Where a reader opens this notebook: {"colab": url, "kaggle": url}."""
    blob = f"{about['repository']}/blob/v{about['version']}/notebooks/{name}.ipynb"
    on_colab = blob.replace("https://github.com/", "https://colab.research.google.com/github/")
    return {"colab": on_colab, "kaggle": f"https://kaggle.com/kernels/welcome?src={blob}"}


def read_cells(name: str, values: dict[str, str]) -> list[tuple[str, str]]:
    """(kind, text) of each cell of source/`name`.py, with the values filled in."""
    text = (SOURCE / f"{name}.py").read_text(encoding="utf-8")
    text = re.sub(r"<<(\w+)>>", lambda found: values[found[1]], text)
    cells = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        kind = head.strip(" []") or "code"
        if kind == "install":
            cells += read_cells("install", values)
            continue
        body = body.strip("\n")
        if kind == "markdown":
            body = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
        cells.append((kind, body))
    return cells


def badges(name: str, about: dict[str, str]) -> str:
    """The row above the title."""
    to = links(name, about)
    colab, kaggle = f"[![Open in Colab]({COLAB_BADGE})]", f"[![Open in Kaggle]({KAGGLE_BADGE})]"
    return f"{colab}({to['colab']}) {kaggle}({to['kaggle']})"


def next_link(name: str, about: dict[str, str]) -> str | None:
    """The sentence that ends a notebook, or None after the last."""
    names = list(NOTEBOOKS)
    after = FOLLOWS.get(name) or dict(zip(names, names[1:], strict=False)).get(name)
    if after is None:
        return None
    to = links(after, about)
    return f"**Next:** [{after}]({after}.ipynb), in [Colab]({to['colab']}) or [Kaggle]({to['kaggle']})."


def metadata(row: dict[str, str]) -> dict:
    """What Colab, Kaggle and Jupyter read before they open the notebook."""
    return {
        "accelerator": "GPU",
        "colab": {"gpuType": row["gpu"], "private_outputs": True, "provenance": []},
        "kaggle": {"accelerator": "nvidiaTeslaT4", "isGpuEnabled": True, "isInternetEnabled": True},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


def build(name: str) -> str:
    """The text of notebooks/`name`.ipynb."""
    row, about = NOTEBOOKS[name], project()
    parts = read_cells(row["source"], {**about, **row, "name": name})
    parts[0] = ("markdown", f"{badges(name, about)}\n\n{parts[0][1]}")
    after = next_link(name, about)
    parts += [("markdown", after)] if after else []
    cells = []
    for number, (kind, text) in enumerate(parts):
        cell = new_markdown_cell(text) if kind == "markdown" else new_code_cell(text)
        if kind == "parameters":
            cell.metadata.update(cellView="form", tags=["parameters"])
        elif kind == "check":
            cell.metadata.update(tags=["nbval-check-output"])
        cell.id = f"{name[:2]}-{number:02d}"  # the same in every build
        cells.append(cell)
    notebook = new_notebook(cells=cells, metadata=metadata(row))
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def main(arguments: list[str]) -> int:
    stale = []
    for name in NOTEBOOKS:
        path, text = HERE / f"{name}.ipynb", build(name)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in arguments:
                path.write_text(text, encoding="utf-8")
    if "--check" in arguments and stale:
        names = ", ".join(stale)
        print(f"out of step with notebooks/source: {names}; run python notebooks/build.py", file=sys.stderr)
        return 1
    print(f"{len(NOTEBOOKS)} notebooks" + ("" if "--check" in arguments else f", {len(stale)} written"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
