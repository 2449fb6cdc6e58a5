"""Tasks of lm-evaluation-harness through one loaded model, dense and sparse side by side."""

# N examples of a task

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mreader.errors import MreaderError, SourceError, UsageError
from mreader.runtime import Mode, reader_mode

# How the two run: what is scored (likelihoods), and what is generated (prefill is dense in both)
_DENSE: tuple[Mode, Mode] = ("never", "never")
_SPARSE: tuple[Mode, Mode] = ("always", "decode")


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task, or of a group of tasks.

    metric:     as lm-eval names it, with its filter, like "acc,none"
    difference: sparse less dense
    error:      standard error of the difference over examples that both answered; None where the metric is no mean
    examples:   N; None for a group
    """

    task: str
    metric: str
    dense: float
    sparse: float
    difference: float
    error: float | None
    examples: int | None


def require_lm_eval() -> None:
    """UsageError where it is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError("lm-eval is not installed", "pip install 'mreader[eval]'")


def run_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    folder: Path | None = None,
    examples: int | None = None,
    batch: int = 1,
) -> list[TaskScore]:
    """Every metric of the tasks. Likelihoods send every token through the reader; of generated text, its decode steps.

    folder:   of more tasks, in lm-eval's YAML
    examples: the first so many of each task, None for all
    batch:    examples at once

    Raises UsageError for a task that is not known, and SourceError for one whose data cannot be had.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if folder is None else str(folder))
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise UsageError(f"lm-eval has no task {unknown[0]!r}", "`lm-eval ls tasks` lists them")
    language_model = _language_model(model, tokenizer, batch)
    dense, sparse = (_evaluate(language_model(modes), list(tasks), manager, examples) for modes in (_DENSE, _SPARSE))
    return list(pair(dense, sparse))


def _language_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: int) -> Any:
    """modes -> lm-eval's view of the model, its calls within those modes."""
    from lm_eval.models.huggingface import HFLM

    class Within(HFLM):  # type: ignore[misc]
        def __init__(self, modes: tuple[Mode, Mode]) -> None:
            super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch)
            self._scoring, self._generating = modes

        def _model_call(self, *args: Any, **kwargs: Any) -> Any:
            with reader_mode(model, self._scoring):
                return super()._model_call(*args, **kwargs)

        def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
            with reader_mode(model, self._generating):
                return super()._model_generate(*args, **kwargs)

    return Within


def _evaluate(language_model: Any, tasks: list[str], manager: Any, examples: int | None) -> dict[str, Any]:
    from lm_eval import simple_evaluate

    try:
        found: dict[str, Any] = simple_evaluate(
            language_model, tasks=tasks, task_manager=manager, limit=examples, bootstrap_iters=0, log_samples=True
        )
    except MreaderError:
        raise
    except (OSError, ValueError) as error:
        raise SourceError(f"lm-eval cannot run {', '.join(tasks)}: {error}", "check the task and its data") from error
    return found


def pair(dense: Mapping[str, Any], sparse: Mapping[str, Any]) -> Iterator[TaskScore]:
    """Every metric of two results of lm-eval, of the same tasks and examples."""
    for task, metrics in dense["results"].items():
        for metric, value in metrics.items():
            if "_stderr" in metric or "," not in metric or not isinstance(value, float | int):
                continue
            values = float(value), float(sparse["results"][task][metric])
            examples = _examples(dense, task, metric), _examples(sparse, task, metric)
            error = _paired_error(values, *examples)
            yield TaskScore(task, metric, *values, values[1] - values[0], error, len(examples[0]) or None)


def _examples(found: Mapping[str, Any], task: str, metric: str) -> list[float]:
    """What each example adds to the metric, in order; empty where that is no number."""
    name, _, chosen = metric.partition(",")
    samples = [sample for sample in found["samples"].get(task, ()) if sample.get("filter", chosen) == chosen]
    values = [sample.get(name) for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
    return [float(value) for value in values if isinstance(value, float | int)]


def _paired_error(values: tuple[float, float], dense: list[float], sparse: list[float]) -> float | None:
    """Of the mean difference, where the metric is the mean of its examples."""
    if len(dense) < 2 or len(dense) != len(sparse):
        return None
    if not all(isclose(value, fmean(of), abs_tol=1e-6) for value, of in zip(values, (dense, sparse), strict=True)):
        return None
    return stdev(b - a for a, b in zip(dense, sparse, strict=True)) / sqrt(len(dense))
