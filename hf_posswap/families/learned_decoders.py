"""Decoders with a learned absolute table, and no other position mechanism."""

from hf_posswap.families.base import Family, TableSpec, register

register(
    Family(
        name="gpt2",
        summary="GPT-2, GPT-BigCode: learned table, causal",
        model_types=("gpt2", "gpt_bigcode"),
        table=TableSpec("wpe"),
        attention="h.*.attn",
    )
)
register(
    Family(
        name="opt",
        summary="OPT: learned table with two extra rows, causal",
        model_types=("opt",),
        entry="decoder",
        table=TableSpec("decoder.embed_positions", offset=2),
        attention="decoder.layers.*.self_attn",
        position_source="mask",
    )
)
register(
    Family(
        name="biogpt",
        summary="BioGPT: learned table with two extra rows, causal",
        model_types=("biogpt",),
        table=TableSpec("embed_positions", offset=2),
        attention="layers.*.self_attn",
    )
)
