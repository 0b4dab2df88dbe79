"""What a plan says of a scheme: what it does to attention, and what training the weights need."""

from __future__ import annotations

from hf_posswap.families.sites import Stack
from hf_posswap.geometry import Geometry
from hf_posswap.patching.own_attention import native_scheme
from hf_posswap.schemes.base import Mechanism, Scheme
from hf_posswap.schemes.blend import Blend
from hf_posswap.schemes.learned import Learned
from hf_posswap.schemes.rope import Rope, RotaryScheme


def effect_of(mechanism: Mechanism, *, cached: bool) -> str:
    """Return what `mechanism` does to the attention of a layer.

    Args:
        mechanism: of the layer.
        cached: whether keys may be cached.
    """
    effects = []
    if mechanism.splits:
        effects.append("scores in pieces, each with rotations of its own")
    if mechanism.rotates:
        effects.append("keys rotated" if mechanism.splits else "q and k rotated")
    if (mechanism.rotates or mechanism.splits) and cached:
        rotated = mechanism.rotates and mechanism.stores_rotated_keys
        several = f"{mechanism.copies} rotated keys a token cached"
        single = "keys before the cache" if rotated else "raw keys cached"
        effects.append(several if mechanism.copies > 1 else single)
    if mechanism.scales:
        effects.append("queries scaled by their position")
    if mechanism.biases:
        effects.append("bias on the scores")
    return ", ".join(effects) or "no positions"


def adaptation_of(scheme: Scheme, stack: Stack, length: int, *, same: bool) -> str:
    """Return what training the weights of `stack` need under `scheme`.

    Args:
        scheme: resolved.
        stack: of the model.
        length: that the swap is for.
        same: whether the scheme is what is native inside attention, and nothing else goes.
    """
    geometry, native_kind = stack.geometry, "rotary" if stack.rotary else "table"
    if stack.inside is not None:
        native_kind = native_scheme(stack.inside, geometry).kind
        if same:
            return "none: the same mechanism"
    if isinstance(scheme, Blend):
        return "as the weight moves: none at 0, where it is the old mechanism"
    if scheme.kind != native_kind:
        return "required: the weights have never met this mechanism; expect a high loss until they have adapted"
    if isinstance(scheme, Learned) and scheme.extend != "reinit":
        if length == geometry.original_length:
            return "none: the table is kept"
        return "for use beyond the original window: the new rows have not been trained there"
    if scheme.kind == "table":
        return "required: every position vector changes"
    if isinstance(scheme, RotaryScheme) and not _turns_native_pairs(scheme, geometry):
        return "required: the weights have never met pairs that turn like this"
    if type(scheme) is Rope and scheme.base == geometry.base and length <= geometry.original_length:
        return "none within the original window: the same mechanism"
    return "optional: usable untrained, better after a few hundred steps at the new length"


def _turns_native_pairs(scheme: RotaryScheme, geometry: Geometry) -> bool:
    """Return whether a rotary scheme turns the pairs that the model's own turned, in the manner of its kind."""
    same = scheme.layout == (geometry.layout or scheme.layout)
    own = geometry.frequencies or ()
    if 0.0 in own and scheme.rotary_dim(geometry) == 2 * len(own):  # some pairs of the model stand still
        angles = scheme.angles(geometry).inv_freq.tolist()
        same = same and all(bool(a) == bool(b) for a, b in zip(own, angles, strict=True))
    return same and scheme.rotary_dim(geometry) == geometry.rotary_dim and scheme.traits.training_free
