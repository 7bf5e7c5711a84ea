"""The numbers that the PNR paper prints (Cha et al., 2024)."""

from fastcssl.config.recipes.rows import TRAINING, WEIGHTS, RowTable, row

PAPER: RowTable = (
    # Its batch of 128 on ImageNet-100 and DomainNet is per GPU, and there are two; see the scripts.
    row(TRAINING, {"epochs": 500, "batch_size": 256}, family="cifar"),
    row(TRAINING, {"epochs": 400}, data="imagenet100"),
    row(TRAINING, {"epochs": 200}, data="domainnet"),
    row(TRAINING, {"optim.lr": 0.4}, method="moco simclr", authors="cassle"),
    row(TRAINING, {"optim.lr": 0.6}, method="moco simclr", authors="pnr"),
    row(TRAINING, {"optim.lr": 0.3}, method="barlow", family="cifar"),
    row(TRAINING, {"optim.lr": 0.4}, method="barlow", family="imagenet"),
    row(TRAINING, {"optim.weight_decay": 1e-4, "method.hidden": 2048}, method="moco simclr barlow"),
    row(TRAINING, {"method.temperature": 0.2}, method="moco simclr"),
    row(TRAINING, {"method.bank.size": 65536}, method="moco"),
    # On large images the paper gives BYOL's projector the predictor's width, 8192. Both scripts use 4096, and so do we.
    row(TRAINING, {"optim.lr": 1.0, "method.predictor_hidden": 4096}, method="byol", family="cifar"),
    row(TRAINING, {"method.hidden": 4096}, method="byol", family="cifar"),
    row(TRAINING, {"optim.lr": 0.6, "method.predictor_hidden": 8192}, method="byol", family="imagenet"),
    row(TRAINING, {"optim.weight_decay": 1e-5}, method="byol"),
    row(TRAINING, {"strategy.temperature": 0.2}, method="moco simclr", strategy="pnr"),
    # The paper's lambda. VICReg's weighs raw squared distances, which is what its `repel` returns.
    row(WEIGHTS, {"strategy.weight": 1.0}, method="barlow", strategy="pnr", data="cifar100", scenario="class"),
    row(WEIGHTS, {"strategy.weight": 0.5}, method="byol", strategy="pnr", recipe="cifar100-class5"),
    row(WEIGHTS, {"strategy.weight": 0.7}, method="byol", strategy="pnr", recipe="cifar100-class10"),
    row(WEIGHTS, {"strategy.weight": 23.0}, method="vicreg", strategy="pnr", data="cifar100", scenario="class"),
    row(WEIGHTS, {"strategy.weight": 1.0}, method="barlow byol", strategy="pnr", data="imagenet100", scenario="class"),
    row(WEIGHTS, {"strategy.weight": 23.0}, method="vicreg", strategy="pnr", data="imagenet100", scenario="class"),
    row(WEIGHTS, {"strategy.weight": 0.1}, method="barlow byol", strategy="pnr", data="imagenet100", scenario="data"),
    row(WEIGHTS, {"strategy.weight": 5.0}, method="vicreg", strategy="pnr", data="imagenet100", scenario="data"),
    row(WEIGHTS, {"strategy.weight": 1.0}, method="barlow byol", strategy="pnr", data="domainnet"),
    row(WEIGHTS, {"strategy.weight": 8.0}, method="vicreg", strategy="pnr", data="domainnet"),
)
