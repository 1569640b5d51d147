"""Other names of settings: symbols of papers are accepted, names of other suites suggested."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from feddg_bench.config.reading import plain_name

SYMBOLS: Mapping[str, str] = {
    "lambda": "partition.heterogeneity",
    "N": "partition.clients",
    "K": "federation.per_round",
}
"""Symbol -> the setting that it stands for, wherever a setting is named."""

_SYNONYMS: Mapping[str, str] = {
    "scenario": "domain domains train_domains test_domain test_domains test_env test_envs target "
    "target_domain held_out",
    "method": "algorithm algo",
    "num_seeds": "n_trials num_trials n_seeds",
    "dataset": "data_name",
    "data_root": "root data_dir data_path",
    "keep": "save save_model",
    "results": "output output_dir out_dir save_dir log_dir",
    "device": "gpu gpus cuda",
    "workers": "num_workers n_jobs",
    "federation.rounds": "num_rounds n_rounds global_rounds comm_rounds communication_rounds",
    "federation.unseen_clients": "num_new_clients new_clients",
    "federation.per_round": "participation participation_rate frac fraction fraction_fit "
    "join_ratio clients_per_round",
    "partition.clients": "num_clients n_clients num_users n_parties",
    "partition.heterogeneity": "lam lmbda lambda_",
    "partition.alpha": "alpha dirichlet dir_alpha dirichlet_alpha",
    "partition.classes_per_client": "num_classes_per_partition class_per_client shards_per_client",
    "train.lr": "learning_rate local_lr client_lr",
    "train.local_epochs": "epochs num_epochs local_ep",
    "train.batch_size": "batch local_bs",
    "train.weight_decay": "wd l2",
    "train.optimizer": "optim opt optimiser",
    "train.schedule": "scheduler lr_scheduler lr_schedule",
    "backbone.name": "model model_name arch architecture backbone network net",
    "backbone.pretrained": "pretrain use_pretrained",
    "data.image_size": "imsize img_size input_size resolution",
    "evaluation.every": "eval_every eval_interval",
}
"""Name here -> names of the same thing in other suites and papers."""
_MEANT = {plain_name(word): name for name, words in _SYNONYMS.items() for word in words.split()}


def meant(word: str, known: Collection[str]) -> str | None:
    """Return the name in ``known`` of what another suite calls ``word``; ``None`` if there is none.

    ``word`` can have a section in front, and ``known`` a name without its section.

    >>> meant("train.learning-rate", ["train.lr"])
    'train.lr'
    """
    name = _MEANT.get(plain_name(word.rpartition(".")[2]), "")
    return next((each for each in (name, name.rpartition(".")[2]) if each in known), None)
