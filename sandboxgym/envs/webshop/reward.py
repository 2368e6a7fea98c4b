"""The original's reward for a purchase, with every quirk.

    total = r_type * (met attributes + met options + r_price) / (attributes + options + 1)

The product's type decides r_type: 1, 0.5, 0.1 or 0. An attribute is met if the product has one with nearly the same
text (`words.fuzzy`), or if it occurs in the product's text; an option is met if a chosen option has nearly the same
text. Surprising rules of the original:

1. The price is the product's, whatever the options; options are compared without regard to their group.
2. An option of a synthetic goal is compared as the text of the pair (group, value): it is met if the words of a chosen
   value are among those of the pair, which include the group's name. Colours are reduced to their name ("light blue"
   to "blue") in the chosen options and in the values of human goals; a pair is reduced only if its value is that name.
3. The title score is the share of the nouns in the title of the goal's product that the other title has too. If it is
   0, r_type is 0, and if it is below a tenth, r_type is 0.1, even if query or category match. If nouns repeat in its
   title, a goal's own product has a title score below 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from sandboxgym.envs.webshop.catalogues.product import Product
from sandboxgym.envs.webshop.goals import Goal, Options
from sandboxgym.envs.webshop.words.fuzzy import normalize_color, same
from sandboxgym.envs.webshop.words.nouns import Nouns


@dataclass(frozen=True, slots=True)
class Reward:
    """Reward of a purchase, with the parts it was computed from. Weights sum to 1."""

    total: float
    base: float
    """Reward before the type was taken into account: total = base * r_type."""
    r_type: float
    r_att: float
    r_option: float | None
    """Share of options met; None if the goal asks for no option, in which case `w_option` is 0."""
    r_price: bool
    w_att: float
    w_option: float
    w_price: float
    query_match: bool
    category_match: bool
    title_score: float


def reward(goal: Goal, product: Product, *, price: float, options: Mapping[str, str], nouns: Nouns) -> Reward:
    """Compute the reward of buying a product for a goal.

    Args:
        goal: goal of the episode.
        product: the bought product.
        price: price of the product in dollars (`sandboxgym.envs.webshop.goals.prices`).
        options: chosen values by group.
        nouns: tagger of the nouns of a title.

    Raises:
        NounsUnknown: ``nouns`` does not know a title.
    """
    r_type, query_match, category_match, title_score = _type_reward(goal, product, nouns)
    met_attributes = _met_attributes(goal.attributes, product)
    met_options = _met_options(goal.options, tuple(options.values()))
    r_price = price <= goal.price_upper
    parts = len(goal.attributes) + len(goal.options) + 1
    base = (met_attributes + met_options + r_price) / parts
    return Reward(
        total=base * r_type,
        base=base,
        r_type=r_type,
        r_att=met_attributes / len(goal.attributes),
        r_option=met_options / len(goal.options) if goal.options else None,
        r_price=r_price,
        w_att=len(goal.attributes) / parts,
        w_option=len(goal.options) / parts,
        w_price=1 / parts,
        query_match=query_match,
        category_match=category_match,
        title_score=title_score,
    )


def _type_reward(goal: Goal, product: Product, nouns: Nouns) -> tuple[float, bool, bool, float]:
    query_match = product.query == goal.query
    category_match = len(_levels(product.product_category) & _levels(goal.product_category)) >= 2
    wanted = nouns(goal.name)
    # Distinct nouns over all nouns: repeated ones count in the second only. 0.2 without nouns is the original's score.
    title_score = len({*nouns(product.title)} & {*wanted}) / len(wanted) if wanted else 0.2
    if title_score == 0:
        r_type = 0.0
    elif title_score < 0.1:
        r_type = 0.1
    elif query_match or category_match or title_score > 0.2:
        r_type = 1.0
    else:
        r_type = 0.5
    return r_type, query_match, category_match, title_score


@lru_cache(2**12)
def _levels(product_category: str) -> frozenset[str]:
    return frozenset(level.strip() for level in product_category.split("›"))


def _met_attributes(wanted: tuple[str, ...], product: Product) -> int:
    missing = [text for text in wanted if not any(same(attribute, text) for attribute in product.attributes)]
    if not missing:
        return len(wanted)
    texts = (product.title.lower(), " ".join(product.bullets).lower(), product.description.lower())
    return len(wanted) - sum(not any(attribute in text for text in texts) for attribute in missing)


@lru_cache(2**12)
def _met_options(wanted: Options, chosen: tuple[str, ...]) -> int:
    have = [normalize_color(option) for option in chosen]
    return sum(any(same(option, normalize_color(want)) for option in have) for want in wanted)
