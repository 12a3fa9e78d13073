"""The project's frame: requirements agree, layers hold, importing is cheap, the repository can be renamed."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings tomli
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# A file imports only from strictly lower layers. A new file is an edit here, and so is seen in review.
LAYERS = {
    -1: "errors",
    0: "config host pinyin numerals alignment media provenance install keys",
    1: "audio text chunks weights layers ode optim readings archives tables features journal lock interrupts recovery"
    " gauges processes push sounds gate cards",
    2: "dit unett mmdit vocoder data ingest slicing audit asr scores runs speech joining show repository",
    3: "cfm lora report cleaning verdicts workplace transcribe durations progress blind recorder places",
    4: "checkpoint summary reference tuning passes memory",
    5: "trainer inference convert probe vocab prepare backup trial pick",
    6: "evaluate judge card log panel script edit plan selfcheck studio",
    7: "widgets hub launch preflight service",
    8: "review routes",
    9: "serve",
}
LAYER = {name: layer for layer, names in LAYERS.items() for name in names.split()}
# Modules that belong to a host or come with ipywidgets, and so are nobody's dependency; and bigvgan, which is installed
# without its dependencies, for some of them need a compiler: no extra can ask for that.
FROM_HOST = {"google", "kaggle_secrets", "IPython", "bigvgan", "pip"}


# --- requirements ---------------------------------------------------------------------------------


def ranges(lines) -> dict[str, tuple[str, str]]:
    """{canonical name: (range, marker)} of requirement lines; comments and blank lines do not count."""
    found = {}
    for line in lines:
        if line := line.split("#")[0].strip():
            requirement = Requirement(line)
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} stands there twice"
            found[name] = (str(requirement.specifier), str(requirement.marker or ""))
    return found


def lines_of(name: str) -> list[str]:
    return (ROOT / name).read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def declared() -> dict[str, dict]:
    """Ranges of pyproject.toml by group: "" are the plain dependencies, the others its extras."""
    return {"": ranges(PROJECT["dependencies"])} | {
        extra: ranges(wanted) for extra, wanted in PROJECT["optional-dependencies"].items()
    }


def test_requirements_agree_with_pyproject(declared):
    wanted = declared[""] | declared["notebooks"] | declared["log"]
    assert ranges(lines_of("requirements.txt")) == wanted


def test_environment_agrees_with_requirements():
    packages = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    (pip,) = (entry["pip"] for entry in packages if isinstance(entry, dict))
    assert ranges(pip) == ranges(lines_of("requirements.txt"))
    assert f"python{PROJECT['requires-python']}" in packages


def test_no_range_pins_torch(declared):
    for group in declared.values():
        for name, (wanted, _) in group.items():
            assert "==" not in wanted, f"{name}{wanted} pins: a host could not keep its own"
    assert declared[""]["torch"][0].startswith(">=") and "," not in declared[""]["torch"][0]


def test_constraints_satisfy_the_ranges(declared):
    pinned = {name: wanted for name, (wanted, _) in ranges(lines_of("constraints.txt")).items()}
    for name, wanted in pinned.items():
        assert re.fullmatch(r"==[^*,]+", wanted), f"{name}{wanted} is not exact"
    for name, (wanted, _) in (item for group in declared.values() for item in group.items()):
        assert name in pinned, f"constraints.txt has no {name}"
        assert SpecifierSet(wanted).contains(pinned[name][2:]), f"{name}{pinned[name]} is not in {wanted}"


# --- code -----------------------------------------------------------------------------------------


def code_files() -> list[Path]:
    return sorted((ROOT / "f5kit").glob("*.py"))


def imports(path: Path):
    """(line, dotted name) of every import in a file, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(part for part in ("f5kit" if node.level else "", node.module or "") if part)
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "f5kit" else [base]
            yield from ((node.lineno, name) for name in names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield node.lineno, node.args[0].value


@pytest.mark.parametrize("path", code_files(), ids=lambda path: path.stem)
def test_file_imports_strictly_lower_layers(path):
    if path.stem == "__init__":  # its names resolve lazily, and all of them are public
        assert not [name for _, name in imports(path) if name.startswith("f5kit")]
        return
    assert path.stem in LAYER, f"f5kit/{path.name} has no layer"
    for line, name in imports(path):
        if name.split(".")[0] == "f5kit":
            inner = name.split(".")[1] if "." in name else ""
            assert inner in LAYER, f"f5kit/{path.name}:{line} imports {name}, which has no layer"
            assert LAYER[inner] < LAYER[path.stem], (
                f"f5kit/{path.name}:{line} (layer {LAYER[path.stem]}) imports {inner} (layer {LAYER[inner]})"
            )


@pytest.mark.parametrize("path", code_files(), ids=lambda path: path.stem)
def test_file_imports_only_declared_packages(path, declared):
    known = {name for group in declared.values() for name in group}
    dists = packages_distributions()
    for line, name in imports(path):
        top = name.split(".")[0]
        if top == "f5kit" or top in sys.stdlib_module_names or top in FROM_HOST:
            continue
        names = {canonicalize_name(dist) for dist in dists.get(top, [top])}
        assert names & known, f"f5kit/{path.name}:{line} imports {top}, which pyproject.toml does not name"


def test_version_is_the_same_everywhere():
    import f5kit

    assert f5kit.__version__ == PROJECT["version"]


# --- import cost ----------------------------------------------------------------------------------


def fresh(code: str) -> str:
    """What `code` prints in a fresh interpreter."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def timed(statement: str, before: str = "pass") -> float:
    """Seconds of `statement` after `before`, in a fresh interpreter."""
    clock = "time.perf_counter()"
    return float(fresh(f"import time\n{before}\nstart = {clock}\n{statement}\nprint({clock} - start)"))


def test_importing_f5kit_loads_no_torch():
    heavy = "torch numpy torchaudio matplotlib IPython ipywidgets huggingface_hub soundfile"
    loaded = fresh(f"import sys, f5kit\nprint([m for m in {heavy.split()!r} if m in sys.modules])")
    assert loaded == "[]"


def test_importing_f5kit_is_quick():
    timed("import f5kit")  # writes the byte code
    seconds = statistics.median(timed("import f5kit") for _ in range(5))
    assert seconds < 0.2, f"import f5kit takes {seconds:.3f} s"


def test_every_public_name_resolves():
    assert fresh("import f5kit\nprint([n for n in f5kit.__all__ if getattr(f5kit, n) is None])") == "[]"


def test_tiny_model_loads_quickly():
    statement = "import f5kit\nf5kit.load_model('tiny')"
    timed(statement)
    seconds = statistics.median(timed(statement, before="import torch") for _ in range(3))
    assert seconds <= 1.5, f"load_model('tiny') takes {seconds:.2f} s beyond `import torch`"


# --- the repository's address ---------------------------------------------------------------------


def text_files() -> list[Path]:
    """Tracked files, and new ones that git does not ignore; every file where there is no git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        hidden = {".venv", ".venv-parity", ".git", "runs", "data", "__pycache__"}
        paths = [p for p in ROOT.rglob("*") if not hidden & set(p.relative_to(ROOT).parts)]
    binary = {".flac", ".wav", ".png", ".safetensors", ".npz", ".pyc"}
    return [path for path in paths if path.is_file() and path.suffix not in binary]


def test_only_pyproject_knows_the_address():
    address = PROJECT["urls"]["Repository"]
    slug = address.removeprefix("https://github.com/")
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", slug), f"{address} is no repository on github.com"
    # The built pages repeat the address, so there it must be this one; no other file may know it.
    built = {ROOT / "README.md", *(ROOT / "notebooks").glob("*.ipynb")}
    kit = slug.split("/")[1]
    pattern = re.compile(rf"(?:github|github(?:usercontent)?\.com)/([\w.-]+/{re.escape(kit)})(?![\w-])")
    for path in text_files():
        found = set(pattern.findall(path.read_text(encoding="utf-8", errors="ignore")))
        if path in built:
            assert found <= {slug}, f"{path.relative_to(ROOT)} names {found}, pyproject.toml {slug}"
        elif path != ROOT / "pyproject.toml":
            assert not found, f"{path.relative_to(ROOT)} names {found}: take it from pyproject.toml"


def test_badges_lead_to_this_repository():
    slug = PROJECT["urls"]["Repository"].removeprefix("https://github.com/")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert notebooks, "there are no notebooks: run make notebooks"
    for path in notebooks:
        badge = f"colab.research.google.com/github/{slug}/blob/v{PROJECT['version']}/notebooks/{path.name}"
        assert badge in path.read_text(encoding="utf-8"), f"{path.name} has no Colab badge to {badge}"
        assert badge in readme, f"README.md has no Colab badge for {path.name}"
