"""Values that no script has: the demo's, those borrowed from similar data, and the paper's encoder on ImageNet-1k."""

from fastcssl.config.recipes.rows import OURS, TEXT, WEIGHTS, Row, RowTable, row


def _weights(like: str, barlow: float, byol: float, vicreg: float, **where: str) -> tuple[Row, ...]:
    source = f"{OURS}, as {like} ({WEIGHTS})"
    values = {"barlow": barlow, "byol": byol, "vicreg": vicreg}
    return tuple(
        row(source, {"strategy.weight": value}, method=method, strategy="pnr", **where)
        for method, value in values.items()
    )


_DEMOS = "demo demo-styles"

OWN: RowTable = (
    row(TEXT, {"encoder.name": "resnet50"}, recipe="imagenet1k-class5 imagenet1k-class10"),
    row(
        OURS,
        {
            "encoder.name": "conv4-w16",
            "optim.schedule_unit": "step",
            "optim.warmup_start_lr": 0.0,  # the scripts' 0.003 is above the peak of 0.002
        },
        recipe="demo-styles",
    ),
    row(
        OURS,
        {
            "epochs": 12,
            "batch_size": 64,
            "encoder.name": "resnet18-w16",
            "encoder.stem": "imagenet",  # sixteen times faster than the stem for small images
            "method.hidden": 256,
            "method.dim": 64,
            "views.min_scale": 0.4,  # a scene is one shape, and a smaller crop would show only background
            "optim.name": "adamw",  # learns in hundreds of steps, where LARS needs tens of thousands
            "optim.lr": 0.008,
            "optim.weight_decay": 0.01,
            "optim.warmup_epochs": 2,
            "optim.schedule_unit": "step",
            "online_probe": "every=0",
        },
        recipe=_DEMOS,
    ),
    # The oldest key is 8 steps old, and the slow network takes 250 steps to follow. If it followed within the age of
    # the keys, queries would learn to tell new keys from old ones instead of one image from another, and collapse.
    row(OURS, {"method.bank.size": 512}, recipe=_DEMOS, method="moco"),
    row(OURS, {"method.ema_base": 0.996, "method.ema_final": 0.999}, recipe=_DEMOS, method="moco"),
    row(OURS, {"method.predictor_hidden": 256}, recipe=_DEMOS, method="byol"),
    *_weights("CIFAR-100", 1.0, 0.5, 23.0, recipe=_DEMOS),
    # Any data: the small network of the demo, and the weights of the paper's data that is split in the same way.
    row(
        OURS,
        {"encoder.name": "resnet18-w16", "method.hidden": 256, "method.dim": 64},
        recipe="own-small",
    ),
    row(OURS, {"method.predictor_hidden": 256}, recipe="own-small", method="byol"),
    *_weights("DomainNet", 1.0, 1.0, 8.0, recipe="own own-small", scenario="domain"),
    *_weights("ImageNet-100", 0.1, 0.1, 5.0, recipe="own own-small", scenario="data"),
    *_weights("CIFAR-100", 1.0, 0.5, 23.0, recipe="own own-small", family="cifar"),
    *_weights("ImageNet-100", 1.0, 1.0, 23.0, recipe="own own-small", family="imagenet"),
    # The paper splits only ImageNet-100 at random.
    *_weights("ImageNet-100", 0.1, 0.1, 5.0, data="cifar100", scenario="data"),
    # CaSSLe's paper has numbers for the other strategies, but neither definitions nor code, so they use our defaults.
    # LUMP's own authors train on CIFAR-100; DER keeps as many samples there.
    row("LUMP script", {"strategy.alpha": 0.4, "strategy.budget": 256}, strategy="lump", data="cifar100"),
    row(f"{OURS}, as LUMP", {"strategy.budget": 256}, strategy="der", data="cifar100"),
)
