"""Checks of generation, for the sdist carries none: each holds for a stock model, so it must for a swapped one."""

from __future__ import annotations

from typing import Any

import torch


class Generating:
    """A mixin beside `ModelTesterMixin`."""

    all_generative_model_classes: tuple[Any, ...]
    model_tester: Any

    def test_generate_with_a_cache_as_without(self) -> None:
        for model, inputs in self._models():
            with_cache = _generated(model, inputs, use_cache=True)
            assert with_cache.tolist() == _generated(model, inputs, use_cache=False).tolist()

    def test_generate_with_beams_and_a_cache_as_without(self) -> None:
        for model, inputs in self._models():
            with_cache = _generated(model, inputs, num_beams=3, use_cache=True)
            assert with_cache.tolist() == _generated(model, inputs, num_beams=3, use_cache=False).tolist()

    def test_generate_with_a_static_cache_as_with_a_growing_one(self) -> None:
        for model, inputs in self._models():
            growing = _generated(model, inputs)
            assert growing.tolist() == _generated(model, inputs, cache_implementation="static").tolist()

    def test_generate_from_left_padded_prompts_as_from_each_alone(self) -> None:
        for model, inputs in self._models():
            if model.config.is_encoder_decoder:
                continue
            ids = inputs["input_ids"].clone()
            mask = torch.ones_like(ids)
            ids[0, :3], mask[0, :3] = model.config.pad_token_id, 0
            together = _generated(model, {"input_ids": ids, "attention_mask": mask})[0]
            alone = _generated(model, {"input_ids": ids[:1, 3:], "attention_mask": mask[:1, 3:]})[0]
            assert together[-6:].tolist() == alone[-6:].tolist()

    def test_generate_samples_alike_from_one_seed(self) -> None:
        for model, inputs in self._models():
            torch.manual_seed(1)
            first = _generated(model, inputs, do_sample=True)
            torch.manual_seed(1)
            assert first.tolist() == _generated(model, inputs, do_sample=True).tolist()

    def _models(self) -> Any:
        for cls in self.all_generative_model_classes:
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            config.initializer_range = 0.2
            yield cls(config).eval(), {name: inputs[name] for name in ("input_ids", "attention_mask")}


@torch.no_grad()
def _generated(model: Any, inputs: Any, **options: Any) -> torch.Tensor:
    return model.generate(**inputs, **{"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False} | options)
