"""Reads ImageNet-1k, with one folder per wnid in train and val, and its 100-class subset.

`imagenet100` uses the list of CMC, as CaSSLe's authors confirm they do. Other "ImageNet-100" lists exist; use --classes
for them.
"""

from collections.abc import Iterator

from dataprep.errors import PrepError
from dataprep.samples import NO_DOMAIN, Samples
from dataprep.sources import Source, SourceRequest
from dataprep.sources.tree import choose_classes, class_images, read_class_list, subfolders

KINDS = ("imagenet", "imagenet100")

CMC_CLASSES = tuple(
    f"n{number}"
    for number in """
    01558993 01692333 01729322 01735189 01749939 01773797 01820546 01855672 01978455 01980166
    01983481 02009229 02018207 02085620 02086240 02086910 02087046 02089867 02089973 02090622
    02091831 02093428 02099849 02100583 02104029 02105505 02106550 02107142 02108089 02109047
    02113799 02113978 02114855 02116738 02119022 02123045 02138441 02172182 02231487 02259212
    02326432 02396427 02483362 02488291 02701002 02788148 02804414 02859443 02869837 02877765
    02974003 03017168 03032252 03062245 03085013 03259280 03379051 03424325 03492542 03494278
    03530642 03584829 03594734 03637318 03642806 03764736 03775546 03777754 03785016 03787032
    03794056 03837869 03891251 03903868 03930630 03947888 04026417 04067472 04099969 04111531
    04127249 04136333 04229816 04238763 04336792 04418357 04429376 04435653 04485082 04493381
    04517823 04589890 04592741 07714571 07715103 07753275 07831146 07836838 13037406 13040303
    """.split()
)


def open_source(request: SourceRequest) -> Source:
    request.refuse(domains=True)
    root = request.root()
    for split in ("train", "val"):
        if not (root / split).is_dir():
            raise PrepError(
                f"{root} has no folder '{split}'. ImageNet is expected as {root}/train/<wnid>/*.JPEG and "
                f"{root}/val/<wnid>/*.JPEG; for another layout use folder:{root}."
            )
    available = subfolders(root / "train")
    if not available:
        raise PrepError(f"{root / 'train'} has no class folders. Unpack the archives of the classes into it.")
    if request.classes_file is not None:
        wanted = read_class_list(request.classes_file)
        classes = choose_classes(available, wanted, where=root / "train", listed_in=str(request.classes_file))
    elif request.kind == "imagenet100":
        classes = choose_classes(available, CMC_CLASSES, where=root / "train", listed_in="ImageNet-100 (CMC's list)")
    else:
        classes = tuple(available)
    choose_classes(subfolders(root / "val"), classes, where=root / "val", listed_in=str(root / "train"))

    def rows() -> Iterator[tuple[str, int, int, bool]]:
        for split in ("train", "val"):
            for key, label in class_images(root, split, classes):
                yield key, label, NO_DOMAIN, split == "val"

    samples = Samples.collect(rows())
    filled = set(samples.label_S[~samples.is_val_S].tolist())
    empty = [name for label, name in enumerate(classes) if label not in filled]
    if empty:
        raise PrepError(
            f"{root / 'train' / empty[0]} has no images ({len(empty)} empty classes in all). Unpack it again."
        )
    return Source(
        kind=request.kind,
        classes=classes,
        domains=(),
        samples=samples,
        payload=lambda sample: f"{root}/{sample.key}",
    )
