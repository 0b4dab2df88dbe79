"""GPUs by their data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from hf_posswap.errors import OptionError, UnknownNameError
from hf_posswap.training.dryrun.work import Work

GIB = 1 << 30
_RESERVED = GIB
"""Bytes of the CUDA context and of the workspaces of cuBLAS and NCCL, which hold no tensors."""
_FRAGMENTED = 0.04
"""Share of the memory that the caching allocator loses to fragmentation."""
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Card:
    """A GPU, or a memory size of which nothing else is known.

    Attributes:
        name: for messages.
        memory: bytes.
        half: dense tensor-core operations a second in bfloat16 and float16; 0: not known.
        single: operations a second in float32 without TF32, torch's default.
        bandwidth: bytes a second between memory and chip.
        link: bytes a second that it sends to the other GPUs of its machine.
        source: of these numbers.
    """

    name: str
    memory: int
    half: float = 0.0
    single: float = 0.0
    bandwidth: float = 0.0
    link: float = 0.0
    source: str = ""

    @property
    def usable(self) -> int:
        """Bytes that tensors may take."""
        return int(self.memory * (1 - _FRAGMENTED)) - _RESERVED

    def seconds(self, work: Work) -> float | None:
        """Return the least time of `work`: its operators one by one, with communication overlapping them.

        None: the card's speed is not known.
        """
        if not self.half:
            return None
        operator_seconds = (
            count * max(flops / (self.half if dtype in _HALF else self.single), moved / self.bandwidth)
            for (dtype, flops, moved), count in work.items.items()
        )
        return max(sum(operator_seconds), work.sent / self.link)


CARDS = {
    "h100": Card(
        "H100 SXM, 80 GB", 80 * GIB, 989.4e12, 66.9e12, 3.35e12, 450e9,
        "NVIDIA H100 Tensor Core GPU data sheet (SXM5): https://resources.nvidia.com/en-us-tensor-core",
    ),
    "a100": Card(
        "A100 SXM, 80 GB", 80 * GIB, 312e12, 19.5e12, 2.039e12, 300e9,
        "NVIDIA A100 Tensor Core GPU data sheet (SXM4, 80 GB): https://www.nvidia.com/en-us/data-center/a100/",
    ),
    "4090": Card(
        "GeForce RTX 4090, 24 GB", 24 * GIB, 165.2e12, 82.6e12, 1.008e12, 32e9,
        "NVIDIA Ada GPU Architecture white paper, appendix A (float32 accumulation), and PCIe 4.0 x16",
    ),
}  # fmt: skip
"""Known cards by name. The link is one direction's bandwidth."""
_SIZE = re.compile(r"(\d{1,9}(?:\.\d+)?)\s*(GB|GiB|MB|MiB|G|M)?", re.IGNORECASE)
_UNITS = {"m": 1 << 20, "g": GIB}


def card_of(name: str) -> Card:
    """Return the card called `name`, or one with that much memory ("24GB").

    Raises:
        UnknownNameError: `name` is neither a card nor a memory size.
        OptionError: the memory is not larger than what CUDA itself takes.

    Example:
        >>> card_of("h100").memory == card_of("80GB").memory
        True
    """
    known = CARDS.get(name.strip().lower())
    if known is not None:
        return known
    size = _SIZE.fullmatch(name.strip())
    if size is None or not size[2]:
        raise UnknownNameError("GPU", name, [*CARDS, "a size such as 24GB"])
    card = Card(f"a GPU of {name.strip()}", int(float(size[1]) * _UNITS[size[2][0].lower()]))
    if card.usable <= 0:
        raise OptionError(f"--gpu {name}: CUDA itself takes about 1 GB; give the memory of a GPU, such as 24GB.")
    return card
