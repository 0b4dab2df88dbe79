"""A toy family, whole: our house has its own decoder, with a learned table like BERT's."""

from hf_posswap.families import Family, TableSpec, register

HOUSE = register(
    Family(
        name="house",
        summary="our house's decoder: learned table",
        model_types=("house",),
        table=TableSpec("embeddings.position_embeddings", buffers=("embeddings.position_ids",)),
        attention="encoder.layer.*.attention.self",
    )
)
