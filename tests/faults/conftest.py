"""Faults are injected, and each case ends in one line: `F1 injected=100 survived=100 silent=0`.

A case fails when a fault was survived in fewer cases than injected, or when one went by in silence.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from small import furnish


@pytest.fixture
def report(request):
    """report("F1", injected=100, survived=100, silent=0, **other figures): the line of a case, and its verdict."""

    def said(case: str, *, injected: int, survived: int, silent: int = 0, **figures) -> None:
        figures = {"injected": injected, "survived": survived, "silent": silent, **figures}
        line = " ".join([case, *(f"{name}={value}" for name, value in figures.items())])
        request.node.user_properties.append(("fault", line))  # reaches the summary from any of pytest's processes
        assert injected > 0 and survived == injected and silent == 0, line

    return said


def pytest_terminal_summary(terminalreporter) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    lines = [line for report in reports for name, line in report.user_properties if name == "fault"]
    if lines:
        terminalreporter.section("faults")
        for line in sorted(lines, key=lambda line: (int(line.split()[0][1:]), line)):
            terminalreporter.write_line(line)


@pytest.fixture(autouse=True, scope="session")
def few_threads(two_threads):
    """A model of this size gains nothing from threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def room(tmp_path_factory) -> Path:
    """A folder with a dataset and a model."""
    given = os.environ.get("F5KIT_FAULTS_ROOM")  # the mutation test makes it once for many processes
    return furnish(Path(given) if given else tmp_path_factory.mktemp("room"))


@pytest.fixture(scope="session")
def zygote():
    from zygote import Zygote

    with Zygote() as process:
        yield process
