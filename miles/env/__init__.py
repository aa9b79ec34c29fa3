"""Prompts and rewards: data sets, chat templates, tasks, environments, verifiers. Imports no torch, no transformers."""
