"""A toy family, whole: BertGeneration keeps its learned table as BERT does, and is a decoder by its config."""

from hf_posswap.families import Family, TableSpec, register

BERT_GENERATION = register(
    Family(
        name="bert-generation",
        summary="BertGeneration: learned table, decoder (or encoder by config)",
        model_types=("bert-generation",),
        table=TableSpec("embeddings.position_embeddings", buffers=("embeddings.position_ids",)),
        attention="encoder.layer.*.attention.self",
    )
)
