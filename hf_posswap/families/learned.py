"""Families with a learned absolute table, and no other position mechanism."""

from hf_posswap.families.base import Family, TableSpec, register

register(
    Family(
        name="gpt2",
        summary="GPT-2: learned table, causal",
        model_types=("gpt2",),
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
    )
)
register(
    Family(
        name="bert",
        summary="BERT: learned table, encoder (or decoder by config)",
        model_types=("bert",),
        table=TableSpec(
            "embeddings.position_embeddings", buffers=("embeddings.position_ids", "embeddings.token_type_ids")
        ),
        attention="encoder.layer.*.attention.self",
    )
)
register(
    Family(
        name="roberta",
        summary="RoBERTa: learned table whose positions skip padding, encoder (or decoder by config)",
        model_types=("roberta",),
        table=TableSpec(
            "embeddings.position_embeddings",
            offset="padding",
            config_counts_offset=True,
            buffers=("embeddings.position_ids", "embeddings.token_type_ids"),
        ),
        attention="encoder.layer.*.attention.self",
    )
)
