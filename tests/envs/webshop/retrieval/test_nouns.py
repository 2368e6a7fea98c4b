from __future__ import annotations

import copy
import importlib.util
import json
import sys
from collections import Counter
from fractions import Fraction

import pytest
from gymnasium.error import DependencyNotInstalled

from sandboxgym.envs.webshop.words.nouns import NounsUnknown, open_nouns
from sandboxgym.envs.webshop.words.tagger import find_nouns, words

EMBEDDED = open_nouns("embedded")


def title_score(goal, bought):
    wanted = EMBEDDED(goal)
    return len(set(wanted) & set(EMBEDDED(bought))) / len(wanted)


# What spaCy's model gives, after the tests of the original.
SOUNDBAR = "Saireed UL Listed 2 Prong Power Cord for JBL Bar 3.1 Bar 2.1 Channel 4K Ultra HD Soundbar"
CORD = "BRST AC Power Cord Outlet Socket Cable Plug Lead for Panasonic SC-HT830V DVD/VCR Combo Home Theater System"
PUBLISHED = [
    (
        "Mens D.O.N. Issue 2 Gca Basketball Sneakers Shoes Casual - Off White",
        "PEAK High Top Mens Basketball Shoes Lou Williams Streetball Master Breathable Non Slip Outdoor Sneakers",
        0.333,
    ),
    (f"{SOUNDBAR} Home Theater System Subwoofer", CORD, 0.30),
    (SOUNDBAR, CORD, 0.15),
    (
        "Rusticware 921ORB Kitchen and Bath Cabinet Knob",
        "Minkissy 2pcs Stainless Steel Eyebrow Tweezers Blackhead Acne Remover Portable Makeup Tweezers (Silver)",
        0.0,
    ),
]


@pytest.mark.parametrize(("goal", "bought", "published"), PUBLISHED)
def test_title_scores_agree_with_the_published_ones(goal, bought, published):
    assert title_score(goal, bought) == pytest.approx(published, abs=0.01)


def test_title_scores_agree_with_purchases_by_people(parity_data):
    # The nouns of the bought title are mostly not known, but a score is a fraction of the number of the goal's nouns.
    fits = total = 0
    for path in sorted((parity_data / "webshop" / "human_trajs").glob("*.jsonl")):
        last = json.loads(path.read_text().splitlines()[-1])
        score, name = last["reward_info"]["title_score"], last["goal"]["name"]
        total += 1
        fits += len(EMBEDDED(name)) % Fraction(score).limit_denominator(100).denominator == 0
        if last["content"]["asin"] == last["goal"]["asin"]:
            assert title_score(name, name) == pytest.approx(score, abs=0.05)
    assert total >= 25
    assert fits >= 0.8 * total


def test_nouns_agree_with_the_taggers_of_the_recordings(parity_data):
    recorded = json.loads((parity_data / "webshop" / "title_nouns.json").read_text())
    common = sum((Counter(EMBEDDED(title)) & Counter(nouns)).total() for title, nouns in recorded.items())
    either = sum((Counter(EMBEDDED(title)) | Counter(nouns)).total() for title, nouns in recorded.items())
    assert common / either > 0.9


@pytest.mark.slow
def test_titles_are_cut_as_spacy_cuts_them(parity_data):
    spacy = pytest.importorskip("spacy", reason="its tokenizer is compared with, if it is installed")
    nlp = spacy.blank("en")
    titles = json.loads((parity_data / "webshop" / "title_nouns.json").read_text())
    same = sum([token.text for token in nlp(title) if not token.is_space] == words(title) for title in titles)
    assert same / len(titles) > 0.99


@pytest.mark.parametrize(
    ("title", "cut"),
    [
        ("Women's 3-Seat Sofa w/Arms", ["Women", "'s", "3", "-", "Seat", "Sofa", "w", "/", "Arms"]),
        ("(Pack of 12), 5.5oz/155g", ["(", "Pack", "of", "12", ")", ",", "5.5oz/155", "g"]),
        ("Dust-Proof AC/DC 4K", ["Dust", "-", "Proof", "AC", "/", "DC", "4", "K"]),
        ('16" x 16"…', ["16", '"', "x", "16", '"', "…"]),
        ("Dr. Oil & Co.", ["Dr.", "Oil", "&", "Co."]),
        ("-", ["-"]),
        ("", []),
    ],
)
def test_words(title, cut):
    assert words(title) == cut


@pytest.mark.parametrize(
    ("title", "nouns"),
    [
        ("Clear Glass Box with Velvet Tray", "clear glass box velvet tray"),
        ("clear glass box with velvet tray", "glass box velvet tray"),
        ("Walking Shoes for Women", "shoes women"),
        ("Shoes for Walking", "shoes walking"),
        ("Geometric-Inspired Lamp, Pack of 2", "geometric lamp pack"),
        ("24Inch Wig 2PK A1466", "wig a1466"),
        ("washable waterproof table", "table"),
        ("2 & 3", ""),
    ],
)
def test_embedded_nouns(title, nouns):
    assert " ".join(find_nouns(title)) == nouns


def test_backends_have_names():
    assert EMBEDDED.name == "embedded"
    assert open_nouns("embedded") is EMBEDDED is copy.deepcopy(EMBEDDED)
    assert open_nouns(str.split).name == "callable:str.split"


def test_a_function_is_asked_once_for_each_title():
    asked = []
    nouns = open_nouns(lambda title: asked.append(title) or title.split())
    assert nouns("a b a") == ("a", "b", "a") == nouns("a b a")
    assert asked == ["a b a"]


def test_a_file_of_nouns(tmp_path):
    path = tmp_path / "nouns.json"
    path.write_text(json.dumps({"Oak Shelf": ["shelf"]}))
    nouns = open_nouns(path)
    assert nouns("Oak Shelf") == ("shelf",)
    assert nouns.name == "file:nouns.json"
    with pytest.raises(NounsUnknown, match=r"nouns\.json has no nouns for the title 'Pine Shelf'"):
        nouns("Pine Shelf")
    lenient = open_nouns(path, fallback="embedded")
    assert lenient.name == "file:nouns.json+embedded"
    assert lenient("Oak Shelf") == ("shelf",)
    assert lenient("Pine Shelf") == ("pine", "shelf")


@pytest.mark.parametrize("content", ["{", "[]", '{"title": "noun"}', '{"title": [1]}'])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    path = tmp_path / "nouns.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"nouns\.json: expected a (JSON object|list of nouns)"):
        open_nouns(path)


def test_a_missing_file_and_a_useless_fallback_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_nouns(tmp_path / "nowhere.json")
    with pytest.raises(ValueError, match="a fallback is for files"):
        open_nouns("embedded", fallback="spacy")


def test_spacy_is_asked_for_by_name_and_explained_if_missing(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(
            DependencyNotInstalled, match="pip install spacy && python -m spacy download en_core_web_sm"
        ):
            open_nouns("spacy")
    if importlib.util.find_spec("spacy"):
        with pytest.raises(DependencyNotInstalled, match="python -m spacy download en_no_such_model"):
            open_nouns("spacy:en_no_such_model")


def test_spacy_gives_nouns_and_proper_nouns(monkeypatch):
    class Token:
        def __init__(self, text, tag):
            self.text, self.pos_ = text, tag

    class Model:
        @staticmethod
        def load(name, disable):
            assert name == "en_test"
            assert "tagger" not in disable
            return lambda title: [Token(*word.split("/")) for word in title.split()]

    monkeypatch.setitem(sys.modules, "spacy", Model)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    nouns = open_nouns("spacy:en_test")
    assert nouns.name == "spacy:en_test"
    assert nouns("Oak/PROPN Big/ADJ Shelf/NOUN") == ("oak", "shelf")
