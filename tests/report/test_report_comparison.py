"""What a report puts side by side: seeds averaged, published numbers with their protocol, mismatches marked."""

import dataclasses
from pathlib import Path

import pytest
from made_runs import accuracies, evaluated, made_run

from fastcssl.config.config import ExpectConfig, plain
from fastcssl.config.recipes import RECIPES, recipe, settled
from fastcssl.report import report_runs
from fastcssl.report.comparison import Value, _is_beside, _plain, compared, mark, shown
from fastcssl.report.figures import averages
from fastcssl.report.markup import Html, el, joined
from fastcssl.report.matrix import short_names
from fastcssl.report.published import PUBLISHED, published
from fastcssl.report.runs import _flat, read_run
from fastcssl.runs.results import References


def test_seeds_are_averaged_and_other_settings_are_not(tmp_path: Path) -> None:
    for seed, level in ((5, 0.5), (6, 0.6)):
        evaluated(made_run(tmp_path / f"a{seed}", seed=seed), level=level)
    evaluated(made_run(tmp_path / "b", seed=5, epochs=3), level=0.4)
    (table,) = compared([read_run(tmp_path / name) for name in ("a5", "a6", "b")])
    assert [(row.title, row.num_seeds) for row in table.rows] == [
        ("MoCo + PNR, epochs 12", 2),
        ("MoCo + PNR, epochs 3", 1),
    ]
    A = [accuracies(3, 3, level)[-1] for level in (0.5, 0.6)]
    means = [100 * sum(row) / 3 for row in A]
    assert table.rows[0].metrics["A"].mean == pytest.approx(sum(means) / 2)
    assert table.rows[0].metrics["A"].deviation == pytest.approx(abs(means[0] - means[1]) / 2**0.5)
    assert str(table.rows[0].metrics["A"]) == f"{sum(means) / 2:.2f} ± {10 / 2**0.5:.2f}"
    assert table.rows[1].metrics["A"].deviation is None


def test_metrics_of_a_table_are_those_of_its_file(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    # By hand: A = (.5 + .6 + .7) / 3, S = ((.8 - .5) + (.9 - .6)) / 2.
    evaluated(run, top1=[[0.8, 0.5, 0.6], [0.6, 0.9, 0.7], [0.5, 0.6, 0.7]], level=0.36)
    (table,) = compared([read_run(run)])
    assert str(table.rows[0].metrics["A"]) == "60.00"
    assert str(table.rows[0].metrics["S"]) == "30.00"
    # FT is 0.3: ((.5 - .3 + .6 - .3) / 2 + (.7 - .3)) / 2
    assert str(table.rows[0].metrics["P"]) == "32.50"


def test_probes_and_scopes_have_tables_of_their_own(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    evaluated(run)
    evaluated(run, scope="semi-10")
    evaluated(run, scope="downstream:stl10", columns=["all"])
    for metric in ("cosine", "euclidean"):
        evaluated(run, probe="knn", settings={"k": 20, "metric": metric})
    found = report_runs([run])
    assert [table.evaluation for table in found.comparisons] == [
        "linear probe, all classes",
        "linear probe, 10 % of the labels",
        "linear probe, on stl10",
        "k-NN, all classes, cosine",
        "k-NN, all classes, euclidean",
    ]


def test_a_mismatch_with_a_published_number_is_marked(tmp_path: Path) -> None:
    run = made_run(tmp_path / "cifar", "cifar100-class5", epochs=100, tasks_done=3)
    evaluated(run, rows=3, probe="linear-cached", settings={})
    (table,) = compared([read_run(run)])
    (row,) = table.rows
    assert row.published is not None and row.published.value("A") == 62.36
    notes = " ".join(row.mismatches)
    for words in (
        "trained online",
        "Published with a linear probe",
        "epochs 100 (published: 500)",
        "After 3 of 5 tasks",
    ):
        assert words in notes
    assert table.marks(row) == "a, b, c, d"

    other = made_run(tmp_path / "imagenet", "imagenet100-class5", "byol", "pnr")
    evaluated(other, settings={"epochs": 10, "momentum": 0.9})
    notes = " ".join(compared([read_run(other)])[0].rows[0].mismatches)
    for words in ("more than one ImageNet-100", "100 epochs; this has 10", "momentum 0; this has 0.9"):
        assert words in notes


def test_a_run_as_published_differs_in_no_setting() -> None:
    for name, method, strategy, scope in PUBLISHED:
        if scope != "all" or method == "vicreg":
            continue
        found = recipe(name, method, strategy, settings="published")
        values = dict(_flat(plain(dataclasses.replace(found.config, seed=1))))
        theirs = settled(name, method, strategy, "published")
        assert [
            key for key, (value, _) in theirs.items()
            if key in values and not _is_beside(key) and _plain(values[key]) != _plain(value)
        ] == []  # fmt: skip


def test_published_numbers_are_about_recipes_that_exist_and_keep_their_order() -> None:
    assert {recipe for recipe, *_ in PUBLISHED} == set(RECIPES) - {
        *("demo", "demo-styles", "own", "own-small", "cifar100-data5", "cifar100-data10")
    }
    moco = {
        strategy: published("imagenet100-class5", "moco", strategy, "all") for strategy in ("finetune", "cassle", "pnr")
    }
    assert [(*f.values.values(), *f.deviations.values()) for f in moco.values() if f] == [
        (57.87, 3.13, 2.38, 0.49),
        (63.49, 2.80, 2.52, 0.44),
        (67.85, 1.23, 3.47, 0.44),
    ]
    for name, found in ((key[0], found) for key, found in PUBLISHED.items()):
        assert (found.protocol.probe == "online") == name.startswith("cifar100")
    for method, joint in (("moco", 66.90), ("simclr", 63.78), ("barlow", 68.99), ("byol", 69.36), ("vicreg", 68.01)):
        found_joint = published("cifar100-class5", method, "joint", "all")
        assert found_joint is not None and found_joint.value("A") == joint
    assert published("demo", "moco", "pnr", "all") is None
    assert published("domainnet-domain6", "moco", "pnr", "domain-aware") is not None
    assert published("imagenet100-data10", "byol", "pnr", "downstream:clipart") is not None


def test_small_things() -> None:
    assert [mark(number) for number in (0, 25, 26, 27)] == ["a", "z", "aa", "ab"]
    assert [str(Value(each=each)) for each in ((-1e-9,), (-0.001, 0.001), (-0.1,))] == ["0.00", "0.00 ± 0.00", "-0.10"]
    assert [shown(value) for value in (True, 1e-4, None, [0.9, 0.99])] == ["on", "0.0001", "none", "0.9, 0.99"]
    assert (
        el("p", "<&", Html("<br>"), None, title='"', class_="x", hidden=None)
        == '<p title="&quot;" class="x">&lt;&amp;<br></p>'
    )


def test_axes_take_names_only_where_they_fit(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    assert short_names(evaluated(run)) == ["0", "1", "2"]
    assert short_names(evaluated(run, columns=["real", "sketch", "quickdraw"])) == ["real", "sketch", "quickdraw"]


def test_settings_of_a_recipe_on_other_data_are_said_to_be_that(tmp_path: Path) -> None:
    own = made_run(tmp_path / "own")
    other = made_run(tmp_path / "other", expect=ExpectConfig())
    for run, about in ((own, RECIPES["demo"].about), (other, "its settings, on other data")):
        evaluated(run)
        (table,) = compared([read_run(run)])
        assert table.about == about


def test_a_flag_in_a_sentence_stays_on_one_line() -> None:
    assert joined("Use --optim.lr 1 <b>.") == 'Use <span class="flag">--optim.lr</span> 1 &lt;b&gt;.'
    assert joined("a -- b, x--y") == "a -- b, x--y"


def test_a_random_encoder_and_chance_are_averaged_over_the_tasks_learnt(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    found = evaluated(run)
    reference = References(random=[0.1, 0.2, 0.6], chance=[0.05] * 3)
    dataclasses.replace(found, reference=reference).save(run)
    (table,) = compared([read_run(run)])
    assert table.references == {
        "random encoder": pytest.approx([10.0, 15.0, 30.0]),
        "chance": pytest.approx([5.0, 5.0, 5.0]),
    }
    drawn = averages("figure", "title", table).drawn()
    for words in ("random encoder", "chance"):
        assert words in drawn.svg
