"""A program: runs vLLM on checkpoints one after the other and stores what it answers, or how it refuses.

Usage: vllm_child.py CASES.json ANSWERS.json. Each case has folder, options (of vllm.LLM), prompts (token ids), tail
(token ids) and new, tokens to generate. All prompts are one batch: first with the log probability of each of their
tokens, then again, each with the tail behind it, from vLLM's cache of prefixes.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

COMMON = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "seed": 0,
    "disable_log_stats": True,
    "max_num_batched_tokens": 256,  # long prompts come in chunks, beside the others
    "num_gpu_blocks_override": 64,  # to write zeros into a whole GiB takes longer than the rest
}


def main(cases: str, answers: str) -> None:
    """Write the answers to each case."""
    with open(cases, encoding="utf-8") as file:
        asked = json.load(file)
    found: dict[str, Any] = {}
    for name, case in asked.items():
        try:
            found[name] = answer(case)
        except BaseException as error:  # engines may even exit
            found[name] = {"refused": str(error)}
        with open(answers, "w", encoding="utf-8") as file:
            json.dump(found, file)


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Return for each prompt the log probabilities of its tokens but the first, and of the new tokens both times."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    engine = None
    try:
        engine = LLM(case["folder"], **COMMON | case["options"])
        prompts = case["prompts"]
        first = ask(engine, prompts, case["new"], prompt_logprobs=0)
        again = ask(engine, [prompt + case["tail"] for prompt in prompts], case["new"])
        told = [scores(one.prompt_logprobs[1:], prompt[1:]) for one, prompt in zip(first, prompts, strict=True)]
        return {
            "told": told,
            "new": [new(one) for one in first],
            "again": [new(one) for one in again],
            "cached": [one.num_cached_tokens for one in again],
            "preempted": preemptions(engine),
        }
    finally:
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()


def preemptions(engine: Any) -> int | None:
    """Return how often a text gave its blocks of the cache up for another; None: the engine keeps no statistics."""
    if not engine.llm_engine.log_stats:
        return None
    return sum(metric.value for metric in engine.get_metrics() if metric.name == "vllm:num_preemptions")


def ask(engine: Any, prompts: list[list[int]], count: int, **options: Any) -> list[Any]:
    """Return what the engine makes of a batch of prompts, greedily."""
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0, max_tokens=count, logprobs=0, detokenize=False, ignore_eos=True, **options)
    return engine.generate([{"prompt_token_ids": ids} for ids in prompts], settings, use_tqdm=False)


def new(output: Any) -> dict[str, Any]:
    """Return the new tokens of one text, and their log probabilities."""
    made = output.outputs[0]
    return {"tokens": list(made.token_ids), "scores": scores(made.logprobs, made.token_ids)}


def scores(rows: Any, ids: Any) -> list[float]:
    """Return the log probability of each token, from a row of some for each."""
    return [row[token].logprob for row, token in zip(rows, ids, strict=True)]


if __name__ == "__main__":
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # errors come here as they are
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TORCHDYNAMO_DISABLE": "1",  # of vLLM's own helpers, which compile for minutes
    }
    main(sys.argv[1], sys.argv[2])
