"""Search of LongRoPE's divisors for one model, on a few of the user's documents.

Ding et al. 2024, https://arxiv.org/abs/2402.13753, section 3.2. Details that the paper leaves open follow its authors'
code: a probability of 0.3 for each gene, 20 attempts to find a new candidate. Two extensions make YaRN a member of the
space: seeds may be off the grid of 0.01, and the factor on cos and sin is a gene as well.

A `Session` is one run of a search, from its saved state to its result.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_posswap.compat.transformers_loading import unpack_4_bit_weights
from hf_posswap.compat.transformers_models import without_origin
from hf_posswap.errors import CheckpointError, OptionError
from hf_posswap.geometry import Geometry
from hf_posswap.patching.apply.guard import alone
from hf_posswap.patching.apply.version_guard import package_digest
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.schemes import LongRope
from hf_posswap.text.tokens import check_token_ids
from hf_posswap.training.search.candidates import (
    Candidate,
    SearchSettings,
    Space,
    as_candidate,
    attention_choices,
    searched_geometry,
    searched_positions,
    seed_schemes,
    target_length,
)
from hf_posswap.training.search.evolution import Evolution, Progress, documents_digest, load_progress, save_progress
from hf_posswap.training.search.fitness import Interrupts, leading_documents, scheme_loss
from hf_posswap.utils.devices import evaluating
from hf_posswap.utils.digests import json_digest, weights_digest
from hf_posswap.utils.progress import reporter_for
from hf_posswap.utils.result_views import ResultView

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_posswap.utils.progress import Reporter, Task


@dataclass(frozen=True, repr=False)
class LongRopeSearch(ResultView):
    """The result of `search_longrope`.

    Attributes:
        scheme: the best scheme, resolved, for `patch_model(model, result.scheme)`.
        perplexity: its perplexity on the documents, over all tokens except the first of each.
        seeds: perplexities of the initial schemes, by name.
        log: the best perplexity after each iteration, starting with the first population.
        evaluations: the number of measured candidates after each iteration.
        length: tokens of each document.
        documents: number of documents.
        original_positions: the tried values of n-hat.

    Example:
        >>> scheme = LongRope(factor=2.0, long_factor=(1.0, 2.0))
        >>> print(LongRopeSearch(scheme, 9.0, {"yarn": 9.5}, (9.5, 9.0), (4, 6), 64, 2, (0,)))
        perplexity 9 after 6 evaluations (yarn 9.5) on 2 documents of 64 tokens
    """

    scheme: LongRope
    perplexity: float
    seeds: dict[str, float]
    log: tuple[float, ...]
    evaluations: tuple[int, ...]
    length: int
    documents: int
    original_positions: tuple[int, ...]

    def __str__(self) -> str:
        seeds = ", ".join(f"{name} {perplexity:.6g}" for name, perplexity in self.seeds.items())
        return (
            f"perplexity {self.perplexity:.6g} after {self.evaluations[-1]} evaluations ({seeds}) on {self.documents} "
            f"documents of {self.length} tokens"
        )

    def _repr_facts(self) -> dict[str, object]:
        return {
            "perplexity": self.perplexity,
            "factor": self.scheme.factor,
            "seeds": self.seeds,
            "evaluations": self.evaluations[-1],
        }

    def _html_rows(self) -> list[tuple[str, str]]:
        return [
            ("perplexity", f"{self.perplexity:.6g} on {self.documents} documents of {self.length} tokens"),
            *((f"perplexity of {name}", f"{perplexity:.6g}") for name, perplexity in self.seeds.items()),
            ("evaluations", str(self.evaluations[-1])),
            ("scheme", str(self.scheme)),
        ]

    def to_dict(self) -> dict[str, object]:
        """Return the result as JSON data."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        return values | {"scheme": self.scheme.to_dict()}


@dataclass(frozen=True)
class Session:
    """A validated search.

    Attributes:
        model: the model to measure.
        documents: token ids [N, L].
        geometry: the model's geometry.
        settings: the settings of the search.
        positions: values of n-hat to try.
        path: file of the state; None: it is not saved.
    """

    model: PreTrainedModel
    documents: np.ndarray
    geometry: Geometry
    settings: SearchSettings
    positions: tuple[int, ...]
    path: Path | None

    def identity(self) -> dict[str, Any]:
        """Return the properties that a saved state must share with the search that resumes from it."""
        from transformers import __version__ as transformers_version

        settings = dataclasses.asdict(self.settings)
        del settings["iterations"]  # a resumed search may have more
        unpack_4_bit_weights(self.model)
        config = without_origin(json.loads(self.model.config.to_json_string()))
        return {
            "code of hf_posswap": package_digest()[:16],  # which changes with its version, and in a checkout more often
            "version of torch": str(torch.__version__),
            "version of transformers": transformers_version,
            "model": weights_digest(self.model),
            "config of the model": json_digest(config)[:16],
            "documents": documents_digest(self.documents),
            "original_positions": list(self.positions),
            **settings,
        }

    def progress(self) -> Progress:
        """Return the current progress."""
        if self.path is None:
            return Progress()
        progress = load_progress(self.path, self.identity())
        if progress.iteration > self.settings.iterations:
            raise CheckpointError(
                f"{self.path} is at iteration {progress.iteration}, past the requested {self.settings.iterations}: "
                "give as many or more, or another file."
            )
        return progress

    def run(self, progress: Progress, task: Task, interrupts: Interrupts) -> None:
        """Run the remaining iterations."""
        settings = self.settings
        seeds = seed_schemes(settings.factor, self.geometry)
        attention = attention_choices(settings.factor, self.geometry, seeds)
        space = Space(settings.factor, self.positions, attention, settings.mutation_rate)

        def loss(candidate: Candidate) -> float:
            scheme = candidate.scheme(settings.factor, self.geometry)
            measured = scheme_loss(self.model, scheme, self.documents, interrupts)
            task.advance(self.documents.size, measured)
            return measured

        evolution = Evolution(space, settings, progress, loss)
        identity = None if self.path is None else self.identity()
        while progress.iteration < settings.iterations:
            if progress.iteration < 0:
                evolution.start({name: as_candidate(scheme, self.geometry) for name, scheme in seeds.items()})
            else:
                evolution.step()
            if self.path is not None and identity is not None:
                save_progress(self.path, identity, progress)

    def result(self, progress: Progress) -> LongRopeSearch:
        """Return the result of a finished search."""
        best = progress.population[0]
        return LongRopeSearch(
            scheme=best.candidate.scheme(self.settings.factor, self.geometry),
            perplexity=math.exp(best.loss),
            seeds={name: math.exp(loss) for name, loss in progress.seeds.items()},
            log=tuple(math.exp(loss) for loss in progress.best),
            evaluations=tuple(progress.evaluations),
            length=self.documents.shape[1],
            documents=len(self.documents),
            original_positions=self.positions,
        )


@contextmanager
def progress_bar(total: int, done: int, reporter: Reporter | None) -> Iterator[Task]:
    """Show the progress of `total` evaluations, of which `done` are already finished; without a reporter, nothing."""
    from rich.console import Console

    from hf_posswap.utils.progress import Reporter

    silent = Reporter(Console(file=io.StringIO()))
    with (reporter or silent).task("searching LongRoPE", total) as task:
        task.skip(done)
        yield task


@alone()
def search_longrope(
    model: PreTrainedModel,
    texts: object,
    factor: float,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    population: int = 64,
    iterations: int = 40,
    mutation_rate: float = 0.3,
    original_positions: Sequence[int] | None = None,
    state: str | Path | None = None,
    seed: int = 0,
    native: bool = False,
    progress: bool | None = None,
    reporter: Reporter | None = None,
) -> LongRopeSearch:
    """Search the LongRoPE scheme with the lowest loss of `model` on `texts` at `factor` times its original length.

    The evolutionary search runs over the divisors (ascending, in [1, 1.25 s], in steps of 0.01), n-hat and the factor
    on cos and sin. To measure a candidate, the model is patched with it, reads the documents, and is restored bit by
    bit, also after an error or Ctrl-C. PI, NTK and YaRN are candidates, so the result is never worse than they are on
    these documents. Only the long divisors are searched: up to the original length the scheme divides by 1. The
    defaults need 1344 evaluations with one forward per document each.

    Args:
        model: a causal model with rotary positions, not swapped, or a PEFT model around one.
        texts: documents of at least `factor` times the original length: strings, or rows of token ids.
        factor: s, target length over original length, > 1.
        tokenizer: the model's tokenizer, for strings.
        population: candidates of the first population, at least 8; in each iteration the best half survives, and a
            quarter of mutations and a quarter of crossovers are added.
        iterations: number of iterations after the first population.
        mutation_rate: probability of each gene to change, in (0, 1].
        original_positions: values of n-hat to try; None: the paper's values below the original length, or only 0 if the
            model cannot be patched inside attention. Only 0 can be saved for stock transformers.
        state: a file that is updated after each iteration; a stopped search resumes from it, with the same result as an
            uninterrupted one. A finished search continues if it is given more iterations.
        seed: random seed.
        native: search only what stock transformers can run, which is `original_positions=[0]`.
        progress: show a bar of the candidates; None: in a notebook and on a terminal, unless
            HF_HUB_DISABLE_PROGRESS_BARS or `disable_progress_bar` of transformers turns bars off.
        reporter: shows the progress instead, as the command line does.

    Raises:
        OptionError: `native` was given with `original_positions`, or `progress` is not True, False or None.
        SchemeError: an invalid factor, population, rate, n-hat, ...
        DataError: texts are too short or of another model, or the model has no output head.
        UnsupportedSwapError, UnsupportedModelError: the model is not causal, not rotary, has no weights (meta), or no
            family describes it; or n-hat cannot be put in it.
        AlreadyPatchedError: the model carries a swap.
        CheckpointError: the state cannot be read or written, or belongs to another search.
        NumericError: a loss is not finite.
        ModelInUseError: a forward of the model is running, or another thread changes it.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        ...                      vocab_size=32, max_position_embeddings=16)
        >>> model = LlamaForCausalLM(config)
        >>> tokens = torch.arange(64).view(2, 32) % 32
        >>> result = search_longrope(model, tokens, 2.0, population=8, iterations=1, progress=False)
        >>> result.perplexity <= min(result.seeds.values()), result.scheme.factor
        (True, 2.0)
    """
    reporter = reporter_for(progress, reporter)
    if native and original_positions is not None:
        raise OptionError("native=True is original_positions=[0]: give one of them.")
    settings = SearchSettings(factor, population, iterations, mutation_rate, seed)
    target = unwrap(model)
    geometry = searched_geometry(target, settings.factor)
    positions = searched_positions(target, settings.factor, geometry, [0] if native else original_positions)
    documents = leading_documents(texts, tokenizer, target_length(settings.factor, geometry))
    check_token_ids(target, documents)
    search = Session(target, documents, geometry, settings, positions, None if state is None else Path(state))
    search_progress = search.progress()
    with (
        progress_bar(settings.evaluations, len(search_progress.seen), reporter) as task,
        Interrupts() as interrupts,
        evaluating(target),
    ):
        search.run(search_progress, task, interrupts)
    return search.result(search_progress)
