"""The feature cache: log-mels in half precision, one after the other in large files that are mapped into memory.

    features/<kind>/<number>.f16    frames (n, bins), little-endian float16; no number is used twice
    features/<kind>/<manifest>.npy  int64 (clips, 3): file, first frame, frames, in the manifest's order

Reading a clip is a look into the index and a copy out of the map: nothing is decoded, and processes that read the same
files share the memory. A file is never changed once its run is over; a changed dataset adds a file and an index.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_SHARD_BYTES = 1 << 29


class FeatureWriter:
    """Appends mels to new files of a folder."""

    def __init__(self, folder: Path, bins: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.bins, self.file, self.shard, self.first = folder, bins, None, 0, 0

    def add(self, mel) -> tuple[int, int, int]:
        """Write a mel (n, bins). Returns its file, first frame and frames: a row of the index."""
        mel = np.ascontiguousarray(mel, dtype="<f2")
        if self.file is None or self.first * self.bins * 2 >= _SHARD_BYTES:
            self.close()
            self.shard, self.first = time.time_ns(), 0
            self.file = open(shard_path(self.folder, self.shard), "xb")  # noqa: SIM115
        self.file.write(mel.data)
        place = self.shard, self.first, len(mel)
        self.first += len(mel)
        return place

    def flush(self) -> None:
        if self.file:
            self.file.flush()

    def close(self) -> None:
        if self.file:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self.file = None


def shard_path(folder: Path, number: int) -> Path:
    """The file of that number."""
    return folder / f"{number:020d}.f16"


def write_index(folder: Path, manifest_hash: str, rows) -> None:
    """Write the index of a manifest whose clips have these rows (from `FeatureWriter.add`), under its name at once."""
    partial = folder / f".{manifest_hash[:16]}.partial-{os.getpid()}"
    with open(partial, "wb") as file:
        np.save(file, np.fromiter((value for row in rows for value in row), np.int64).reshape(-1, 3))
    os.replace(partial, folder / f"{manifest_hash[:16]}.npy")


class Features:
    """The mels of a manifest: `features[i]` is that of its i-th clip, (n, bins) float32."""

    def __init__(self, folder: Path, manifest_hash: str, bins: int):
        self.folder, self.bins = folder, bins
        self.index = torch.from_numpy(np.load(folder / f"{manifest_hash[:16]}.npy"))
        self._maps: dict[int, Tensor] = {}

    @staticmethod
    def has(folder: Path, manifest_hash: str) -> bool:
        """Whether the cache of a manifest is there."""
        return (folder / f"{manifest_hash[:16]}.npy").is_file()

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, row: int) -> Tensor:
        shard, first, frames = self.index[row].tolist()
        if shard not in self._maps:
            with open(shard_path(self.folder, shard), "rb") as file:
                # Copy on write: torch wants memory it might change, and never does.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            # A run that was killed while it wrote may have left part of a frame, which no index names.
            values = len(mapped) // (2 * self.bins) * self.bins
            self._maps[shard] = torch.frombuffer(mapped, dtype=torch.float16, count=values).view(-1, self.bins)
        return self._maps[shard][first : first + frames].float()  # n d

    def __getstate__(self):
        """Other processes map the files themselves."""
        return {**vars(self), "_maps": {}}
