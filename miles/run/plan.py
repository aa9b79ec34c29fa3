"""`miles plan`: memory and time of a recipe before a GPU is rented, and the same look before a run begins on GPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from miles.algo import find
from miles.config.schema import Recipe
from miles.errors import BadInput, DoesNotFit
from miles.learn.load import load_config
from miles.plan.plan import GIB, Plan, make_plan, peak_of
from miles.plan.show import as_json, refusal, show
from miles.plan.speed import Machine
from miles.run.recipes import resolve

WIDTH = 132  # columns where the output is no terminal


def plan_command(
    recipes: Sequence[Path], overrides: Mapping[str, Any], gpus: int, gpu_memory: float, machine: Machine, as_text: bool
) -> int:
    """Prints the plan; 1 where it does not fit."""
    plan = plan_for(resolve(recipes, overrides, os.environ), gpus, gpu_memory * GIB, machine)
    if as_text:
        show(plan, Console(width=None if Console().is_terminal else WIDTH, markup=False, emoji=False))
    else:
        print(json.dumps(as_json(plan), indent=1))
    return 0 if plan.fits else 1


def plan_for(recipe: Recipe, gpus: int, capacity: float, machine: Machine | None = None) -> Plan:
    """capacity: bytes of one GPU. Raises BadInput where the GPUs cannot be shared out as `parallel.replicate` says."""
    if find(recipe.algorithm.name).scorer:
        raise BadInput(
            f"algorithm.name = {recipe.algorithm.name} trains a head of its own on recorded answers, which is not planned: plan "
            'it as algorithm.name = "sft", which takes more.'
        )
    replicate = recipe.parallel.replicate
    if gpus % replicate:
        raise BadInput(
            f"--gpus {gpus} cannot be shared out over parallel.replicate = {replicate} copies: give a multiple of it."
        )
    parallel = recipe.parallel.model_copy(update={"shard": gpus // replicate})
    placed = recipe.model_copy(update={"parallel": parallel})
    return make_plan(placed, load_config(recipe.model), capacity, machine)


def check_device(recipe: Recipe, device: torch.device) -> None:
    """Before any weight is loaded, where a device's memory is known: a GPU's. Raises DoesNotFit with what to change."""
    if device.type == "cuda" and not find(recipe.algorithm.name).scorer:
        check_fits(recipe, torch.cuda.get_device_properties(device).total_memory)


def check_fits(recipe: Recipe, capacity: float) -> None:
    """capacity: bytes of the device of each rank. Raises DoesNotFit.

    Only tensors alone are held against it, without what a plan assumes beside them: what may fit is let go on.
    """
    config = load_config(recipe.model)
    if peak_of(recipe, config) > capacity:
        raise DoesNotFit(refusal(make_plan(recipe, config, capacity)))
