"""Cards by name, for plans of machines that are not at hand: what they hold, and how fast they compute and remember.

Memory is what CUDA reports as total, in units of 2**30 bytes, where that is known from their users' logs; rates are the
makers' data sheets, dense, without sparsity. Which share of them a training reaches is `REACHED`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass

from f5kit.errors import UserError
from f5kit.host import Host, cuda_precision


@dataclass(frozen=True)
class Card:
    """One device, by its data sheet."""

    name: str
    """As the driver names it, in part."""
    memory_gb: float
    """Of 2**30 bytes, as the driver reports it."""
    capability: tuple[int, int]
    """(7, 5) is sm_75."""
    half_tflops: float
    """Products of 16-bit numbers with fp32 sums, in the format the card trains in."""
    full_tflops: float
    """The same in fp32, in TF32 from sm_80 on."""
    bandwidth: float
    """GB a second between the chip and its memory."""


CARDS: dict[str, Card] = {
    "T4": Card("Tesla T4", 14.74, (7, 5), 65, 8.1, 320),
    "P100": Card("Tesla P100-PCIE-16GB", 15.89, (6, 0), 19, 9.5, 732),
    "V100": Card("Tesla V100-SXM2-16GB", 15.77, (7, 0), 125, 15.7, 900),
    "L4": Card("NVIDIA L4", 22.03, (8, 9), 121, 60, 300),
    "RTX 3060 12GB": Card("NVIDIA GeForce RTX 3060", 11.76, (8, 6), 51, 25, 360),
    "RTX 3090": Card("NVIDIA GeForce RTX 3090", 23.68, (8, 6), 71, 35, 936),
    "RTX 4090": Card("NVIDIA GeForce RTX 4090", 23.53, (8, 9), 165, 82, 1008),
    "A100-40": Card("NVIDIA A100-SXM4-40GB", 39.39, (8, 0), 312, 156, 1555),
    "A100-80": Card("NVIDIA A100-SXM4-80GB", 79.15, (8, 0), 312, 156, 2039),
    "H100": Card("NVIDIA H100 80GB HBM3", 79.11, (9, 0), 990, 494, 3350),
    "H200": Card("NVIDIA H200", 139.8, (9, 0), 990, 494, 4800),
}

# The share of the rates above that a training of models of this size reaches: a guess from what others report, and
# corrected by a probe wherever there is a card to ask. (products in 16 bits, products in fp32, memory)
REACHED = {"cuda": (0.45, 0.6, 0.75), "cpu": (0.5, 0.5, 0.5)}
_HALF_OF_T4 = 0.38  # its small chip is held back by its power limit
_CPU_CORE = Card("processor core", 0.0, (0, 0), 0.16, 0.064, 8)  # AVX2; no 16-bit products are counted on


def named_host(
    name: str, *, ram_gb: float = 12.7, disk_free_gb: float = 100.0, cores: int = 2, platform: str = "local"
) -> Host:
    """A machine with the card of that name, to plan for without having it: plan_run(model, dataset, named_host("T4")).

    `name` is a key of CARDS. Memory of the machine, free disk and cores are guesses for a rented one.
    Raises UserError for a card that is not in CARDS.
    """
    if name not in CARDS:
        raise UserError(f"there is no card {name!r} in the table; choose one of {', '.join(CARDS)}")
    card = CARDS[name]
    return Host(
        platform=platform, device="cuda", device_name=card.name, memory_gb=card.memory_gb, ram_gb=ram_gb,
        disk_free_gb=disk_free_gb, cores=cores, precision=cuda_precision(card.capability), python="", torch=None,
        device_reason=f"{name}, planned for by its name",
    )  # fmt: skip


def card_of(host: Host) -> tuple[Card, str]:
    """The data sheet that the host's device is taken for, and a sentence on how sure that is."""
    if host.device != "cuda":
        cores, one = host.cores, _CPU_CORE
        card = Card(host.device_name, host.memory_gb, (0, 0), one.full_tflops * cores, one.full_tflops * cores,
                    one.bandwidth * cores)  # fmt: skip
        return card, f"estimated for {cores} processor cores"
    named = [c for c in CARDS.values() if c.name == host.device_name] or _alike(host.device_name)
    if named:
        return min(named, key=lambda c: abs(c.memory_gb - host.memory_gb)), "estimated from the card's data sheet"
    return CARDS["T4"], f"{host.device_name} is not in our table: taken as fast as a T4"


def reached(card: Card, device: str, precision: str) -> tuple[float, float]:
    """Operations and bytes a second that a training on the card is expected to reach."""
    half, full, memory = REACHED["cuda" if device == "cuda" else "cpu"]
    if card.name == "Tesla T4":
        half = _HALF_OF_T4
    products = full * card.full_tflops if precision == "fp32" else half * card.half_tflops
    return products * 1e12, memory * card.bandwidth * 1e9


def _alike(name: str) -> list[Card]:
    """Cards whose number is a word of the name, as in "A100-PCIE-40GB"."""
    words = set(name.replace("-", " ").split())
    return [card for key, card in CARDS.items() if set(key.replace("-", " ").split()[:2]) & words - {"RTX"}]
