"""The numbers in the released scripts and code of CaSSLe and of PNR, which grew out of CaSSLe."""

from fastcssl.config.recipes.rows import CODE, SCRIPT, Authors, RowTable, row

# ---- Shared by both --------------------------------------------------------------------------------------------------


def _shared(authors: Authors) -> RowTable:
    script, code = SCRIPT[authors], CODE[authors]
    return (
        row(script, {"seed": 5, "encoder.name": "resnet18", "optim.momentum": 0.9, "optim.min_lr": 0.0}),
        row(script, {"encoder.stem": "cifar", "epochs": 500, "batch_size": 256}, family="cifar"),
        row(script, {"encoder.stem": "imagenet"}, family="imagenet"),
        row(script, {"epochs": 400}, data="imagenet100"),
        row(script, {"epochs": 200}, data="domainnet"),
        row(f"{script}, 2 x 128", {"batch_size": 256}, data="imagenet100"),
        row(script, {"optim.schedule_unit": "epoch"}),
        row(script, {"method.temperature": 0.2, "method.align_temperature": 0.2}, method="simclr"),
        row(script, {"method.hidden": 2048}, method="simclr"),
        row(script, {"method.hidden": 2048, "method.dim": 2048}, method="barlow vicreg"),
        row(script, {"method.off_diagonal_weight": 5e-3, "method.scale": 0.1}, method="barlow"),
        row(script, {"method.similarity_weight": 25.0, "method.variance_weight": 25.0}, method="vicreg"),
        row(script, {"method.covariance_weight": 1.0}, method="vicreg"),
        row(script, {"method.hidden": 4096, "method.dim": 256}, method="byol"),
        row(script, {"method.predictor_hidden": 4096}, method="byol", family="cifar"),
        row(script, {"method.predictor_hidden": 8192}, method="byol", family="imagenet"),
        row(script, {"method.ema_base": 0.99, "method.ema_final": 1.0}, method="byol"),
        row(script, {"optim.weight_decay": 1e-4}, method="barlow vicreg"),
        row(script, {"optim.weight_decay": 1e-5}, method="byol"),
        row(script, {"optim.lr": 0.3}, method="vicreg", family="cifar"),
        row(script, {"optim.lr": 0.4}, method="vicreg", family="imagenet"),
        row(script, {"optim.lr": 1.0}, method="byol", family="cifar"),
        row(script, {"optim.lr": 0.6}, method="byol", family="imagenet"),
        row(code, {"method.bank.initial": "random"}, method="moco", settings="published"),
        # With several GPUs, the references share neither negatives nor statistics, except for Barlow's correlations,
        # whose gradient they do not share. On CIFAR they use one GPU, which has the whole batch.
        row(
            code,
            {"scope": "global", "method.gradient": "reference"},
            method="barlow",
            family="imagenet",
            settings="published",
        ),
        row(code, {"scope": "local"}, family="imagenet", settings="published"),
    )


_MOCO = {
    "method.hidden": 2048,
    "method.dim": 128,
    "method.temperature": 0.2,
    "method.align_temperature": 0.2,
    "method.ema_base": 0.99,
    "method.ema_final": 0.999,
    "method.bank.size": 65536,
    "method.bank.at_task_start": "keep",
    "probe_lr": 0.3,
}
_LARS = {
    "optim.name": "lars",
    "optim.eta": 0.02,
    "optim.clip": True,
    "optim.schedule": "warmup-cosine",
    "optim.warmup_epochs": 10,
    "optim.warmup_start_lr": 0.003,
}
_SGD = {"optim.name": "sgd", "optim.schedule": "cosine", "optim.exclude_bias_and_norm": False}

# ---- PNR's scripts ---------------------------------------------------------------------------------------------------

_OF_PNR = SCRIPT["pnr"]
PNR: RowTable = (
    *_shared("pnr"),
    row(_OF_PNR, _LARS),
    row(f"{_OF_PNR}, 2 x 128", {"batch_size": 256}, data="domainnet"),
    row(_OF_PNR, _MOCO, method="moco"),
    row(_OF_PNR, {"optim.exclude_bias_and_norm": False}, method="moco"),
    row(_OF_PNR, {"optim.exclude_bias_and_norm": True}, method="simclr barlow byol vicreg"),
    row(_OF_PNR, {"optim.weight_decay": 1e-4}, method="moco simclr"),
    row(_OF_PNR, {"optim.lr": 0.6}, method="moco"),
    row(_OF_PNR, {"optim.lr": 0.6}, method="simclr", family="cifar"),
    row(_OF_PNR, {"optim.lr": 0.4}, method="simclr", family="imagenet"),
    row(_OF_PNR, {"optim.lr": 0.4}, method="barlow"),
    row(_OF_PNR, {"method.dim": 128}, method="simclr"),
    row(_OF_PNR, {"probe_lr": 0.1}, method="simclr", family="cifar"),
    row(_OF_PNR, {"strategy.temperature": 0.2}, method="moco simclr", strategy="pnr"),
    # VICReg's factor of 25 is already part of its `align`.
    row(_OF_PNR, {"strategy.align_weight": 1.0}, method="barlow byol vicreg", strategy="pnr"),
    row(CODE["pnr"], {"strategy.form": "code", "strategy.pn1": True, "strategy.pn2": True}, strategy="pnr"),
    row(CODE["pnr"], {"strategy.frozen": "eval"}, strategy="pnr", family="imagenet", settings="published"),
    # PNR's validation after the first epoch puts the frozen network into train mode.
    row(CODE["pnr"], {"strategy.frozen": "batch"}, strategy="pnr", family="cifar", settings="published"),
)

# ---- CaSSLe's scripts ------------------------------------------------------------------------------------------------

_OF_CASSLE = SCRIPT["cassle"]
CASSLE: RowTable = (
    *_shared("cassle"),
    row(_OF_CASSLE, {**_LARS, "optim.exclude_bias_and_norm": True}, method="simclr barlow byol vicreg"),
    # One of BYOL's scripts has 256 per GPU, which would quadruple the learning rate.
    row(f"{_OF_CASSLE}, 4 x 64", {"batch_size": 256}, data="domainnet"),
    row(_OF_CASSLE, {"optim.lr": 0.4}, method="simclr"),
    row(_OF_CASSLE, {"optim.lr": 0.3}, method="barlow", family="cifar"),
    row(_OF_CASSLE, {"optim.lr": 0.4}, method="barlow", family="imagenet"),
    row(_OF_CASSLE, {"optim.weight_decay": 1e-5, "method.dim": 256}, method="simclr", family="cifar"),
    row(_OF_CASSLE, {"optim.weight_decay": 1e-4, "method.dim": 128}, method="simclr", family="imagenet"),
    row(_OF_CASSLE, {**_MOCO, **_SGD}, method="moco", family="imagenet"),
    row(_OF_CASSLE, {"optim.lr": 0.4, "optim.weight_decay": 1e-4}, method="moco", family="imagenet"),
    # There is no script for MoCo on CIFAR.
    row(f"{_OF_CASSLE} of ImageNet-100", {**_MOCO, **_SGD}, method="moco", family="cifar"),
    # There is one script for SupCon, on large images. Where PNR's way of training is followed, SimCLR's values apply.
    row(
        _OF_CASSLE,
        {"optim.lr": 0.4, "optim.weight_decay": 1e-4, "method.dim": 128, **_LARS, "optim.exclude_bias_and_norm": True},
        method="supcon",
        family="imagenet",
        authors="cassle",
    ),
    row(_OF_CASSLE, {"method.temperature": 0.1}, method="supcon"),
    row(_OF_CASSLE, {"probe_lr": 0.1}, method="simclr barlow byol", family="cifar"),
    row(_OF_CASSLE, {"probe_lr": 0.1}, method="byol", family="imagenet"),
    row(_OF_CASSLE, {"probe_lr": 0.3}, method="barlow", family="imagenet"),
    row(_OF_CASSLE, {"strategy.weight": 1.0}, strategy="cassle"),  # VICReg's 25 is already part of its `align`
    row(CODE["cassle"], {"strategy.frozen": "batch"}, strategy="cassle", settings="published"),
)
