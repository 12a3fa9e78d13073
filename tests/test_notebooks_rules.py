"""What every notebook promises, read from the files: nothing is executed here (test_road.py does that)."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "notebooks"))

import build  # noqa: E402
import run  # noqa: E402

NAMES = list(build.NOTEBOOKS)
SECRET = re.compile(r"hf_[A-Za-z0-9]{20,}|\b[0-9a-f]{40}\b")


def notebook(name: str):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def code(name: str) -> list:
    return [cell for cell in notebook(name).cells if cell.cell_type == "code"]


def parameters_of(name: str) -> str:
    (cell,) = [cell for cell in code(name) if "parameters" in cell.metadata.get("tags", [])]
    return cell.source


def test_every_notebook_is_in_step_with_its_source():
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == set(NAMES) == set(run.NAMES)
    command = [sys.executable, ROOT / "notebooks/build.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_check_notices_an_edited_notebook(tmp_path, monkeypatch, capsys):
    for name in NAMES:
        (tmp_path / f"{name}.ipynb").write_text(build.build(name), encoding="utf-8")
    edited = tmp_path / "05_speak.ipynb"
    edited.write_text(edited.read_text(encoding="utf-8").replace("# 05", "# 5"), encoding="utf-8")
    about = build.project()
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "project", lambda: about)
    assert build.main(["--check"]) == 1
    assert "05_speak" in capsys.readouterr().err
    assert build.main([]) == 0 and build.main(["--check"]) == 0


@pytest.mark.parametrize("name", NAMES)
def test_cells_are_short_plain_and_introduced(name):
    cells = notebook(name).cells
    assert len(code(name)) <= 12
    for before, cell in zip(cells, cells[1:], strict=False):
        if cell.cell_type != "code":
            continue
        lines = cell.source.splitlines()
        assert len(lines) <= 15, cell.source
        assert not [line for line in lines if line.lstrip().startswith(("!", "%"))], cell.source
        kinds = [type(node) for node in ast.walk(ast.parse(cell.source))]
        assert not {ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda} & set(kinds), cell.source
        assert before.cell_type == "markdown" and len(before.source) > 60, f"no prose before\n{cell.source}"


@pytest.mark.parametrize("name", NAMES)
def test_one_form_of_literals(name):
    source = parameters_of(name)
    (cell,) = [c for c in code(name) if c.source == source]
    assert cell.metadata["cellView"] == "form" and cell.metadata["tags"] == ["parameters"]
    for line in source.splitlines():
        assert re.fullmatch(r'\w+ = .+  #@param (\{type:"\w+"\}|\[.*\]( \{allow-input: true\})?)', line), line
    values = {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(source).body}
    assert values["workspace"] == "" and values["demo"] is False
    assert not [key for key in values if re.search("token|secret|password|key", key)]


def test_forms_agree_on_shared_parameters():
    seen: dict[str, str] = {}
    for name in NAMES:
        for line in parameters_of(name).splitlines():
            name = line.split(" = ")[0]
            assert name in ("text", "language") or seen.setdefault(name, line) == line


@pytest.mark.parametrize("name", NAMES)
def test_metadata_is_what_the_hosts_read(name):
    content = notebook(name)
    assert content.metadata["accelerator"] == "GPU"
    assert content.metadata["kernelspec"]["name"] == "python3"
    gpu = "A100" if name.startswith("03") else "T4"
    assert content.metadata["colab"] == {"gpuType": gpu, "private_outputs": True, "provenance": []}
    assert content.metadata["kaggle"]["isGpuEnabled"] is True
    assert not [cell for cell in code(name) if cell.outputs or cell.execution_count]
    assert len({cell.id for cell in content.cells}) == len(content.cells)
    assert not SECRET.search(json.dumps(content))


@pytest.mark.parametrize("name", NAMES)
def test_opening_and_links_follow_the_one_address(name):
    about = build.project()
    opening, ending = notebook(name).cells[0].source, notebook(name).cells[-1].source
    blob = f"{about['repository']}/blob/v{about['version']}/notebooks/{name}.ipynb"
    assert opening.count(blob.removeprefix("https://github.com/")) == 2
    assert f"https://colab.research.google.com/github/{blob.removeprefix('https://github.com/')}" in opening
    assert f"https://kaggle.com/kernels/welcome?src={blob}" in opening
    for promise in ("**You get**", "**It takes**", "**You need**"):
        assert promise in opening
    text = "\n".join(cell.source for cell in notebook(name).cells)
    for address in re.findall(r"github\.com/([\w.-]+/[\w.-]+)", text):
        assert about["repository"].endswith(address.removesuffix(".git").split("@")[0]), address
    for target in re.findall(r"\]\((\w+\.ipynb)\)", text):
        assert (ROOT / "notebooks" / target).is_file()
    assert ending.startswith("**Next:**") or name == NAMES[-1]


def test_install_cell_is_the_same_everywhere():
    cells = {next(cell.source for cell in code(name)) for name in NAMES}
    assert len(cells) == 1
    (source,) = cells
    assert "import torch" not in source and "F5KIT_SOURCE" in source and "install_missing" in source


def run_install_cell(where: Path, **environment) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if name not in ("F5KIT_SOURCE", "PYTHONPATH")}
    command = [sys.executable, "-c", code(NAMES[0])[0].source]
    kept["PIP_TARGET"] = str(where / "installed")  # whatever went wrong, this Python stays as it is
    return subprocess.run(command, cwd=where, env=kept | environment, capture_output=True, text=True)


def test_install_cell_takes_the_clone_it_stands_in(tmp_path):
    done = run_install_cell(ROOT / "notebooks", PYTHONPATH=str(ROOT), TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "nothing was installed" in done.stdout and not list(tmp_path.iterdir())


def test_install_cell_fails_aloud(tmp_path):
    done = run_install_cell(tmp_path, F5KIT_SOURCE="./nowhere.whl", TMPDIR=str(tmp_path), PIP_NO_INDEX="1")
    assert done.returncode == 1 and "pip did not install ./nowhere.whl; its reason is above" in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_last_cell_writes_result_json(name):
    last = code(name)[-1].source
    assert '"result.json"' in last and last.splitlines()[-1] == "result"


def test_02_and_03_differ_by_the_table_alone():
    t4, a100 = build.NOTEBOOKS["02_finetune_t4"], build.NOTEBOOKS["03_finetune_a100"]
    assert t4["source"] == a100["source"] and t4.keys() == a100.keys()
    values = [{**row, "name": name} for name, row in (("02_finetune_t4", t4), ("03_finetune_a100", a100))]
    pairs = zip(*(notebook(v["name"]).cells[1:-1] for v in values), strict=True)
    for a, b in pairs:  # the opening and the last link are prose of their own
        assert a.source.replace(values[0]["name"], values[1]["name"]) == b.source
    assert parameters_of("02_finetune_t4") == parameters_of("03_finetune_a100")


# Words that newcomers do not know, and how they are found in prose.
GLOSSARY = {
    "mel": r"\bmels?\b", "vocoder": r"\bvocoders?\b", "flow matching": r"\bflow.matching\b", "EMA": r"\bEMA\b",
    "CFG": r"\bCFG\b", "NFE": r"\bNFE\b", "RTF": r"\bRTF\b", "WER": r"\bWER\b", "VRAM": r"\bVRAM\b",
    "mixed precision": r"\bmixed.precision\b", "gradient accumulation": r"\bgradient.accumulation\b",
    "checkpointing": r"\bcheckpointing\b", "LoRA": r"\bLoRA\b", "8-bit Adam": r"\b8-bit Adam\b",
}  # fmt: skip


@pytest.mark.parametrize("term", GLOSSARY)
def test_each_term_is_explained_where_it_is_first_used(term):
    """The first use, headings aside, is bold and followed by the explanation in parentheses."""
    for name in NAMES:
        for cell in notebook(name).cells:
            prose = [line for line in cell.source.splitlines() if not line.startswith("#")]
            text = " ".join(prose) if cell.cell_type == "markdown" else ""
            first = re.search(GLOSSARY[term], text, re.IGNORECASE if term.islower() else 0)
            if not first:
                continue
            explained = [m for m in re.finditer(r"\*\*[^*]+\*\* \(([^()]{30,})\)", text) if term in m[0].split("(")[0]]
            assert explained and explained[0].start() <= first.start() < explained[0].end(), f"{name}: {text}"
            return
    raise AssertionError(f"no notebook uses {term!r}: take it out of the glossary, or explain it")


def test_unknown_parameters_and_notebooks_are_errors(tmp_path):
    with pytest.raises(SystemExit, match="-p learnig_rate: none of .* has it; there are .*learning_rate"):
        run.main(["--workspace", str(tmp_path), "-p", "learnig_rate", "1e-5"])
    with pytest.raises(SystemExit, match="no notebook starts with '09'"):
        run.main(["--only", "09"])
    assert not list(tmp_path.iterdir())


def test_values_from_the_command_line_keep_their_kind():
    given = {"3": 3, "1e-5": 1e-5, "true": True, "False": False, "en-GB": "en-GB", "05": "05", "a/b": "a/b"}
    assert {text: run.read_value(text) for text in given} == given
