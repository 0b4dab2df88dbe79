"""The shape of a model: as a scheme sees it, and as its config says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from hf_posswap.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Layout = Literal["half", "interleaved"]


@dataclass(frozen=True)
class Geometry:
    """The shape of one model, as a scheme sees it.

    Attributes:
        hidden_size: E, the width of the hidden states.
        num_heads: H, query heads.
        num_kv_heads: G, key and value heads.
        head_dim: D, the width of one query or key head.
        num_layers: attention layers that a scheme reaches.
        original_length: positions the model was made for, in tokens.
        causal: whether a query sees only its past.
        rotary_dim: R, how many of the D dimensions the native rotary rotates; None where there is none.
        layout: how rotary pairs lie in a head: "half" pairs (i, i + R/2), "interleaved" pairs (2i, 2i + 1);
            None where there is no native rotary.
        base: theta of the native rotary; None where there is none.
        frequencies: theta_i of the native rotary's R/2 pairs as it turns them now, scaling included, radians per
            position; None where there is none, or where they follow the length of the input.
        attention_factor: what the native rotary multiplies cos and sin by.
        table_width: width of the position table's rows where it is not E: some models project their embeddings.
        sliding_window: the most keys that a query sees, in every rotary layer if any layer is rotary; None: unlimited.
        image_size: height and width, in pixels, of the images that the model was made for; None: it sees no images.
        patch_size: height and width of the patch of an image that becomes one token, in pixels; None as above.
        prefix_tokens: tokens before the patches that are not patches: class, distillation.
        scaled_length: positions to which a scaling in the config (YaRN, Llama 3's, LongRoPE) extends the original
            length, whether the weights were trained with it or not; None: there is no such scaling.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    original_length: int
    causal: bool
    rotary_dim: int | None = None
    layout: Layout | None = None
    base: float | None = None
    frequencies: tuple[float, ...] | None = None
    attention_factor: float = 1.0
    sliding_window: int | None = None
    table_width: int | None = None
    image_size: tuple[int, int] | None = None
    patch_size: tuple[int, int] | None = None
    prefix_tokens: int = 0
    scaled_length: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "original_length"):
            if getattr(self, name) < 1:
                raise UnsupportedModelError(
                    f"a model has a {name} of at least 1, and by its config this one's is {getattr(self, name)!r}: "
                    "check config.json against that of the original model."
                )

    @property
    def row_width(self) -> int:
        """Width of the position table's rows."""
        return self.table_width or self.hidden_size

    def grid(self, image_size: tuple[int, int] | None = None) -> tuple[int, int]:
        """Return the rows and columns of patches of an image; None: of the size that the model was made for.

        Example:
            >>> vit = Geometry(768, 12, 12, 64, 12, 197, False, image_size=(224, 224), patch_size=(16, 16))
            >>> vit.grid(), vit.grid((224, 320))
            ((14, 14), (14, 20))
        """
        size = image_size or self.image_size
        assert size is not None, "a model that sees no images has no patches"
        assert self.patch_size is not None
        return size[0] // self.patch_size[0], size[1] // self.patch_size[1]


@dataclass(frozen=True)
class ConfigSizes:
    """The sizes that the config of a text model says, under whichever name; of layers that differ, the largest.

    Attributes:
        hidden: E, the width of the hidden states.
        layers: number of layers.
        heads: H, query heads; 1 for a model without attention.
        kv_heads: G, key and value heads.
        head_dim: D, the width of a head.
        inner: width of the feed-forward network.
        vocabulary: number of tokens.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int

    _NAMES: ClassVar[dict[str, tuple[str, ...]]] = {
        "hidden": ("hidden_size",),
        "layers": ("num_hidden_layers",),
        "heads": ("num_attention_heads",),
        "kv_heads": ("num_key_value_heads",),
        "head_dim": ("head_dim",),
        "inner": ("intermediate_size", "n_inner", "ffn_dim"),
        "vocabulary": ("vocab_size",),
    }

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ConfigSizes:
        """Return the sizes of the text model of `config`.

        Raises:
            UnsupportedModelError: it says no width, number of layers or vocabulary.

        Example:
            >>> from transformers import GPT2Config
            >>> ConfigSizes.of(GPT2Config(n_embd=64, n_head=2, n_layer=3, vocab_size=100))
            ConfigSizes(hidden=64, layers=3, heads=2, kv_heads=2, head_dim=32, inner=256, vocabulary=100)
        """
        from hf_posswap.compat.transformers_models import layer_configs  # it imports torch

        text = config.get_text_config()
        largest = {}
        for size, names in cls._NAMES.items():
            values = [getattr(layer, name, None) for layer in layer_configs(text) for name in names]
            largest[size] = max((max(v) if isinstance(v, list | tuple) else v for v in values if v), default=0)
        heads = largest["heads"] or 1
        if not (largest["hidden"] and largest["layers"] and largest["vocabulary"]):
            raise UnsupportedModelError(
                "memory is estimated from hidden_size, num_hidden_layers and vocab_size, and the "
                f"{type(text).__name__} of this model does not have all of them: choose a text model."
            )
        otherwise = {
            "heads": heads,
            "kv_heads": heads,
            "head_dim": largest["hidden"] // heads,
            "inner": 4 * largest["hidden"],
        }
        return cls(**{size: value or otherwise[size] for size, value in largest.items()})
