"""Former names of recipe keys, for the error message when one is still used."""

from __future__ import annotations

_TRAINING = {
    "optimizer.steps": "max_steps",
    "optimizer.learning_rate": "learning_rate",
    "optimizer.schedule": "lr_scheduler_type",
    "optimizer.final_rate": "lr_scheduler_kwargs",
    "optimizer.warmup": "warmup_steps",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.clip": "max_grad_norm",
    "optimizer.batch": "per_device_train_batch_size",
    "optimizer.accumulate": "gradient_accumulation_steps",
    "optimizer.fused": "optim",
    "optimizer.precision": "bf16",
    "optimizer.seed": "seed",
    "compute.device": "use_cpu",
    "compute.checkpointing": "gradient_checkpointing",
    "compute.offload": "gradient_checkpointing_kwargs",
    "compute.compile": "torch_compile",
    "compute.workers": "dataloader_num_workers",
    "save.every": "save_steps",
    "save.keep": "save_total_limit",
    "save.push": "hub_model_id",
    "save.private": "hub_private_repo",
    "watch.log_every": "logging_steps",
    "watch.report_to": "report_to",
    "watch.evaluate_every": "eval_steps",
}
_PEFT = {
    "train.target": "target_modules",
    "train.rank": "r",
    "train.alpha": "lora_alpha",
    "train.dropout": "lora_dropout",
}
_KEPT = ("what", "embeddings", "norms", "positions_rate", "layer_decay")

OLD: dict[str, tuple[str, str]] = {
    **{old: (f"training.{new}", "TrainingArguments calls it") for old, new in _TRAINING.items()},
    **{old: (f"peft.{new}", "PEFT calls it") for old, new in _PEFT.items()},
    **{f"train.{name}": (f"trainable.{name}", "it is") for name in _KEPT},
    "watch.evaluate_lengths": ("evaluation.lengths", "it is"),
    "watch.evaluate_documents": ("evaluation.documents", "it is"),
    "watch.picture": ("out", "the picture is drawn where matplotlib is installed, into"),
    "stages[].steps": ("stages[].max_steps", "TrainingArguments calls it"),
}
"""Old key to new key, and the words that join them in the message."""
SECTIONS = {
    "optimizer": "training",
    "compute": "training",
    "save": "training",
    "watch": "training",
    "train": "trainable",
}
"""Removed sections, and the section that now has most of their keys."""
