from __future__ import annotations

import copy
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from sandboxgym.envs.webshop.catalogues import catalogue as catalogue_module
from sandboxgym.envs.webshop.catalogues import generated as generated_products
from sandboxgym.envs.webshop.catalogues import json_stream
from sandboxgym.envs.webshop.catalogues import memory_mapped as catalogue_store
from sandboxgym.envs.webshop.catalogues.catalogue import (
    CatalogueMalformed,
    CatalogueNotFound,
    MemoryCatalogue,
    load_catalogue,
)
from sandboxgym.envs.webshop.catalogues.official_data import find_files
from sandboxgym.envs.webshop.catalogues.product import decode, encode
from sandboxgym.system import once


def item(asin="B000000001", **changes):
    return {
        "asin": asin,
        "name": "Oak Shelf",
        "full_description": "Holds books.",
        "small_description": ["Sturdy", "Oiled"],
        "pricing": "$19.99",
        "images": ["https://example.org/shelf.jpg"],
        "product_category": "Home › Furniture › Shelves",
        "customization_options": "",
        "category": "garden",
        "query": " Wall Shelves ",
        "page": 3,
        **changes,
    }


def write(directory, items, instructions=None, human=None, suffix=""):
    directory.mkdir(parents=True, exist_ok=True)
    if instructions is None:
        instructions = {entry["asin"]: {"attributes": ["solid wood"]} for entry in items if "asin" in entry}
    (directory / f"items_shuffle{suffix}.json").write_text(json.dumps(items))
    (directory / f"items_ins_v2{suffix}.json").write_text(json.dumps(instructions))
    if human is not None:
        (directory / "items_human_ins.json").write_text(json.dumps(human))
    return directory


def load_one(directory, *, instructions=None, **changes):
    return load_catalogue(write(directory, [item(**changes)], instructions)).at(0)


@pytest.fixture
def generated(tmp_path):
    generated_products.write_files(tmp_path / "generated", 300)
    return tmp_path / "generated"


def test_a_product_has_the_fields_of_the_original_loader(tmp_path):
    product = load_one(tmp_path)
    assert (product.title, product.description, product.bullets) == ("Oak Shelf", "Holds books.", ("Sturdy", "Oiled"))
    assert product.query == "wall shelves"
    assert product.pricing == (19.99,)
    assert product.price_text == "$19.99"
    assert product.options == {}
    assert product.attributes == ("solid wood",)
    assert product.instruction is None
    assert product.instruction_attributes == ()
    assert product.image == "https://example.org/shelf.jpg"


@pytest.mark.parametrize(
    ("pricing", "values", "text"),
    [
        ("", (100.0,), "$100.0"),
        (None, (100.0,), "$100.0"),
        ("$877.80", (877.8,), "$877.8"),
        ("$1,299.00", (1299.0,), "$1299.0"),
        ("$19.99 - $27.99", (19.99, 27.99), "$19.99 to $27.99"),
        ("$19.99$27.99$30", (19.99, 27.99), "$19.99 to $27.99"),
    ],
)
def test_prices_are_read_as_the_original_reads_them(tmp_path, pricing, values, text):
    product = load_one(tmp_path, pricing=pricing)
    assert (product.pricing, product.price_text) == (values, text)


def test_options_are_normalised_as_the_original_does(tmp_path):
    groups = {
        "Size": [{"value": " X-Large ", "image": None}, {"value": "10/12"}],
        "Color": None,
        "FIT": [{"value": "Slim"}],
    }
    product = load_one(tmp_path, customization_options=groups)
    assert list(product.options.items()) == [("size", ("x-large", "10 | 12")), ("fit", ("slim",))]


def test_features_that_are_one_string_become_one_feature(tmp_path):
    assert load_one(tmp_path, small_description="Sturdy").bullets == ("Sturdy",)


def test_missing_attributes_are_not_the_same_as_none(tmp_path):
    assert load_one(tmp_path / "none", instructions={"B000000001": {"attributes": []}}).attributes == ()
    assert load_one(tmp_path / "missing", instructions={"B000000001": {}}).attributes == ("DUMMY_ATTR",)


def test_records_without_a_proper_asin_and_second_ones_are_left_out(tmp_path):
    items = [item("nan"), item("B00000000001"), item("B1", name="first"), item("B2"), item("B1", name="second")]
    catalogue = load_catalogue(write(tmp_path, items))
    assert [(product.asin, product.title) for product in catalogue.products()] == [("B1", "first"), ("B2", "Oak Shelf")]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_stream_of_all_products_does_not_stay_in_memory(generated, tmp_path, monkeypatch):
    store = catalogue_store.open_store(find_files(generated), tmp_path)

    def held():
        """Kilobytes of the products' file in the memory of this process."""
        mapped = (store.directory / "records.bin").resolve()
        maps = Path("/proc/self/smaps").read_text().split(f"{mapped}\n")[1:]
        return sum(int(re.search(r"^Rss: +(\d+) kB", part, re.MULTILINE)[1]) for part in maps)

    every = list(store.products())
    assert held() > 200
    monkeypatch.setattr(catalogue_store, "RELEASED", 2**14)
    assert list(store.products()) == every
    assert held() <= 80  # the last part, and what the kernel reads around it
    assert store.at(0) == every[0]


def test_a_catalogue_finds_products_by_asin_position_category_and_query(generated):
    catalogue = load_catalogue(generated)
    assert len(catalogue) == 300 == len(catalogue.asins())
    for position, product in enumerate(catalogue.products()):
        assert catalogue.at(position) == product == catalogue[product.asin]
        assert catalogue.position(product.asin) == position
        assert product.asin in catalogue
    assert "B000" not in catalogue
    assert 7 not in catalogue
    for method in (catalogue.__getitem__, catalogue.position):
        with pytest.raises(KeyError):
            method("B000")
    first = catalogue.at(0)
    same_category = [product.asin for product in catalogue.products() if product.category == first.category]
    same_query = [product.asin for product in catalogue.products() if product.query == first.query]
    assert list(catalogue.in_category(first.category)) == same_category
    assert list(catalogue.in_query(first.query)) == same_query
    assert len(same_category) > len(same_query) > 1
    assert list(catalogue.in_category("toys")) == list(catalogue.in_query("toys")) == []


def test_a_source_is_loaded_once_until_its_files_change(tmp_path):
    directory = write(tmp_path, [item()])
    catalogue = load_catalogue(directory)
    assert load_catalogue(directory) is catalogue is load_catalogue(directory / "items_shuffle.json")
    assert copy.deepcopy(catalogue) is catalogue
    assert load_catalogue() is load_catalogue("embedded")
    write(directory, [item(name="Another shelf")])
    assert load_catalogue(directory).at(0).title == "Another shelf"


def test_the_digest_depends_on_the_products_alone(tmp_path):
    one = load_catalogue(write(tmp_path / "one", [item()]))
    moved = load_catalogue(write(tmp_path / "moved", [item(page=4)], human={}, suffix="_1000"))
    changed = load_catalogue(write(tmp_path / "changed", [item(pricing="$20")]))
    assert one.digest == moved.digest != changed.digest
    options = {"B": [{"value": "1"}], "A": [{"value": "1"}]}
    there = load_catalogue(write(tmp_path / "there", [item(customization_options=options)]))
    back = load_catalogue(write(tmp_path / "back", [item(customization_options=dict(reversed(options.items())))]))
    assert there.digest != back.digest


def test_two_products_with_one_asin_are_refused():
    product = next(load_catalogue().products())
    with pytest.raises(ValueError, match=f"two products have the asin {product.asin}"):
        MemoryCatalogue([product, product], name="twice")


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(CatalogueNotFound, match="no such catalogue"):
        load_catalogue(tmp_path / "nowhere")
    with pytest.raises(CatalogueNotFound, match=r"expected one items_shuffle\*.json .* found none"):
        load_catalogue(tmp_path)
    directory = write(tmp_path, [item()])
    (directory / "items_ins_v2.json").unlink()
    with pytest.raises(CatalogueNotFound, match=r"expected items_ins_v2\.json next to"):
        load_catalogue(directory)
    write(directory, [item()])
    with pytest.raises(CatalogueNotFound, match=r"human goals need .*items_human_ins\.json"):
        load_catalogue(directory).human_instructions()


def test_of_two_products_files_one_must_be_chosen(tmp_path):
    write(tmp_path, [item(name="all")])
    write(tmp_path, [item(name="some")], suffix="_1000")
    with pytest.raises(CatalogueNotFound, match=r"found items_shuffle\.json, items_shuffle_1000\.json"):
        load_catalogue(tmp_path)
    assert load_catalogue(tmp_path / "items_shuffle_1000.json").at(0).title == "some"
    (tmp_path / "items_ins_v2_1000.json").unlink()  # those of all products hold for some
    assert load_catalogue(tmp_path / "items_shuffle_1000.json").at(0).attributes == ("solid wood",)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": None}, "a string 'name', found None"),
        ({"small_description": [1]}, "a list of strings 'small_description', found"),
        ({"pricing": "19.99"}, "a 'pricing' such as"),
        ({"pricing": "$1.2.3"}, "a 'pricing' such as"),
        ({"pricing": 19.99}, "a 'pricing' such as"),
        ({"images": []}, "a list 'images' with at least one"),
        ({"customization_options": ["Size"]}, "'customization_options' to be an object"),
        ({"customization_options": {"Size": "X"}}, "option group 'Size' to be a list"),
        ({"customization_options": {"Size": [{"name": "X"}]}}, "a 'value' in each of option group 'Size'"),
    ],
)
def test_a_malformed_product_is_named_by_file_number_and_asin(tmp_path, changes, expected):
    directory = write(tmp_path, [item("B1"), item("B2", **changes)])
    with pytest.raises(CatalogueMalformed) as raised:
        load_catalogue(directory)
    assert f"{directory / 'items_shuffle.json'}: record 1 (asin B2): expected {expected}" in str(raised.value)


def test_missing_keys_are_named(tmp_path):
    without_query = {key: value for key, value in item().items() if key != "query"}
    without_options = {key: value for key, value in item().items() if key != "customization_options"}
    for record, expected in [
        (without_query, "'query', found 'no such key'"),
        (without_options, "customization_options"),
    ]:
        with pytest.raises(CatalogueMalformed, match=expected):
            load_catalogue(write(tmp_path, [record]))
    for records, expected in [([{"name": "x"}], "record 0: expected a string 'asin'"), ([7], "record 0: .* an object")]:
        (tmp_path / "items_shuffle.json").write_text(json.dumps(records))
        with pytest.raises(CatalogueMalformed, match=expected):
            load_catalogue(tmp_path)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ([], "an object"),
        ({"attributes": "solid wood"}, "a list of strings 'attributes'"),
        ({"attributes": [], "instruction": 3, "instruction_attributes": ["x"]}, "a string 'instruction'"),
        ({"attributes": [], "instruction": "Find", "instruction_attributes": []}, "at least one of instruction_attr"),
    ],
)
def test_malformed_instructions_are_named(tmp_path, record, expected):
    with pytest.raises(CatalogueMalformed, match=f"items_ins_v2.json: asin B1: expected {expected}"):
        load_catalogue(write(tmp_path, [item("B1")], {"B1": record}))


def test_malformed_human_instructions_are_named(tmp_path):
    catalogue = load_catalogue(write(tmp_path, [item("B1")], human={"B1": [{"instruction": "i want"}]}))
    with pytest.raises(CatalogueMalformed, match=r"items_human_ins\.json: asin B1, instruction 0: .*instruction_attr"):
        catalogue.human_instructions()


def test_instructions_of_other_products_are_refused_and_some_missing_are_reported(tmp_path, caplog):
    with pytest.raises(CatalogueMalformed, match="no entry for 1 of 1 products, such as B1"):
        load_catalogue(write(tmp_path, [item("B1")], {"B9": {}}))
    catalogue = load_catalogue(write(tmp_path, [item("B1"), item("B2")], {"B2": {"attributes": ["x"]}}))
    assert catalogue["B1"].attributes == ("DUMMY_ATTR",)
    assert "no entry for 1 of 2 products, such as B1" in caplog.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", r"expected '\[' at the start, found the end of the file"),
        ("{}", r"expected '\[' at the start, found '{}'"),
        ('[{"asin": "B1"} {"asin": "B2"}]', "or ',' after record 0"),
        ('[{"asin": "B1", }]', "record 0: expected JSON"),
        ("[[1], [2, [3]", "record 1|after record 1"),
        ("[[1]] and more", "expected the end of the file, found 'and more'"),
        ("[[1],]", "record 1: expected JSON"),
    ],
)
def test_broken_json_is_named_by_record(tmp_path, text, expected):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(CatalogueMalformed, match=expected):
        list(json_stream.array_elements(path))


def test_broken_objects_and_encodings_are_named(tmp_path):
    path = tmp_path / "broken.json"
    for text, expected in [
        (b'{"B1": {}, 7: {}}', "the key after 'B1': expected a string, found 7"),
        (b'{"B1" {}}', "expected ':' after key 'B1'"),
        (b'{"B1": {}', "or ',' after the value of 'B1'"),
        (b'{"B1": "\xff"}', "expected UTF-8"),
    ]:
        path.write_bytes(text)
        with pytest.raises(CatalogueMalformed, match=expected):
            list(json_stream.object_items(path))


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64, 4096])
def test_where_the_reader_is_cut_off_makes_no_difference(tmp_path, monkeypatch, chunk):
    rng = random.Random(chunk)
    values = [
        {"text": 'ü \\ " [,]{:} \ud800' * rng.randrange(3), "number": [rng.random(), -3, None, True], "empty": [[], {}]}
        for _ in range(20)
    ]
    path = tmp_path / "values.json"
    monkeypatch.setattr(json_stream, "CHUNK", chunk)
    for indent in (None, 2):
        path.write_text(json.dumps(values, indent=indent))
        assert list(json_stream.array_elements(path)) == list(enumerate(values))
        pairs = {f"key {number}": value for number, value in enumerate(values)}
        path.write_text(json.dumps(pairs, indent=indent) + "\n")
        assert dict(json_stream.object_items(path)) == pairs
    path.write_text(" [ ] ")
    assert list(json_stream.array_elements(path)) == []
    path.write_text("{}")
    assert list(json_stream.object_items(path)) == []


def test_a_record_without_end_is_not_read_to_the_end_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(json_stream, "CHUNK", 16)
    monkeypatch.setattr(json_stream, "MAX_RECORD", 100)
    path = tmp_path / "broken.json"
    path.write_text('["lost ' + "quote " * 1000)
    read = []
    original = json_stream._Text._read
    monkeypatch.setattr(json_stream._Text, "_read", lambda self: read.append(1) or original(self))
    with pytest.raises(CatalogueMalformed, match="record 0: expected JSON"):
        list(json_stream.array_elements(path))
    assert len(read) < 20


def test_products_are_encoded_without_loss(generated):
    products = [*load_catalogue(generated).products(), load_catalogue().at(3)]
    for product in products:
        again = decode(encode(product))
        assert again == product
        assert list(again.options) == list(product.options)
    assert decode(encode(load_one(generated / "odd", name="lone \ud83d"))).title == "lone \ud83d"


def test_a_stored_catalogue_equals_one_in_memory(generated, tmp_path, monkeypatch):
    in_memory = load_catalogue(generated)
    monkeypatch.setattr(catalogue_module, "IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(catalogue_module, "_loaded", {})
    stored = load_catalogue(generated)
    assert isinstance(stored, catalogue_store.StoredCatalogue)
    assert stored.digest == in_memory.digest
    assert stored.name == in_memory.name
    assert list(stored.products()) == list(in_memory.products())
    assert list(stored.asins()) == list(in_memory.asins())
    assert stored.asins()[3:5] == in_memory.asins()[3:5]
    assert [list(product.options) for product in stored.products()] == [
        list(product.options) for product in in_memory.products()
    ]
    assert stored.human_instructions() == in_memory.human_instructions()
    for position, asin in enumerate(in_memory.asins()):
        assert stored.position(asin) == position
        assert stored[asin] == in_memory[asin] == stored.at(position)
    for query in {product.query for product in in_memory.products()}:
        assert list(stored.in_query(query)) == list(in_memory.in_query(query))
    for category in ("beauty", "toys"):
        assert list(stored.in_category(category)) == list(in_memory.in_category(category))
    for unknown in ("", "A", "B0ZZZZZZZZ", "B0ZZZZZZZZZZ", "ü", 7):
        assert unknown not in stored
    for position in (-1, len(stored)):
        with pytest.raises(IndexError):
            stored.at(position)
    assert copy.deepcopy(stored) is stored
    a, b = stored.columns(), in_memory.columns()
    assert a.pricing.tobytes() == b.pricing.tobytes()
    assert a.goals.tolist() == b.goals.tolist()
    assert a.attribute_goals == b.attribute_goals


def test_a_store_is_built_once_and_again_when_the_files_change_or_it_is_damaged(
    generated, tmp_path, monkeypatch, caplog
):
    builds = []
    build = catalogue_store._build
    monkeypatch.setattr(catalogue_store, "_build", lambda *args: builds.append(1) or build(*args))
    stores = tmp_path / "stores"
    digest = catalogue_store.open_store(find_files(generated), stores).digest
    assert catalogue_store.open_store(find_files(generated), stores).digest == digest
    assert len(builds) == 1
    (store,) = stores.glob("catalogue-*[!k]")
    for damage in (
        lambda: os.truncate(store / "records.bin", 100),
        lambda: (store / "meta.json").write_text("{"),
        lambda: (store / "positions.npy").unlink(),
        lambda: os.truncate(store / "offsets.npy", 200),
    ):
        damage()
        builds.clear()
        assert catalogue_store.open_store(find_files(generated), stores).digest == digest
        assert len(builds) == 1
        assert "is damaged and will be built again" in caplog.text
    write(generated, [item()], human={})
    assert len(catalogue_store.open_store(find_files(generated), stores)) == 1


def test_a_malformed_file_leaves_no_store(tmp_path):
    directory = write(tmp_path / "data", [item("B1"), item("B2", name=3)])
    with pytest.raises(CatalogueMalformed, match="asin B2"):
        catalogue_store.open_store(find_files(directory), tmp_path / "stores")
    assert [path.suffix for path in (tmp_path / "stores").iterdir()] == [".lock"]


def _open_and_report(directory, stores, started, queue):
    started.wait()
    queue.put(catalogue_store.open_store(find_files(directory), stores).digest)


@pytest.mark.skipif(once.fcntl is None, reason="two processes may both build where there are no locks")
def test_of_several_processes_one_builds_the_store(generated, tmp_path, monkeypatch):
    context = multiprocessing.get_context("fork")
    builds = tmp_path / "builds"
    build = catalogue_store._build

    def counted(*args):
        with builds.open("a") as file:
            file.write("x")
        build(*args)

    monkeypatch.setattr(catalogue_store, "_build", counted)
    started, queue = context.Event(), context.Queue()
    arguments = (generated, tmp_path / "stores", started, queue)
    processes = [context.Process(target=_open_and_report, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    started.set()
    digests = {queue.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(60)
    assert digests == {load_catalogue(generated).digest}
    assert builds.read_text() == "x"


@pytest.mark.skipif(once.fcntl is None, reason="needs fork")
def test_what_a_killed_builder_leaves_is_removed_by_the_next(generated, tmp_path, monkeypatch):
    context = multiprocessing.get_context("fork")
    stores = tmp_path / "stores"

    def hang(files, directory, told):
        (directory / "records.bin").write_bytes(b"half")
        time.sleep(600)

    with monkeypatch.context() as patch:
        patch.setattr(catalogue_store, "_build", hang)
        process = context.Process(target=catalogue_store.open_store, args=(find_files(generated), stores))
        process.start()
        deadline = time.monotonic() + 300
        while not list(stores.glob(".catalogue-*/records.bin")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    assert list(stores.glob(".catalogue-*"))
    assert len(catalogue_store.open_store(find_files(generated), stores)) == 300
    assert not list(stores.glob(".catalogue-*"))


def test_files_are_not_modified(generated):
    before = {path.name: path.read_bytes() for path in generated.iterdir()}
    shutil.copytree(generated, generated.parent / "kept")
    for path in generated.iterdir():
        path.chmod(0o400)
    load_catalogue(generated).human_instructions()
    assert {path.name: path.read_bytes() for path in generated.iterdir()} == before


def test_the_official_thousand(parity_data):
    catalogue = load_catalogue(parity_data / "webshop")
    assert len(catalogue) == 1000
    assert sum(product.instruction is not None for product in catalogue.products()) == 415
    assert sum(product.price_text == "$100.0" for product in catalogue.products()) >= 89
    assert sum(len(product.pricing) == 2 for product in catalogue.products()) == 93
    assert sum(map(len, catalogue.human_instructions().values())) == 13
