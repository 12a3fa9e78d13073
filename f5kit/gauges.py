"""The machine while it trains: figures for the run's events. What cannot be read is left out."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

GIB = 2**30


def read_gauges(folder: str | Path, device: str) -> dict[str, float]:
    """Memory, use and temperature of a CUDA device, free disk below `folder`, and network traffic since the start."""
    return {**_gpu(device), **_disk(Path(folder)), **_network()}


def _gpu(device: str) -> dict[str, float]:
    if not device.startswith("cuda"):
        return {}
    import torch

    free, total = torch.cuda.mem_get_info()
    found = {"gpu_memory_gb": (total - free) / GIB, "gpu_peak_gb": torch.cuda.max_memory_allocated() / GIB}
    try:  # through NVIDIA's own library, which is not there everywhere
        found |= {"gpu_use_percent": torch.cuda.utilization(), "gpu_celsius": torch.cuda.temperature()}
    except Exception:
        pass
    return found


def _disk(folder: Path) -> dict[str, float]:
    try:
        return {"disk_free_gb": shutil.disk_usage(folder).free / GIB}
    except OSError:
        return {}


def _network(table: Path = Path("/proc/net/dev")) -> dict[str, float]:
    """Bytes of all interfaces but the machine's own, as Linux counts them."""
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return {}
    rows = [re.split(r"[:\s]+", line.strip()) for line in lines if ":" in line]
    rows = [row for row in rows if row[0] != "lo"]
    return {
        "network_received_gb": sum(int(row[1]) for row in rows) / GIB,
        "network_sent_gb": sum(int(row[9]) for row in rows) / GIB,
    }
