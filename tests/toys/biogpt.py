"""A toy family, whole: BioGPT keeps its learned table as OPT does, with two rows before position 0."""

from hf_posswap.families import Family, TableSpec, register

BIOGPT = register(
    Family(
        name="biogpt",
        summary="BioGPT: learned table with two extra rows, causal",
        model_types=("biogpt",),
        table=TableSpec("embed_positions", offset=2),
        attention="layers.*.self_attn",
    )
)
