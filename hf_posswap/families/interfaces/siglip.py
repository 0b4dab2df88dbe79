"""SigLIP: an attention class with the interface that does not pass its keyword arguments on."""

from __future__ import annotations

from transformers.models.clip.modeling_clip import CLIPAttention, eager_attention_forward
from transformers.models.siglip.modeling_siglip import SiglipAttention


class SiglipInterface(SiglipAttention):
    """SiglipAttention with the forward of CLIP's: the same arithmetic, and keyword arguments are passed on."""

    forward = CLIPAttention.forward  # type: ignore[assignment]  # it names its keyword arguments
    eager_attention = staticmethod(eager_attention_forward)
