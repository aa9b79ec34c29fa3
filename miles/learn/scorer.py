"""Scorers: a language model's trunk with one number for a whole sequence, as transformers' sequence classifiers hold it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from miles.config.headers import CLASSIFIER, architectures
from miles.errors import ModelError
from miles.learn.hub import one_line
from miles.learn.load import load_model
from miles.learn.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from miles.config.schema import Model

HEAD = "score"


def load_scorer(section: Model, *, seed: int, device: str | torch.device = "cpu") -> PreTrainedModel:
    """What `algorithm.name = "reward_model"` trains: a causal language model's trunk under a new head, or a scorer.

    fp32, in eval mode. Raises ModelError.
    """
    folder = Path(section.name).expanduser()
    if is_scorer_folder(folder):
        return check_scorer(load_classifier(folder, "model.name"), "model.name").to(device)
    return as_scorer(load_model(section, seed=seed)).to(device)


def is_scorer_folder(folder: Path) -> bool:
    """Whether its config says that a sequence classifier stands there."""
    return any(name.endswith(CLASSIFIER) for name in architectures(folder))


def as_scorer(model: PreTrainedModel) -> PreTrainedModel:
    """The model's own trunk under a head of zeros, so that every score starts at 0. The output head is left out.

    Raises ModelError where transformers has no sequence classifier of that architecture.
    """
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ModelError(
            f"model.name = {config.name_or_path!r}: transformers has no sequence classifier for {type(model).__name__}, so no "
            "reward model can be made of it: choose another architecture."
        )
    with torch.device("meta"), quiet():
        scorer = AutoModelForSequenceClassification.from_config(config)
    setattr(scorer, scorer.base_model_prefix, model.base_model)
    weight = model.get_input_embeddings().weight
    head = nn.Linear(config.get_text_config().hidden_size, 1, bias=False, dtype=torch.float32, device=weight.device)
    nn.init.zeros_(head.weight)
    setattr(scorer, HEAD, head)
    return check_scorer(scorer.eval(), "model.name")


def scorer_head(model: PreTrainedModel) -> nn.Linear:
    """The head of a scorer: one number from a hidden state."""
    head = model.get_submodule(HEAD)
    assert isinstance(head, nn.Linear)
    return head


def check_scorer(model: PreTrainedModel, key: str) -> PreTrainedModel:
    """The model, whose only weights beside its trunk are one linear head. Raises ModelError for other classifiers."""
    head, prefix = getattr(model, HEAD, None), f"{model.base_model_prefix}."
    beside = [name for name, _ in model.named_parameters() if not name.startswith((prefix, f"{HEAD}."))]
    if not isinstance(head, nn.Linear) or head.out_features != 1 or beside:
        raise ModelError(
            f"{key} = {model.config.name_or_path!r}: {type(model).__name__} is no trunk with one linear head of one label, so "
            "it cannot be trained on; start from a causal language model."
        )
    return model


def load_classifier(folder: Path, key: str) -> PreTrainedModel:
    """Any sequence classifier with one label from a folder, fp32, in eval mode. Raises ModelError that names `key`."""
    try:
        with quiet():
            model, report = AutoModelForSequenceClassification.from_pretrained(
                folder, dtype=torch.float32, use_safetensors=True, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(f"{key} = {str(folder)!r} could not be loaded: {one_line(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{key} = {str(folder)!r}: {len(missing)} weights of {type(model).__name__} are not in its files ({missing[0]}, "
            "...), so they would be random numbers: give a whole reward model."
        )
    if model.config.num_labels != 1:
        raise ModelError(
            f"{key} = {str(folder)!r} has {model.config.num_labels} labels; a reward model has one, its score."
        )
    return model.eval()


def set_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, last_tokens: Collection[int]) -> None:
    """Give model and tokenizer a padding token that no sequence ends with.

    Sequence classifiers read their score at the last token that is not padding; many chat models pad with their end token,
    and would read it one token early. Where no special token is free there is no padding, and one sequence at a time.
    """
    special = [tokenizer.pad_token_id, tokenizer.unk_token_id, *tokenizer.all_special_ids]
    free = next((token for token in special if token is not None and token not in last_tokens), None)
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.pad_token_id = free
    tokenizer.pad_token = None if free is None else tokenizer.convert_ids_to_tokens(free)


def sequence_scores(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> Tensor:
    """[S] float32, the score of each sequence by the classifier's own forward, padded at the end; no gradient."""
    device, pad = next(model.parameters()).device, model.config.get_text_config().pad_token_id
    if pad is None and len(sequences) > 1:
        return torch.cat([sequence_scores(model, [ids]) for ids in sequences])
    longest = max(map(len, sequences))
    rows = torch.tensor([[*ids, *[pad or 0] * (longest - len(ids))] for ids in sequences], device=device)
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences], device=device)
    arguments: dict[str, Any] = {} if bool(mask.all()) else {"attention_mask": mask}
    with torch.no_grad():
        return model(input_ids=rows, **arguments).logits[:, 0].float()
