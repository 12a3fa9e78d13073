"""Each protection, taken out of a copy of the package, makes its case fail: so the cases can see what they look for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small import furnish

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "f5kit"

# what is taken out: (file, what stands there, what then stands there, the case that must fail)
MUTATIONS = {
    "fsync": ("weights.py", "os.fsync(handle)", "pass",
              "test_saving_faults.py::test_a_save_is_flushed_before_it_is_renamed"),
    "rename": ("runs.py", "os.replace(partial, folder)", "shutil.copytree(partial, folder, copy_function=shutil.copy)",
               "test_saving_faults.py::test_a_save_is_flushed_before_it_is_renamed"),
    "manifest": ("runs.py", "if file_hash(file) != expected", "if False",
                 "test_saving_faults.py::test_damaged_checkpoints_are_refused"),
    "seeding": ("cfm.py", "g = generator(seed, batch.step, position)", "g = generator(torch.rand(1).item())",
                "test_resume_faults.py::test_stopped_after_every_update[1-1]"),
    "data order": ("trainer.py", "self.config.seed, self.step)", "self.config.seed, 0)",
                   "test_resume_faults.py::test_stopped_after_every_update[1-1]"),
    "finite check": ("recovery.py", "if math.isfinite(loss) and math.isfinite(norm):", "if True:",
                     "test_numeric_faults.py::test_single_updates_that_are_not_finite"),
    "item masks": ("cfm.py", "mask = batch.mask\n", "mask = None\n",
                   "test_memory_faults.py::test_the_ladder_ends_at_one_clip"),
}  # fmt: skip


@pytest.fixture(scope="module")
def furnished(tmp_path_factory) -> Path:
    return furnish(tmp_path_factory.mktemp("mutations") / "room")


@pytest.mark.parametrize("name", MUTATIONS)
def test_without_its_protection_a_case_fails(name, furnished, tmp_path):
    file, there, instead, case = MUTATIONS[name]
    copy = tmp_path / "f5kit"
    copy.mkdir()
    for path in PACKAGE.iterdir():
        if path.name != file and path.name != "__pycache__":
            (copy / path.name).symlink_to(path)
    text = (PACKAGE / file).read_text(encoding="utf-8")
    assert text.count(there) == 1, f"{file} has no longer one line {there!r}: name the protection as it stands now"
    (copy / file).write_text(text.replace(there, instead), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "F5KIT_FAULTS_ROOM": str(furnished), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / case)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
