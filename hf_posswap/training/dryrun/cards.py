"""What a GPU has, by its data sheet."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from hf_posswap.errors import OptionError, UnknownNameError
from hf_posswap.training.dryrun.work import Work

GIB = 1 << 30
_RESERVED = GIB
"""Of the CUDA context, of the work spaces of cuBLAS and NCCL: no tensor's, and no dry run sees them."""
_FRAGMENTED = 0.04
"""Of the memory: what the caching allocator cannot hand out, as long as pieces of it are in use."""
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Card:
    """A GPU, or a number of bytes of which nothing else is known.

    Attributes:
        name: as a person says it.
        memory: bytes.
        half: operations a second in bfloat16 and float16, dense, by tensor cores; 0: not known.
        single: operations a second in float32, as torch multiplies by default, without TF32.
        bandwidth: bytes a second between the memory and the chip.
        link: bytes a second that it sends to the others of its machine.
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
        """Return the least time that `work` takes: its operators one by one, and what is sent beside them.

        None: the card's speed is not known.
        """
        if not self.half:
            return None
        each = (
            count * max(flops / (self.half if kind in _HALF else self.single), moved / self.bandwidth)
            for (kind, flops, moved), count in work.items.items()
        )
        return max(sum(each), work.sent / self.link)


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
"""The cards that are known by name. A link is half of what both directions carry."""
_SIZE = re.compile(r"(\d{1,9}(?:\.\d+)?)\s*(GB|GiB|MB|MiB|G|M)?", re.IGNORECASE)
_UNITS = {"m": 1 << 20, "g": GIB}


def card_of(name: str) -> Card:
    """Return the card called `name`, or one of so much memory: "24GB".

    Raises:
        UnknownNameError: no card has that name, and it is no size of memory.
        OptionError: the memory is not larger than what CUDA itself takes.

    Example:
        >>> card_of("h100").memory == card_of("80GB").memory
        True
    """
    known = CARDS.get(name.strip().lower())
    if known is not None:
        return known
    found = _SIZE.fullmatch(name.strip())
    if found is None or not found[2]:
        raise UnknownNameError("GPU", name, [*CARDS, "a size such as 24GB"])
    card = Card(f"a GPU of {name.strip()}", int(float(found[1]) * _UNITS[found[2][0].lower()]))
    if card.usable <= 0:
        raise OptionError(f"--gpu {name}: CUDA itself takes about 1 GB; give the memory of a GPU, such as 24GB.")
    return card
