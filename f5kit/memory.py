"""What training takes of a device's memory, counted before anything is computed.

A model is made on torch's meta device, where tensors have shapes and no contents, and runs a real forward and backward
pass there, in seconds and on any machine. Two things are counted on the way: what autograd keeps for the backward pass
(saved-tensor hooks), and the most bytes that are alive at once (every tensor is seen as it is made and when it goes).
So the figures follow from the code of the backbones and hold for a change of it, with no formula to keep in step.

    b  items    n  mel frames    nt  text tokens    d  mel bins

The meta device knows no autocast and no fused attention. What CUDA's and the CPU's autocast do to the functions that
our models call is done by `_Rules` (https://docs.pytorch.org/docs/stable/amp.html, "Autocast Op Reference"). Not
counted: workspaces of cuBLAS and cuDNN and what the allocator loses by rounding, for which a plan leaves room.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import flop_registry

from f5kit.cfm import CFM, Draws
from f5kit.config import ModelConfig
from f5kit.data import Batch
from f5kit.lora import add_adapters
from f5kit.text import Tokenizer

GIB = 2**30
# Of state a parameter, on the device. Paged states leave it when there is need, which a plan counts on.
OPTIMIZER_BYTES = {"adamw": 8.0, "adamw8bit": 2.04, "paged_adamw8bit": 0.0}
_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
_SHALLOW = (2, 4)  # blocks; UNetT takes them in pairs
_ALIGNED = 512  # bytes: CUDA's allocator gives no less, and multiples of it

# What autocast does to functions that our models call: products in half precision, some others in fp32.
_TO_HALF = {F.linear, F.conv1d, torch.matmul, Tensor.matmul, Tensor.__matmul__, F.scaled_dot_product_attention}
_TO_FULL = {
    "cuda": {
        F.layer_norm, F.rms_norm, F.softplus, F.normalize, torch.linalg.vector_norm, Tensor.norm, Tensor.square,
        Tensor.pow, Tensor.__pow__, Tensor.sum, Tensor.cumsum, torch.exp, Tensor.exp,
    },
    "cpu": set(),
}  # fmt: skip


@dataclass(frozen=True)
class Footprint:
    """One forward and backward pass: bytes beside weights, gradients, averages and optimizer state, and its work."""

    saved: float
    """Bytes that are kept from the forward to the backward pass, casts of weights included."""
    forward: float
    """The most bytes alive at once before the backward pass starts."""
    backward: float
    """The most bytes alive at once from there on."""
    operations: float
    """Of products and attention, as torch.utils.flop_counter counts them: two for a product and its sum."""
    traffic: float
    """Bytes that all operations read and wrote."""
    launches: float
    """Operations that compute: on a GPU, kernels to start."""

    @property
    def peak(self) -> float:
        """The most bytes alive at once in both passes."""
        return max(self.forward, self.backward)

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(*(a + b for a, b in zip(self._values(), other._values(), strict=True)))

    def __sub__(self, other: Footprint) -> Footprint:
        return self + other * -1

    def __mul__(self, factor: float) -> Footprint:
        return Footprint(*(a * factor for a in self._values()))

    def _values(self) -> tuple[float, ...]:
        return self.saved, self.forward, self.backward, self.operations, self.traffic, self.launches


def simulate(
    config: ModelConfig,
    *,
    device: str = "cuda",
    precision: str = "fp32",
    checkpointing: str = "none",
    items: int,
    frames: int,
    tokens: int,
    lora_rank: int = 0,
) -> Footprint:
    """One forward and backward pass of `items` clips, padded to that many frames and tokens, on a "cuda" or "cpu"
    device that need not be there."""
    model = _shapes(config, lora_rank)
    model.transformer.recompute = checkpointing
    weights = [p for p in model.parameters() if p.requires_grad]
    for weight in weights:  # they are there from the pass before: accumulation adds to them
        weight.grad = torch.empty_like(weight)
    alive, rules = _Alive(_ALIGNED * (device == "cuda")), _Rules(device, _HALF.get(precision))
    with rules, alive:
        loss = model(*_unknown_batch(config, items, frames, tokens))
    rules.forget_casts()
    saved, forward, alive.peak = alive.now, alive.peak, 0
    with rules, alive:
        _backward(loss)
    return Footprint(saved, forward, alive.peak, alive.operations, alive.traffic, alive.launches)


class MemoryModel:
    """What a device needs to train a model of that config, by way of training and by padded frames in a pass.

    longest: frames of the longest clip; tokens: of the densest text, at that length. Ways of training are named as in
    `TrainConfig`. What a pass takes is affine in its frames: counted once for one clip and once for many, when asked.
    """

    def __init__(self, config: ModelConfig, device: str, precision: str, longest: int, tokens: int, lora_rank: int = 0):
        self.config, self.device, self.precision, self.longest, self.tokens = config, device, precision, longest, tokens
        self.lora_rank = lora_rank
        self.trained = count_parameters(config, lora_rank)
        self.parameters = count_parameters(config, lora_rank, frozen=True)
        self._costs: dict[tuple[str, int], tuple[Footprint, Footprint]] = {}
        self.correction = 1.0
        """Activations that a trial measured, over those that were counted."""

    def cost(self, checkpointing: str) -> tuple[Footprint, Footprint]:
        """What a pass takes whatever its size, and what each padded frame adds."""
        return self._cost(checkpointing, self.config.depth)

    def _cost(self, checkpointing: str, depth: int) -> tuple[Footprint, Footprint]:
        if (checkpointing, depth) not in self._costs:
            how = dict(device=self.device, precision=self.precision, checkpointing=checkpointing,
                       frames=self.longest, tokens=self.tokens, lora_rank=self.lora_rank if depth else 0)  # fmt: skip
            one, many = (footprint(self.config.replace(depth=depth), items=items, **how) for items in (1, 17))
            frame = (many - one) * (1 / (16 * self.longest))
            self._costs[checkpointing, depth] = one - frame * self.longest, frame
        return self._costs[checkpointing, depth]

    def step(self, frames: int, checkpointing: str) -> Footprint:
        """One pass over that many padded frames."""
        constant, frame = self.cost(checkpointing)
        return constant + frame * frames

    def _ends(self, frames: int, checkpointing: str) -> float:
        """The most bytes beside the gradients when the backward pass has come to the first block, or below it."""
        constant, frame = self._cost("none", 0)  # without blocks there is nothing to recompute
        below, step = constant + frame * frames, self.step(frames, checkpointing)
        return max(below.backward, step.backward - step.saved + below.saved)

    def kept_gb(self, optimizer: str, ema_offload: bool = False) -> float:
        """Weights, optimizer state and averages: what lies on the device all the time, gradients not counted."""
        trained = OPTIMIZER_BYTES[optimizer] + (0 if ema_offload else 4)
        return (4 * self.parameters + trained * self.trained) / GIB

    def allocated_gb(
        self, frames: int, checkpointing: str, optimizer: str, ema_offload: bool = False, accumulates: bool = True
    ) -> float:
        """The most that is allocated at once, as torch.cuda.max_memory_allocated counts it.

        An update in one pass makes its gradients while activations go; in several, they are there all the time.
        """
        step, gradients = self.step(frames, checkpointing), 4 * self.trained
        if accumulates or self.lora_rank:  # the gradients of adapters are next to nothing
            most = gradients + step.peak * self.correction
        else:
            end = self._ends(frames, checkpointing)
            most = max(step.peak * self.correction, gradients + end * self.correction)
        return self.kept_gb(optimizer, ema_offload) + most / GIB

    def largest(
        self, room_gb: float, checkpointing: str, optimizer: str, ema_offload: bool = False, accumulates: bool = True
    ) -> int:
        """The most padded frames in a pass that fit into that much allocated memory."""
        low, high = 0, 1 << 22
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.allocated_gb(middle, checkpointing, optimizer, ema_offload, accumulates) <= room_gb
            low, high = (middle, high) if fits else (low, middle)
        return low


def _backward(loss: Tensor) -> None:
    """loss.backward(), which itself would take the rules off while blocks are recomputed."""
    engine, one = torch.autograd.Variable._execution_engine, torch.ones_like(loss)
    engine.run_backward((loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)


@lru_cache(maxsize=256)
def footprint(config: ModelConfig, **how) -> Footprint:
    """`simulate` for deep models, from two shallow ones: every further block takes what the one before it took."""
    return _by_depth(config, lambda shallow: simulate(shallow, **how))


def _by_depth(config: ModelConfig, count):
    """What `count` says of a config, told by those of _SHALLOW depths."""
    shallow, deeper = _SHALLOW
    if config.depth <= deeper:
        return count(config)
    low, high = (count(config.replace(depth=depth)) for depth in _SHALLOW)
    return low + (high - low) * ((config.depth - shallow) / (deeper - shallow))


@lru_cache(maxsize=8)
def _shapes(config: ModelConfig, lora_rank: int) -> CFM:
    """The model without its values."""
    with torch.device("meta"):
        model = CFM(config, Tokenizer([" ", *(f"#{i}" for i in range(1, config.vocab_size))]))
        if lora_rank:
            add_adapters(model, lora_rank)
    return model.train()


def count_parameters(config: ModelConfig, lora_rank: int = 0, frozen: bool = False) -> int:
    """Parameters of a model of that config, without making one; with a rank, those of its adapters, and with `frozen`
    all the others too."""

    def count(shallow: ModelConfig) -> int:
        return sum(p.numel() for p in _shapes(shallow, lora_rank).parameters() if p.requires_grad or frozen)

    return round(_by_depth(config, count))


def _unknown_batch(config: ModelConfig, items: int, frames: int, tokens: int) -> tuple[Batch, Draws]:
    """A batch and its draws as shapes alone."""
    b, n, d = items, frames, config.mel.n_mels
    with torch.device("meta"):
        whole, truth = partial(torch.empty, dtype=torch.long), partial(torch.empty, dtype=torch.bool)
        batch = Batch(torch.empty(b, n, d), whole(b), whole(b, tokens), whole(b), [""] * b, 0, whole(b))
        return batch, Draws(torch.empty(b, n, d), torch.empty(b), truth(b, n), truth(b), truth(b))


def counted() -> _Alive:
    """A with block in which every tensor that is made is counted, on any device: `peak` is the most bytes at once.

    What was there before is not counted, nor is changing it in place.
    """
    return _Alive()


class _Alive(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, and what the operations cost."""

    def __init__(self, aligned: int = 0):
        super().__init__()
        self.now = self.peak = self.operations = self.traffic = self.launches = 0
        self._aligned, self._known = aligned, weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        self._known.update(t.untyped_storage() for t in inputs)  # they were there before
        made = func(*args, **kwargs)
        outputs = [t for t in tree_flatten(made)[0] if isinstance(t, Tensor)]
        for tensor in outputs:
            self._see(tensor.untyped_storage())
        if not func.is_view:
            self.launches += 1
            self.traffic += sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes())
                                for t in (*inputs, *outputs))  # fmt: skip
        if count := flop_registry.get(func.overloadpacket):
            self.operations += count(*args, **kwargs, out_val=made)
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        if self._aligned:
            size = -(-size // self._aligned) * self._aligned
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, size)

    def _gone(self, size: int) -> None:
        self.now -= size


class _Rules(TorchFunctionMode):
    """What a device does that the meta device doesn't: autocast, fused attention, and answers that need values.

    Masks are taken to be needed, and every frame to be missing from the clip: the most that a batch can take.
    """

    def __init__(self, device: str, half: torch.dtype | None):
        super().__init__()
        self.device, self.half = device, half
        self._casts: dict[int, Tensor] | None = {}

    def forget_casts(self) -> None:
        """The end of autocast: from here on a weight is cast each time, as recomputing does."""
        self._casts = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is Tensor.__bool__:
            return False
        if func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            places = [torch.empty(args[1].numel(), dtype=torch.long, device="meta") for _ in args[1].shape]
            return args[0][tuple(places)]
        if self.half and func in _TO_HALF:
            args, kwargs = tree_map_only(Tensor, self._to_half, (args, kwargs))
        elif self.half and func in _TO_FULL[self.device]:
            args, kwargs = tree_map_only(Tensor, lambda t: t.float() if t.dtype == self.half else t, (args, kwargs))
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        return func(*args, **kwargs)

    def _to_half(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        if self._casts is None or not tensor.is_leaf or not tensor.requires_grad:
            return tensor.to(self.half)
        if id(tensor) not in self._casts:
            self._casts[id(tensor)] = tensor.to(self.half)
        return self._casts[id(tensor)]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Fused attention: its memory grows with the frames, not with their square."""
        bias = None
        if attn_mask is not None:
            b, h, n, m = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
            if self.device == "cuda":  # numbers in place of truth values, in rows of a multiple of 16
                bias = torch.empty(b, 1, 1, -(-m // 16) * 16, dtype=q.dtype, device="meta")[..., :m].expand(b, h, n, m)
            else:
                bias = torch.empty(b, 1, 1, m, dtype=q.dtype, device="meta")
        if self.device == "cuda":
            needs_grad = any(t.requires_grad for t in (q, k, v))
            return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, needs_grad)[0]
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)[0]
