"""f5kit.install: what is installed is held, what lacks is found, and a failure is explained."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from f5kit import install
from f5kit.errors import UserError
from f5kit.install import (
    canonical,
    explain,
    find_missing,
    install_missing,
    installed_versions,
    requirements,
    verify_imports,
    write_pins,
)

ROOT = Path(__file__).resolve().parents[1]


def make_wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> Path:
    """A wheel of one empty module."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def test_a_complete_host_is_left_alone(monkeypatch):
    monkeypatch.setattr(install, "_run_pip", lambda *a: pytest.fail("pip ran"))
    done = install_missing()
    assert done.added == {} and "nothing was installed" in str(done)


def test_requirements_are_those_of_the_project():
    lines = requirements()
    assert "torch>=2.4" in lines and any(line.startswith("bitsandbytes") for line in lines)
    assert not [line for line in lines if line.startswith("jiwer")]
    assert "jiwer>=3.0" in requirements(("judge",))


def test_what_lacks_is_found():
    have = {"torch": "2.11.0+cu128", "numpy": "1.20", "soundfile": "0.13.0rc1"}
    lines = ["torch>=2.4", "numpy>=1.24", "vocos>=0.1.0", "soundfile>=0.12", "gone>=1; sys_platform == 'nowhere'"]
    assert find_missing(lines, have) == ["numpy>=1.24", "vocos>=0.1.0"]
    assert canonical("X_Transformers.Y") == "x-transformers-y"


def test_everything_that_is_installed_is_held(tmp_path):
    have = installed_versions()
    assert have["torch"] == importlib.metadata.version("torch") and "f5kit" not in have
    pins = write_pins({**have, "odd": "not a version"}, tmp_path / "keep.txt").read_text().splitlines()
    assert f"torch=={have['torch']}" in pins and f"ipywidgets=={have['ipywidgets']}" in pins
    assert len(pins) == len(have)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """pip installs into a folder of the test, without a network, and what is there counts as installed."""
    target = tmp_path / "site"
    target.mkdir()
    monkeypatch.setenv("PIP_TARGET", str(target))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.syspath_prepend(str(target))
    return target


def test_a_wheel_beside_the_wheel_serves_without_a_network(elsewhere, tmp_path, monkeypatch):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "f5kit_needs_this", "1.2")
    source = make_wheel(wheels, "f5kit_itself", "1.0")
    monkeypatch.setattr(install, "requirements", lambda extras: ["f5kit_needs_this>=1", "torch>=2.4"])
    done = install_missing(str(source), verify=False)
    assert done.added == {"f5kit-needs-this": "1.2"} and "kept their versions" in str(done)


def test_a_conflict_with_the_host_is_explained(elsewhere, tmp_path, monkeypatch):
    source = make_wheel(tmp_path, "f5kit_needs_newer", "1.0", ("numpy>=99",))
    monkeypatch.setattr(install, "requirements", lambda extras: ["f5kit_needs_newer>=1"])
    with pytest.raises(UserError, match="f5kit_needs_newer cannot be installed beside|could not be fetched"):
        install_missing(str(source))
    assert not list(elsewhere.iterdir())


def test_a_host_that_contradicts_itself_gets_what_lacks(elsewhere, tmp_path, monkeypatch):
    """Its torch asks for newer setuptools than it has, and what f5kit needs asks for that torch."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "f5kit_deeper", "2.0", ("hosts_torch",))
    make_wheel(wheels, "f5kit_deeper", "3.0", ("hosts_tools>=2",))  # too new for this host
    source = make_wheel(wheels, "f5kit_needs", "1.0", ("hosts_torch>=1", "f5kit_deeper", "gone; extra == 'x'"))
    for name, needs in (("hosts_torch", ("hosts_tools>=77",)), ("hosts_tools", ())):
        with zipfile.ZipFile(make_wheel(tmp_path, name, "1.0", needs)) as wheel:
            wheel.extractall(elsewhere)
    monkeypatch.setattr(install, "requirements", lambda extras: ["f5kit_needs>=1"])
    done = install_missing(str(source), verify=False)
    assert done.added == {"f5kit-needs": "1.0", "f5kit-deeper": "2.0"}


def test_no_network_is_explained(elsewhere, tmp_path, monkeypatch):
    monkeypatch.setattr(install, "requirements", lambda extras: ["f5kit_not_there>=1"])
    with pytest.raises(UserError, match="f5kit_not_there could not be fetched: switch the internet on"):
        install_missing()


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("ERROR: Cannot install a 1 and b because they have conflicting dependencies.\n", "a 1 and b"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: something nobody has seen", "something nobody has seen"),
        ("", "it said nothing"),
    ],
)
def test_pips_words_become_a_sentence(said, sentence):
    told = explain(said, ["vocos>=0.1.0"], None)
    assert sentence in told and "\n" not in told


def test_imports_are_tried_in_another_process(monkeypatch):
    verify_imports()
    monkeypatch.setattr(install, "_IMPORTS", "import f5kit_not_there")
    with pytest.raises(UserError, match="do not work together here .*f5kit_not_there"):
        verify_imports()


def test_only_the_standard_library_is_needed():
    tops = "{m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names)"
    code = f"import sys, f5kit.install; print(sorted({tops}))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("['f5kit']", "['__main__', 'f5kit']"), done.stdout
