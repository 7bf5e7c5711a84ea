"""The experiments by name: the data that each trains on, and the ablations of the paper."""

from dataclasses import dataclass

from fastcssl.data.views import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The data that a recipe trains on."""

    about: str
    source: str  # its name in fastcssl-prep
    scenario: str
    num_tasks: int
    family: Family  # decides the stem, the size and the views
    like: str = ""  # the data whose numbers it borrows where it has none of its own
    follows_data: bool = False  # family and sizes are those of the data that a run is given (own_data.py)
    where: str = ":ROOT"  # follows the source in fastcssl-prep build: a placeholder for a folder, or settings

    @property
    def build_words(self) -> str:
        """Returns the arguments of fastcssl-prep build that make this data, without --out."""
        if self.follows_data:
            return "folder:ROOT --scenario class --tasks 5"
        return f"{self.source}{self.where} --scenario {self.scenario} --tasks {self.num_tasks}"


def _split(source: str, title: str, family: Family, about: dict[str, str], like: str = "") -> dict[str, Data]:
    """Returns recipes by name. {"class5": "20 classes"} in `about` gives one with 5 tasks of 20 classes."""
    name = "imagenet1k" if source == "imagenet" else source
    found = {}
    for words, each in about.items():
        scenario = words.rstrip("0123456789")
        num_tasks = int(words.removeprefix(scenario))
        found[f"{name}-{words}"] = Data(
            about=f"{title}, {num_tasks} tasks of {each}",
            source=source,
            scenario=scenario,
            num_tasks=num_tasks,
            family=family,
            like=like,
        )
    return found


_BY_CLASS = {"class5": "20 classes", "class10": "10 classes"}
_BY_DATA = {"data5": "a fifth of the images", "data10": "a tenth of the images"}

RECIPES: dict[str, Data] = {
    "demo": Data(
        about="generated images, 3 tasks of 10 classes: takes minutes on two cores",
        source="synthetic",
        scenario="class",
        num_tasks=3,
        family="cifar",
        where="",
    ),
    "demo-styles": Data(
        about="generated images, 4 tasks of one style: takes minutes on two cores",
        source="synthetic",
        scenario="domain",
        num_tasks=4,
        family="cifar",
        where=":set=forms",
    ),
    "own": Data(
        about="any prepared folder, ResNet-18: view size, stem, batch, epochs and optimiser follow the data",
        source="any",
        scenario="any",
        num_tasks=0,
        family="imagenet",
        follows_data=True,
    ),
    "own-small": Data(
        about="any prepared folder, a small ResNet-18 and short training: a first try, on CPUs too",
        source="any",
        scenario="any",
        num_tasks=0,
        family="imagenet",
        follows_data=True,
    ),
    **_split("cifar100", "CIFAR-100", "cifar", _BY_CLASS | _BY_DATA),
    **_split("imagenet100", "ImageNet-100", "imagenet", _BY_CLASS | _BY_DATA),
    **_split(
        "imagenet",
        "ImageNet-1k, ResNet-50",
        "imagenet",
        {"class5": "200 classes", "class10": "100 classes"},
        like="imagenet100",
    ),
    **_split("domainnet", "DomainNet", "imagenet", {"domain6": "one domain"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """An ablation of the paper: one flag, and the values that the paper gives it."""

    about: str
    method: str
    strategy: str
    flag: str
    values: tuple[str, ...]

    @property
    def shown(self) -> str:
        """Returns one line with the flag, its values and what they change."""
        return f"{self.flag} {'|'.join(self.values)} ({self.method} {self.strategy}): {self.about}"


_BANK = "--method.bank.size"

# Tables 5 and 7 of the paper. Each is one flag, which any recipe accepts.
ABLATIONS: dict[str, Ablation] = {
    "no PN1": Ablation(
        about="no frozen negatives in the plasticity term",
        method="moco",
        strategy="pnr",
        flag="--strategy.pn1",
        values=("off",),
    ),
    "no PN2": Ablation(
        about="no current negatives in the stability term",
        method="moco",
        strategy="pnr",
        flag="--strategy.pn2",
        values=("off",),
    ),
    "doubled queue": Ablation(
        about="CaSSLe with as many keys as PNR has negatives",
        method="moco",
        strategy="cassle",
        flag=_BANK,
        values=("131072",),
    ),
    "queue size": Ablation(
        about="number of keys in each of the two models' queues",
        method="moco",
        strategy="pnr",
        flag=_BANK,
        values=("256", "512", "2048", "16384", "65536", "131072"),
    ),
}
