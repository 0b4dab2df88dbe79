"""Where positions are in a vision model: its table of patches, found from the family's data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_posswap.compat.peft_wrappers import is_copy
from hf_posswap.errors import UnsupportedModelError
from hf_posswap.families.modules import get, has_buffer, join, who
from hf_posswap.geometry import Geometry


@dataclass(frozen=True)
class ImageSpec:
    """How the models of a family turn an image into tokens, each with a row of a learned table.

    Attributes:
        table: path of the parameter [P, E] or [1, P, E] that holds the table, below `embeddings`.
        patches: path of the convolution whose stride is the patch, below `embeddings`.
        prefix: tokens before the patches that are not patches: class, distillation.
        embeddings: path, from the base model, of the module that creates the tokens. Its forward takes the rows from
            its method `interpolate_pos_encoding`, always or if its argument of that name says so.
        ids: path of the buffer [1, P] with one entry a row, below `embeddings`; None: there is none.
        square_config: whether its code only supports square images from the config.
        square_heads: classes whose head assumes a square of patches.
    """

    table: str
    patches: str
    prefix: int
    embeddings: str = "embeddings"
    ids: str | None = None
    square_config: bool = False
    square_heads: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PatchTable:
    """The position table of a vision stack: one row per patch, after the rows of tokens that are not patches.

    Attributes:
        path: of the parameter [P, E] or [1, P, E] that holds it.
        embeddings: path of the module that turns an image into tokens.
        ids: path of the buffer with one entry a row, or None.
        square_config: whether the config can only express square images.
        square_head: whether the model's head assumes a square of patches.
    """

    path: str
    embeddings: str
    ids: str | None
    square_config: bool
    square_head: bool


def patch_table(model: nn.Module, root: nn.Module, base: str, spec: ImageSpec) -> PatchTable:
    """Return the table that `spec` describes in `model`, whose base model `root` is at `base`.

    Raises:
        UnsupportedModelError: the table is missing, or a swap has replaced it.
    """
    table, ids = join(spec.embeddings, spec.table), spec.ids and join(spec.embeddings, spec.ids)
    rows = tensor_at(root, table)
    if rows is None:
        raise UnsupportedModelError(f"{who(model)}: its family expects a table at {join(base, table)!r}, none there.")
    return PatchTable(
        path=join(base, table),
        embeddings=join(base, spec.embeddings),
        ids=join(base, ids) if ids and has_buffer(root, ids) else None,
        square_config=spec.square_config,
        square_head=who(model) in spec.square_heads,
    )


def image_geometry(
    model: nn.Module, config: Any, root: nn.Module, spec: ImageSpec, attention: list[str], causal: bool
) -> Geometry:
    """Return the geometry of a vision stack.

    Args:
        model: of which the stack is a part.
        config: the part of its config that the stack was built from.
        root: the module that all paths start from.
        spec: the family's data about its images.
        attention: paths of its attention modules.
        causal: whether a query sees only its past.

    Raises:
        UnsupportedModelError: the table does not have one row per token.
    """
    table = tensor_at(root, join(spec.embeddings, spec.table))
    assert table is not None
    rows = table.shape[-2] if table.ndim > 1 else 0
    stride: Any = root.get_submodule(join(spec.embeddings, spec.patches)).stride
    geometry = Geometry(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        num_layers=len(attention),
        original_length=rows,
        causal=causal,
        image_size=pair(config.image_size),
        patch_size=pair(stride),
        prefix_tokens=spec.prefix,
    )
    high, wide = geometry.grid()
    if rows != high * wide + spec.prefix:
        raise UnsupportedModelError(
            f"{who(model)}: its table has {rows} rows where images of {config.image_size} pixels give {high} x {wide} "
            f"patches after {spec.prefix} other tokens. A swap of a model that this is a part of, or of a part of "
            "this one, may have left them: ask that model, or take the swap back."
        )
    return geometry


def refuse_other_tables(model: nn.Module, table: str, kept: list[str], family: str) -> None:
    """Refuse a model with parameters that look like a second position table besides the one at `table`.

    Raises:
        UnsupportedModelError: it has one outside the paths `kept`.
    """
    for path, _ in model.named_parameters():
        leaf = path.rsplit(".", 1)[-1]
        # copies of a module that PEFT keeps are refused later, when a swap is planned
        copied = is_copy(path)
        claimed = copied or path == table or any(path.startswith(f"{parent}.") for parent in kept)
        if ("position" in leaf or "pos_embed" in leaf) and not claimed:
            raise UnsupportedModelError(
                f"{who(model)}: {path!r} looks like a part of the position mechanism, and family {family!r} does not "
                "mention it; patching the rest would leave it half-swapped."
            )


def tensor_at(root: nn.Module, path: str) -> Tensor | None:
    """Return the parameter or buffer at `path` below `root`, or None."""
    owner, _, leaf = path.rpartition(".")
    value = getattr(get(root, owner), leaf, None)
    return value if isinstance(value, Tensor) else None


def pair(size: Any) -> tuple[int, int]:
    """Return height and width of a size that may be one number for both.

    Example:
        >>> pair(224), pair([224, 320])
        ((224, 224), (224, 320))
    """
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
