"""Finding the positions of a model and their geometry; a position module that its family does not list is refused."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_posswap.compat.peft_wrappers import is_copy
from hf_posswap.compat.torch_tensors import holds_values
from hf_posswap.compat.transformers_attention import quarter_turn
from hf_posswap.errors import UnsupportedModelError
from hf_posswap.families.base import FAMILIES, Family, ImageSpec, StackSpec, TableSpec
from hf_posswap.families.modules import (
    get,
    has_buffer,
    join,
    matching,
    modeling_module,
    module_paths,
    table_at,
    tensor_at,
    who,
)
from hf_posswap.families.rope_config import (
    buffer_name,
    config_at,
    config_path,
    factor_of,
    inv_freq_names,
    layer_config,
    parameters_of,
    reaching,
    rope_sets,
    rope_settings,
)
from hf_posswap.families.sites import PatchTable, Sites, Stack, TokenTable
from hf_posswap.geometry import Geometry, Layout
from hf_posswap.rope_math import default_inv_freq

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


_RECURRENT = "its layers are recurrent: they have no attention and no positions"
_HYBRID = "its attention has no positions: the recurrent layers in between encode the order"
_RELATIVE = "its custom attention code mixes relative positions into the scores"
_HASHED = "its custom code chooses which parts of a sequence it attends to (windows, blocks, hashes, landmarks)"
_SEVERAL = "it takes more than a sequence of tokens (layout, speech, several streams), each with separate positions"
_OWN_CODE = "its positions and its attention are custom code, without transformers' AttentionInterface"
_DRAFTS = "it drafts for another model and reads that model's keys, which must not change"
_THETAS = "each layer has its own theta, in config.layer_rope_theta and not in the rope parameters"

REFUSED: dict[str, str] = {
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), _RECURRENT),
    **dict.fromkeys(("jamba", "kimi_linear", "nemotron_h", "zamba", "nemo_speechlm"), _HYBRID),
    **dict.fromkeys(("cpmant", "funnel", "inkling_text", "inkling2_text", "inkling2_loop_text", "xlnet"), _RELATIVE),
    **dict.fromkeys(("mra", "nystromformer", "pegasus_x", "reformer", "yoso"), _HASHED),
    **dict.fromkeys(
        (
            "musicgen",
            "musicgen_decoder",
            "musicgen_melody",
            "musicgen_melody_decoder",
            "seamless_m4t",
            "seamless_m4t_v2",
        ),
        _SEVERAL,
    ),
    "fsmt": _OWN_CODE,
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _DRAFTS),
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), _THETAS),
    "beit": "its custom attention code adds a learned bias for each pair of patches to the scores",
    "dinov2_with_registers": "its register tokens come after its table, which has no rows for them",
    "blt": "four stacks of layers, over bytes and over patches, each have their own rotary module",
    **dict.fromkeys(
        ("encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder"),
        "it combines two models of your choice: swap those, model.encoder and model.decoder",
    ),
    "vision-text-dual-encoder": (
        "it combines two models of your choice: swap those, model.vision_model and model.text_model"
    ),
    "ibert": "its position table is quantised with the rest of its weights",
    "fnet": "it uses Fourier transforms instead of attention, and they see padding too",
    "git": "images precede its text without positions, and its attention is custom code",
    "layoutlmv3": "its custom attention code adds a bias for distances in the text and on the page",
    "luke": "its entities have separate positions, in a second table that would have to change too",
    "perceiver": "it attends from learned latents to bytes: the table belongs to its preprocessor",
    "prophetnet": "it predicts several tokens ahead, in streams that each have relative positions",
    "recurrent_gemma": "its config has no length, and its attention sees only a window of the last tokens",
}
"""The reason by model type, as the end of a sentence that begins with the model's name."""


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family that `config` belongs to.

    Args:
        config: of a transformers model.

    Raises:
        UnsupportedModelError: there is none; the message says why, or lists similar model types and how to add a
            family.

    Example:
        >>> from transformers import GPT2Config
        >>> family_of(GPT2Config()).name
        'gpt2'
    """
    model_type = getattr(config, "model_type", None)
    families = [family for _, family in FAMILIES.items()]
    for family in families:
        if model_type in family.model_types:
            return family
    if model_type in REFUSED:
        raise UnsupportedModelError(f"model type {model_type!r} is not supported: {REFUSED[model_type]}.")
    for family in families:
        if family.matches is not None and family.matches(config):
            return family
    raise UnsupportedModelError(_unknown(model_type, families))


def _unknown(model_type: str | None, families: list[Family]) -> str:
    """Return a message in three lines: no family describes the model type, similar names, what to do."""
    for family in families:
        if family.name == model_type:  # and its rule refuses the config
            return (
                f"of model type {model_type!r} only this is supported: {family.summary}.\nThis config is of another "
                f"variant, such as one with rotary positions.\nWhat works: `posswap families {model_type}` shows what "
                "the family describes; page Extending, 'How to add a family'."
            )
    by_rule = {model_type for family in families for model_type in family.attention_proved or ()}  # such as llama
    known = by_rule.union(*((family.name, *family.model_types) for family in families))
    near = difflib.get_close_matches(str(model_type or ""), sorted(known), n=3)
    hint = f"Near names: {', '.join(map(repr, near))}. " if near else ""
    return (
        f"no family describes model type {str(model_type)!r}, and its config has no rope parameters to go by.\n"
        f"{hint}`posswap families` lists all {len(families)}.\n"
        "To add it, register a Family that says where its position table or rotary module and its self-attention are: "
        "page Extending, 'How to add a family'."
    )


def locate(model: PreTrainedModel) -> Sites:
    """Return where positions are in `model`, which may be on the meta device; for a swapped one, where they were.

    Args:
        model: a transformers model, without a PEFT model around it.

    Raises:
        UnsupportedModelError: no family, a missing path, or a position module that the family does not list.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> locate(model).table_path, locate(model).attention
        ('transformer.wpe', ('transformer.h.0.attn',))
    """
    swapped = getattr(model, "_posswap", None)
    if swapped is not None:  # the modules that the family lists are gone
        return swapped.plan.sites
    family = family_of(model.config)
    base = root_path = model.base_model_prefix if getattr(model, model.base_model_prefix, None) is not None else ""
    root = model.get_submodule(base)
    base = join(base, _tower(root, family))
    kept = [join(root_path, path) for path in family.kept]
    root = model.get_submodule(base)
    present = [spec for spec in family.parts if not spec.name or get(root, spec.entry) is not None]
    if not present:
        entries = ", ".join(repr(spec.entry) for spec in family.parts)
        raise UnsupportedModelError(f"{who(model)}: none of the stacks of family {family.name!r} is there: {entries}.")
    sites = Sites(family, base, tuple(_stack(model, root, base, family, spec) for spec in present))
    _refuse_unclaimed(model, sites, kept)
    return sites


def _tower(root: nn.Module, family: Family) -> str:
    """Return the path in `root` of the module that the family's paths start from."""
    present = [tower for tower in family.towers if get(root, tower) is not None]
    for tower in present:
        if any(matching(root.get_submodule(tower), spec.attention) for spec in family.parts):
            return tower
    return ""


def _stack(model: PreTrainedModel, root: nn.Module, base: str, family: Family, spec: StackSpec) -> Stack:
    attention = matching(root, spec.attention)
    rotary = [path for path in (family.rotary(root) if family.rotary else []) if path.startswith(spec.entry)]
    buffers = () if spec.table is None else spec.table.buffers
    if spec.table is not None and spec.table.absent is not None and spec.table.absent(model.config):
        spec = replace(spec, table=None)
    table = spec.table
    if table is not None and table_at(root, table.path) is None:
        raise UnsupportedModelError(
            f"{who(model)}: family {family.name!r} expects a table at {table.path!r}, none there."
        )
    if table is not None and not _is_whole(table, root):
        raise UnsupportedModelError(
            f"{who(model)}: the table at {table.path!r} was removed by a swap of the model that contains this one. "
            "Use the whole model, or take the swap back: unpatch_model(model)."
        )
    if not attention:
        raise UnsupportedModelError(f"{who(model)}: no self-attention modules at {spec.attention!r}.")
    if family.rotary and not rotary and (spec.traits is None or spec.traits.inside(model.config) is None):
        raise UnsupportedModelError(f"{who(model)} has no rotary module, nor any other positions: its config says so.")
    if spec.image is not None:
        return _image_stack(model, root, base, spec, attention)
    offset = _table_offset(table, root) if table else 0
    subconfig = _config_of(model, root, rotary)
    nope = _nope_layers(model, root, config_at(model.config, subconfig), family, attention) if rotary else ()
    return Stack(
        spec=spec,
        entry=join(base, spec.entry),
        attention=tuple(join(base, path) for path in attention),
        table=None if table is None else TokenTable(join(base, table.path), offset, table.kind, table.computed),
        buffers=tuple(join(base, path) for path in buffers if has_buffer(root, path)),
        rotary=tuple(join(base, path) for path in rotary),
        geometry=geometry_of(model, config_at(model.config, subconfig), root, spec, attention, rotary, offset, nope),
        config=subconfig,
        rope_layer_types=rope_sets(root.get_submodule(rotary[0])) if rotary else (),
        inside=None if spec.traits is None else spec.traits.inside(model.config),
        nope_layers=nope,
        position_source=spec.counted_by(config_at(model.config, subconfig)),
    )


def _nope_layers(
    model: PreTrainedModel, root: nn.Module, config: PreTrainedConfig, family: Family, attention: list[str]
) -> tuple[int, ...]:
    """Return which of the `attention` modules, counted from 0, do not rotate."""
    rotates = family.rotates.get(config.model_type)
    if rotates is None:
        return ()
    nope = tuple(layer for layer, path in enumerate(attention) if not rotates(root.get_submodule(path)))
    if len(nope) == len(attention):
        raise UnsupportedModelError(f"{who(model)}: none of its layers rotates, so it has no positions to swap.")
    return nope


def _image_stack(model: PreTrainedModel, root: nn.Module, base: str, spec: StackSpec, attention: list[str]) -> Stack:
    assert spec.image is not None
    subconfig = config_path(model.config, root.config)
    if subconfig is None:
        raise UnsupportedModelError(
            f"{who(model)}: its vision part was built from a different config than the model's."
        )
    config = config_at(model.config, subconfig)
    causal = causal_of(model, config, root, spec, attention)
    return Stack(
        spec=spec,
        entry=join(base, spec.entry),
        attention=tuple(join(base, path) for path in attention),
        table=patch_table(model, root, base, spec.image),
        buffers=(),
        rotary=(),
        geometry=image_geometry(model, config, root, spec.image, attention, causal),
        config=subconfig,
    )


def _config_of(model: PreTrainedModel, root: nn.Module, rotary: list[str]) -> str:
    """Return the path of the sub-config that the model's rotary modules were built from."""
    configs = (getattr(root.get_submodule(path), "config", None) for path in rotary)
    paths = {config_path(model.config, config) for config in configs if config is not None}
    if len(paths) > 1 or None in paths:
        raise UnsupportedModelError(
            f"{who(model)}: its rotary modules ({', '.join(rotary)}) were built from different or altered copies of "
            "the config, so no single config describes them."
        )
    return paths.pop() or "" if paths else ""


def _is_whole(table: TableSpec, root: nn.Module) -> bool:
    """Return whether the table is the original one and not what a swap left there."""
    padded = table.offset != "padding" or getattr(get(root, table.path), "padding_idx", None) is not None
    rows = table_at(root, table.path)
    return padded and rows is not None and rows.ndim == 2


def _table_offset(table: TableSpec, root: nn.Module) -> int:
    if table.offset != "padding":
        return table.offset
    return int(root.get_submodule(table.path).padding_idx) + 1  # type: ignore[arg-type]


def _refuse_unclaimed(model: PreTrainedModel, sites: Sites, kept: list[str]) -> None:
    """Refuse a model with a rotary module or a position table that its family does not list."""
    claimed: set[nn.Module | None] = set()
    learned = [join(path, name) for path in sites.rotary for name, _ in model.get_submodule(path).named_parameters()]
    if learned:
        raise UnsupportedModelError(
            f"{who(model)}: weights change the angles of its rotary module ({', '.join(learned)}); a swap of the rope "
            "parameters would drop them."
        )
    attention = tuple(f"{path}." for stack in sites.stacks for path in stack.attention)
    for stack in sites.stacks:
        claimed |= {get(model, path) for path in stack.rotary}
        if isinstance(stack.table, PatchTable):
            claimed.add(get(model, stack.table.path.rpartition(".")[0]))
            refuse_other_tables(model, stack.table.path, kept, sites.family.name)
        elif stack.table is not None:
            claimed.add(get(model, stack.table.path))
    for path, module in module_paths(model):
        leaf = path.rsplit(".", 1)[-1]
        table_like = isinstance(module, nn.Embedding) and ("position" in leaf or leaf in {"wpe", "pos_embed"})
        mentioned = module in claimed or any(path == parent or path.startswith(f"{parent}.") for parent in kept)
        computed = "PositionalEmbedding" in type(module).__name__ or (
            "RotaryEmbedding" in type(module).__name__
            and path.startswith(attention)  # which provides angles to no other module
        )
        if (inv_freq_names(module) or table_like or computed) and not mentioned:
            raise UnsupportedModelError(
                f"{who(model)}: {path!r} ({type(module).__name__}) looks like a part of the position mechanism, and "
                f"family {sites.family.name!r} does not mention it; patching the rest would leave it half-swapped."
            )


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


def geometry_of(
    model: PreTrainedModel,
    config: PreTrainedConfig,
    root: nn.Module,
    spec: StackSpec,
    attention: list[str],
    rotary: list[str],
    offset: int,
    still: tuple[int, ...] = (),
) -> Geometry:
    """Return the geometry of a stack of `model`.

    Args:
        model: of which the stack is a part.
        config: the part of its config that the stack was built from.
        root: the module that all paths start from.
        spec: the family's data about the stack.
        attention: paths of its attention modules.
        rotary: paths of its native rotary modules.
        offset: rows of its table before position 0.
        still: which of its attention modules, counted from 0, do not rotate.

    Raises:
        UnsupportedModelError: its layers differ, or its config has no length.
    """
    turning = reaching(rope_sets(root.get_submodule(rotary[0]))) if rotary else ("",)
    config, whole = layer_config(config, turning[0]), config
    kv_heads = None if spec.heads else getattr(config, "num_key_value_heads", None)
    own_width = _head_dim(whole, root, attention, turning[0]) if turning[0] else None
    if spec.traits is not None and spec.traits.heads is not None:
        heads, head_dim = spec.traits.heads(config)
    else:
        heads = getattr(config, spec.heads or "num_attention_heads")
        narrower = getattr(root.get_submodule(attention[0]), "attention_head_size", None)  # MobileBERT's
        head_dim = own_width or getattr(config, "head_dim", None) or narrower or config.hidden_size // heads
    length, width = _extent(model, config, root, spec, offset)
    rotation, scaled = {}, None
    if rotary:
        first, parameters = root.get_submodule(rotary[0]), _common(model, whole, turning)
        frequencies, factor = _own_angles(first, whole, turning[0])
        rotation = {
            "rotary_dim": 2 * getattr(first, buffer_name(turning[0])).shape[-1],
            "frequencies": frequencies,
            "attention_factor": factor,
            "base": float(parameters.get("rope_theta") or 10000.0),
            "layout": rotary_layout(root.get_submodule(attention[0])),
        }
        original = parameters.get("original_max_position_embeddings") or length
        scaled, length = length if length > original else None, original
    inside = None if spec.traits is None else spec.traits.inside(config)
    if inside is not None and inside["name"] == "rope":
        rotary_dim = round(head_dim * inside["partial"])
        rotation |= {"rotary_dim": rotary_dim, "base": inside["base"], "layout": inside["layout"]}
        rotation["frequencies"] = tuple(default_inv_freq(inside["base"], rotary_dim).tolist())
    return Geometry(
        hidden_size=config.hidden_size,
        table_width=None if width == config.hidden_size else width,
        num_heads=heads,
        num_kv_heads=kv_heads or heads,
        head_dim=head_dim,
        num_layers=len(attention),
        original_length=length,
        causal=causal_of(model, config, root, spec, attention),
        sliding_window=_sliding_window(config, still),
        scaled_length=scaled,
        **rotation,
    )


def causal_of(
    model: PreTrainedModel, config: PreTrainedConfig, root: nn.Module, spec: StackSpec, attention: list[str]
) -> bool:
    """Return whether a query sees only its past."""
    if causal_by_config(config) is False:  # transformers then makes a mask that shows both sides
        return False
    if spec.causal is not None:
        return spec.causal
    if spec.traits is not None and spec.traits.causal is not None:
        return spec.traits.causal(config)
    causal = {bool(getattr(root.get_submodule(path), "is_causal", True)) for path in attention}
    if len(causal) > 1:
        raise UnsupportedModelError(f"{who(model)}: some attention layers are causal and some are not.")
    return causal.pop()


def causal_by_config(config: PreTrainedConfig | None) -> bool | None:
    """Return whether `config` lets a token see only its past; None: it does not say."""
    gemmas = getattr(config, "use_bidirectional_attention", "unknown")  # "vision" is for tokens of images alone
    causal = getattr(config, "is_causal", None)
    if gemmas in (True, "all"):
        return False
    return True if causal is None and gemmas != "unknown" else causal


def _extent(
    model: PreTrainedModel, config: PreTrainedConfig, root: nn.Module, spec: StackSpec, offset: int
) -> tuple[int, int]:
    """Return the original length of a stack, and the width of its table rows."""
    if spec.table is not None:
        rows, width = table_at(root, spec.table.path).shape  # type: ignore[union-attr]
        return (config.max_position_embeddings if spec.table.computed else rows - offset), width
    length = spec.length_in(config)
    if length is None:
        raise UnsupportedModelError(f"{who(model)}: its config has no length ({TableSpec.config_name}).")
    return length, config.hidden_size


def _common(model: PreTrainedModel, config: PreTrainedConfig, turning: tuple[str, ...]) -> dict[str, Any]:
    """Return the rope parameters of the layers that a rotary scheme replaces, which must be the same in all of them."""
    parameters = [parameters_of(config, name) for name in turning]
    if any(other != parameters[0] for other in parameters[1:]):
        raise UnsupportedModelError(
            f"{who(model)}: its layers of types {', '.join(turning)} see all tokens and rotate differently, so no "
            "single scheme can replace them."
        )
    return parameters[0]


def _head_dim(config: PreTrainedConfig, root: nn.Module, attention: list[str], rope_set: str) -> int | None:
    """Return the width of a head in the layers of one type, if their attention modules have it."""
    types = getattr(config, "layer_types", None) or []
    layers = [root.get_submodule(path) for path in attention]
    widths = {getattr(m, "head_dim", None) for m in layers if types[getattr(m, "layer_idx", 0)] == rope_set}
    return widths.pop() if len(widths) == 1 else None


def _sliding_window(config: PreTrainedConfig, still: tuple[int, ...]) -> int | None:
    """Return the most keys that a query sees, if all layers except the `still` ones have that limit."""
    types = {layer_type for i, layer_type in enumerate(getattr(config, "layer_types", None) or []) if i not in still}
    if types == {"chunked_attention"}:
        return config.attention_chunk_size
    window = getattr(config, "sliding_window", None)
    some_see_all = types - {"sliding_attention"}
    return None if some_see_all or getattr(config, "use_sliding_window", True) is False else window


def _own_angles(rotary: nn.Module, config: PreTrainedConfig, rope_set: str) -> tuple[tuple[float, ...] | None, float]:
    """Return theta_i of a set of the module `rotary`, and its factor on cos and sin; None where they follow the length.

    They are computed from the config, because a module on meta has none, and a module that was ever cast has lost
    digits, whatever its dtype now. If the module does not match its config, its own values are used.
    """
    name = buffer_name(rope_set)
    if any(each.follows_length for each in rope_settings(config) if each.layer_type == rope_set):
        return None, 1.0
    current = getattr(rotary, name)
    try:
        with torch.device("cpu"):
            exact = type(rotary)(config)
    except Exception:  # arbitrary model code, which may take other arguments
        exact = rotary
    if rounds(current, getattr(exact, name)):
        rotary, current = exact, getattr(exact, name)
    return tuple(current.detach().float().cpu().tolist()), factor_of(rotary, rope_set)


def rounds(current: torch.Tensor, exact: torch.Tensor) -> bool:
    """Return whether the frequencies `current` may be a cast of `exact`, to float16 at worst; on meta, always.

    Example:
        >>> rounds(torch.tensor([0.75, 0.0]), torch.tensor([0.74989, 5e-8])), rounds(torch.ones(1), 2 * torch.ones(1))
        (True, False)
    """
    if current.shape != exact.shape:
        return False
    return not holds_values(current) or torch.allclose(
        current.float().cpu(), exact.float().cpu(), rtol=2**-7, atol=2**-24
    )


def rotary_layout(attention: nn.Module) -> Layout | None:
    """Return how the model's own code pairs rotary dimensions, detected by running it; None: unknown."""
    turned = quarter_turn(modeling_module(attention), torch.tensor([[1.0, 2.0, 3.0, 4.0]], device="cpu"))
    if turned is None:
        return None
    layouts: dict[tuple[float, ...], Layout] = {(-3, -4, 1, 2): "half", (-2, 1, -4, 3): "interleaved"}
    return layouts.get(tuple(turned.flatten().tolist()))


def image_geometry(
    model: nn.Module, config: PreTrainedConfig, root: nn.Module, spec: ImageSpec, attention: list[str], causal: bool
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


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Return height and width of a size that may be one number for both.

    Example:
        >>> pair(224), pair([224, 320])
        ((224, 224), (224, 320))
    """
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
