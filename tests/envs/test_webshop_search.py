"""The shop's search: Lucene's BM25, checked against the formula written out, and its index kept once."""

import math
import random
import subprocess
import sys

import pytest

pytest.importorskip("bm25s")
pytest.importorskip("Stemmer")

from envs import registry
from envs.webshop import products, search, shop

STOP = "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to was will with"


@pytest.fixture(scope="module")
def stock():
    return shop.shop("human").stock


def split(text, stem):
    """Words by hand: letters and digits together, no stop words, stems."""
    cleaned = "".join(c if c.isalnum() else " " for c in text.lower()).split()
    return [stem(word) for word in cleaned if word not in STOP.split()]


def bm25(texts, query, stem):
    """The score of every text: sum over the query's words of idf x tf / (tf + k1 x (1 - b + b x length / mean length))."""
    documents = [split(text, stem) for text in texts]
    mean = sum(map(len, documents)) / len(documents)
    scores = [0.0] * len(documents)
    for word in split(query, stem):
        having = sum(word in document for document in documents)
        idf = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
        for place, document in enumerate(documents):
            tf = document.count(word)
            scores[place] += idf * tf / (tf + 0.9 * (1 - 0.4 + 0.4 * len(document) / mean)) if tf else 0.0
    return scores


def test_scores_and_order_are_those_of_the_formula():
    import Stemmer

    stem = Stemmer.Stemmer("porter").stemWord
    texts = [search.document(product) for product in products.products(products.read("")).values()][:150]
    texts = [text.replace("$", " ").replace(".", " ").replace("-", " ") for text in texts]
    index, draw = search.Index(texts), random.Random(3)
    vocabulary = sorted({word for text in texts for word in text.lower().split() if word.isalpha()})
    for _ in range(25):
        query = " ".join(draw.choice(vocabulary) for _ in range(draw.randrange(1, 6)))
        expected = bm25(texts, query, stem)
        scores = index.scores(query)
        assert (scores is None and not any(expected)) or scores.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
        order = sorted((place for place in range(len(texts)) if expected[place] > 0), key=lambda place: (-round(expected[place], 5), place))
        found = index.best(query)
        assert len(found) == min(50, len(order))
        assert [round(expected[place], 4) for place in found] == [round(expected[place], 4) for place in order[:50]]


def test_by_hand_a_rare_word_counts_more_and_a_short_text_more_than_a_long_one():
    index = search.Index(["red hat", "red hat with a very long text about nothing", "red shoe", "blue shoe", "the a of"])
    assert index.best("hat") == [0, 1]
    assert index.best("blue shoe")[:2] == [3, 2]
    assert index.best("the of a") == () == index.best("") == index.best("unknown words")
    # 5 texts, 1 has "blue"; its length is 2, the mean 2.4 (the words of the second that count: red hat veri long text about noth)
    mean = (2 + 7 + 2 + 2 + 0) / 5
    assert index.scores("blue")[3] == pytest.approx(math.log(1 + 4.5 / 1.5) / (1 + 0.9 * (0.6 + 0.4 * 2 / mean)), rel=1e-5)


def test_words_are_stems_without_stop_words_and_one_sign_words_stay():
    import Stemmer

    said = search.words("The Runner's SHOES are running, size M: 12.5 oz — café ponies", Stemmer.Stemmer("porter"))
    assert said == ["runner", "shoe", "run", "size", "m", "12.5", "oz", "café", "poni"]


def test_equal_scores_come_in_the_order_of_the_catalogue():
    index = search.Index(["same words"] * 80)
    assert index.best("same") == list(range(50))


def test_any_text_is_a_query(stock):
    for query in ("\0", "\ud800 hat", "a" * 3_000_000, "hat " * 500_000, "((((", "<r>", "'s ’s", "ß" * 1000):
        assert len(stock.search(query)) <= 50


def test_what_is_indexed_is_title_description_first_bullet_and_options(stock):
    product = next(iter(stock.products.values()))
    text = search.document(product)
    assert product.title in text
    assert product.description in text
    assert product.bullets[0] in text
    assert product.bullets[1] not in text
    assert ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items()) in text


def test_most_products_are_on_the_first_page_when_their_title_is_searched(stock):
    some = list(stock.products.values())[:200]
    assert all(product in stock.search(product.title) for product in some)
    assert sum(product in stock.search(product.title)[:10] for product in some) > 190


def test_64_environments_share_one_index_and_one_catalogue(monkeypatch):
    def never(*arguments):
        raise AssertionError("built again")

    registry.make("webshop/shop")
    monkeypatch.setattr(search, "Index", never)
    monkeypatch.setattr(products, "products", never)
    envs = [registry.make(name) for name in ("webshop/shop", "webshop/shop_templates") for _ in range(32)]
    assert len({id(env.shop.stock) for env in envs}) == 1
    assert len({id(env.shop) for env in envs}) == 2


def test_jax_is_not_loaded_by_the_search_library():
    """bm25s imports jax where it is installed and computes with it, which would take a device in every worker."""
    code = (
        "import sys; from envs import registry; registry.make('webshop/shop').reset(0);"
        "assert 'bm25s' in sys.modules; assert not [m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib')]; import importlib.util;"
        "assert 'jax' not in sys.modules and importlib.util.find_spec('yaml')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
