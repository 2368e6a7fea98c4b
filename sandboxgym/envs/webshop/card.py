"""Card of WebShop: its system prompt, data set and extras, known before the environment is made."""

from __future__ import annotations

from dataclasses import replace

from sandboxgym.data import DataFile, DataSet
from sandboxgym.task_env import EnvCard

# The addresses of the original's setup script, in the form that returns the file rather than a page about it.
_DRIVE = "https://drive.usercontent.google.com/download?export=download&confirm=t&id="
_HUMAN = DataFile("items_human_ins.json", _DRIVE + "14Kb5SPBk_jfdLZ_CDBNitW98QLDlKR5O")
CATALOGUE = DataSet(
    "webshop",
    "the original's product catalogue, goals and human instructions",
    "code MIT; product text scraped by the original's authors",
    {
        "1000": (
            DataFile("items_shuffle_1000.json", _DRIVE + "1EgHdxQ_YxqIQlvvq5iKlCrkEKR6-j0Ib"),
            DataFile("items_ins_v2_1000.json", _DRIVE + "1IduG0xl544V_A_jv3tHXC0kyFi7PnyBu"),
            _HUMAN,
        ),
        "all": (
            DataFile("items_shuffle.json", _DRIVE + "1A2whVgOO0euk5O13n2iYDM0bQRkkRduB"),
            DataFile("items_ins_v2.json", _DRIVE + "1s2j6NgHljiZzQNL3veZaAiyW_qDEgBNi"),
            _HUMAN,
        ),
    },
    {"1000": "the first 1,000 products", "all": "all 1,181,436 products (several GB)"},
)
CARD = EnvCard(
    title="WebShop",
    system_prompt="""You are in a web shop, to buy what an instruction asks for. One action a turn:
search[keywords] where the page has a search bar, click[name] for whatever the page lets you click.
Look for a product of the right kind, within the price; choose its options by clicking on them; click[buy now] ends the
episode, and your purchase is compared with the instruction.""",
    data_sets=(CATALOGUE,),
    caches={"webshop": "catalogue and search index"},
    extra="webshop",
    module="regex",
    ready="a generated catalogue",
    played_with={"observation_mode": "text_rich"},
)
BROWSER_CARD = replace(
    CARD,
    title="",
    extra="browser",
    module="playwright",
    probes="sandboxgym.envs.webshop.doctor:PROBES",
    played_with={},
)
