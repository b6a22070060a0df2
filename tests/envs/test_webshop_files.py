"""The original's files: they load unchanged, and what is wrong with them is said."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("bm25s")

from envs import registry
from envs.api import EnvUnavailable
from envs.webshop import catalogue, goals, products

# One product with all the fields the original's files have, and their odd values.
ITEM = {
    "asin": "B09XYZ1234",
    "name": "Acme Women's Canvas Shoes Non Slip",
    "category": "fashion",
    "query": " Women's Shoes ",
    "product_category": "Clothing › Women › Shoes › Sneakers",
    "full_description": "Light shoes.",
    "small_description": ["Rubber sole", "Easy to wash"],
    "small_description_old": "x",
    "pricing": "$1,024.49 - $1,039.99",
    "list_price": "",
    "availability_status": "in stock",
    "seller_name": None,
    "customization_options": {
        "Color": [{"value": " Black/White ", "image": "u", "price": ""}, {"value": "Red", "image": None}],
        "Size": None,
    },
    "images": ["https://example.com/1.jpg"],
    "total_reviews": "3",
}
ATTRIBUTES = {
    "attributes": ["rubber sole", "non slip"],
    "instruction": "Find me non slip women's shoes",
    "instruction_attributes": ["non slip"],
}
PERSON = {
    "instruction": "i want shoes that do not slip in black.",
    "instruction_attributes": ["non slip"],
    "instruction_options": ["black | white"],
    "worker_id": "W",
    "asin": "B09XYZ1234",
    "options": ["color: black | white"],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WEBSHOP_DATA", str(tmp_path))
    others = [
        {**ITEM, "asin": f"B0{n:08}", "pricing": price, "small_description": "one text", "customization_options": {}}
        for n, price in enumerate(["", "$9.5", None])
    ]
    write(tmp_path / "items_shuffle_1000.json", [ITEM, ITEM, {**ITEM, "asin": "nan"}, {**ITEM, "asin": "B0123456789"}, *others])
    write(tmp_path / "items_ins_v2_1000.json", {"B09XYZ1234": ATTRIBUTES})
    write(tmp_path / "items_human_ins.json", {"B09XYZ1234": [PERSON, {**PERSON, "instruction_attributes": []}], "B0NOTHERE0": [PERSON]})
    return tmp_path


def write(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")


def test_the_originals_files_load_unchanged(folder):
    stock = products.products(products.read(str(folder)))
    assert list(stock) == ["B09XYZ1234", "B000000000", "B000000001", "B000000002"]  # repeats, "nan" and long ids are left out
    shoe = stock["B09XYZ1234"]
    assert (shoe.query, shoe.rating, shoe.reviews) == ("women's shoes", "N.A.", ())
    assert shoe.options == {"color": ("black | white", "red")}
    assert shoe.price_tag == "$1024.49 to $1039.99"
    assert 1024.49 <= shoe.price <= 1039.99
    assert [(p.price, p.price_tag) for p in list(stock.values())[1:]] == [(100.0, "$100.0"), (9.5, "$9.5"), (100.0, "$100.0")]
    assert stock["B000000000"].attributes == ()
    assert stock["B000000000"].bullets == ("one text",)


@pytest.mark.parametrize(("name", "options"), [("webshop/shop", 1), ("webshop/shop_templates", 1)])
def test_an_episode_on_real_data_says_so(folder, name, options):
    env = registry.make(name, grammar="bare", style="sep")
    (task,) = [task for task in registry.tasks(name) if "black" in task.goal]
    assert task.goal in env.reset(0, task.id).text
    for said in ("search[canvas shoes]", "click[B09XYZ1234]", "click[Black | White]", "choose[Buy Now]"):
        step = env.step(said)
        assert step.valid, said
    assert (step.success, step.info["data_source"], step.info["score"]) == (True, "real", 1.0)


def test_goals_of_the_originals_files(folder):
    files = products.read(str(folder))
    stock = products.products(files)
    (one,) = goals.goals(files, stock, "human")
    assert one.instruction == "i want shoes that do not slip in black"  # no bound above 980 dollars
    assert (one.attributes, one.options, one.price_upper) == (("non slip",), ("black | white",), goals.NO_BOUND)
    assert {goal.instruction.removeprefix("Find me non slip women's shoes") for goal in goals.goals(files, stock, "template")} == {
        " with color: black | white",
        " with color: red",
    }


def test_the_whole_names_are_read_before_the_short_ones(folder):
    write(folder / "items_shuffle.json", [{**ITEM, "asin": "B0WHOLE000"}])
    assert list(products.products(products.read(str(folder)))) == ["B0WHOLE000"]


def test_reviews_are_read_where_they_are(folder):
    write(
        folder / "reviews.json", [{"asin": "B09XYZ1234", "average_rating": 4.5, "reviews": [{"title": "T", "stars": "5.0", "review": "R"}]}]
    )
    shoe = products.products(products.read(str(folder)))["B09XYZ1234"]
    assert (shoe.rating, shoe.reviews[0].body) == ("4.5", "R")


def test_the_generated_files_load_as_the_originals_do(tmp_path):
    for name, content in catalogue.files().items():
        write(tmp_path / name, content)
    files = products.read(str(tmp_path))
    assert files.source == "real"
    assert products.products(files) == products.products(products.read(""))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("items_shuffle_1000.json", None, "items_shuffle.json is missing"),
        ("items_ins_v2_1000.json", None, "items_ins_v2.json is missing"),
        ("items_human_ins.json", None, "items_human_ins.json: it is missing"),
        ("items_shuffle_1000.json", "[{", "items_shuffle_1000.json: it cannot be read as JSON"),
        ("items_shuffle_1000.json", "version https://git-lfs", "cannot be read as JSON"),
        ("items_shuffle_1000.json", "[]", "items_shuffle_1000.json: it holds no products"),
        ("items_shuffle_1000.json", "{}", "it holds a dict where the original has a list"),
        ("items_shuffle_1000.json", '[{"asin": "B01"}]', r"product 0 \(B01\) has no 'name'"),
        ("items_shuffle_1000.json", json.dumps([{**ITEM, "pricing": "$abc"}]), r"product 0 \(B09XYZ1234\) is not in the original's form"),
        ("items_shuffle_1000.json", json.dumps([{**ITEM, "name": None}]), r"product 0 \(B09XYZ1234\) is not in the original's form"),
        ("items_human_ins.json", "{}", "items_human_ins.json: it holds no goal for any product"),
        ("items_human_ins.json", '{"B09XYZ1234": [{"instruction": "x"}]}', "B09XYZ1234, instruction 0 has no 'instruction_attributes'"),
        ("items_human_ins.json", '{"B09XYZ1234": {"instruction": "x"}}', "B09XYZ1234, instruction 0 has no 'instruction'"),
    ],
)
def test_N16_missing_or_broken_data_is_an_error_that_names_it_and_the_fix(folder, name, content, says):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(EnvUnavailable, match=f"(?s){says}.*unset WEBSHOP_DATA"):
        registry.make("webshop/shop")


def test_an_empty_or_missing_folder_is_an_error(tmp_path, monkeypatch):
    for value in (tmp_path, tmp_path / "nowhere"):
        monkeypatch.setenv("WEBSHOP_DATA", str(value))
        with pytest.raises(EnvUnavailable, match="unset WEBSHOP_DATA"):
            registry.make("webshop/shop")
        with pytest.raises(EnvUnavailable, match="unset WEBSHOP_DATA"):
            registry.tasks("webshop")


def test_without_its_packages_the_family_is_described_and_making_it_names_the_install_line():
    code = """
import sys
from envs import registry
from envs.api import EnvUnavailable
for package in ("rapidfuzz", "Stemmer", "bm25s"):
    sys.modules[package] = None
    try:
        registry.make("webshop/shop")
        raise AssertionError(package)
    except EnvUnavailable as error:
        assert "pip install 'crl-jax[webshop]'" in str(error) and package in str(error), error
    assert registry.spec("webshop/shop").namespace == "webshop" and registry.tasks("webshop/shop")
    del sys.modules[package]
registry.make("webshop/shop")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
