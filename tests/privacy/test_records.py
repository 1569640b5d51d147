"""Attack records, one per file and packed."""

from functools import partial

import pytest

from feddg_attacks.records import attack_path, find_attack, packables, read_attacks, save_attack
from feddg_bench.common.errors import DataError
from feddg_bench.records.sources import pack, unpack
from tests.privacy.test_exposure import record

KEYS = ("0" * 16, "a" * 16, "b" * 16)


def pack_attacks(root):
    return pack(partial(packables, root))


def unpack_attacks(root):
    return unpack(partial(packables, root))


@pytest.fixture
def folder(tmp_path):
    for key in KEYS:
        save_attack(tmp_path, record(0.7).model_copy(update={"key": key}))
    return tmp_path


def test_packed_records_are_those_that_were_packed_and_come_back(folder):
    before, texts = read_attacks([folder]), [attack_path(folder, k).read_bytes() for k in KEYS]
    (path,) = pack_attacks(folder)
    assert sorted(p.name for p in (folder / "attacks").iterdir()) == [
        "SHA256SUMS",
        "digits4-ltdo-quick.jsonl.xz",
    ]
    assert read_attacks([folder]) == before
    assert find_attack(folder, KEYS[1]) == before[1]
    assert find_attack(folder, "c" * 16) is None
    data = path.read_bytes()
    assert pack_attacks(folder) == []
    assert unpack_attacks(folder) == [path]
    assert [attack_path(folder, k).read_bytes() for k in KEYS] == texts
    assert pack_attacks(folder) == [path]
    assert path.read_bytes() == data


def test_unpacking_replaces_a_broken_single_file(folder):
    pack_attacks(folder)
    whole = find_attack(folder, KEYS[0])
    attack_path(folder, KEYS[0]).write_text("{ broken")
    unpack_attacks(folder)
    assert find_attack(folder, KEYS[0]) == whole


def test_a_single_file_wins_and_is_added(folder):
    (path,) = pack_attacks(folder)
    again = record(0.9).model_copy(update={"key": KEYS[0]})
    save_attack(folder, again)
    save_attack(folder, again.model_copy(update={"key": "d" * 16}))
    assert find_attack(folder, KEYS[0]) == again
    assert pack_attacks(folder) == [path]
    found = read_attacks([folder])
    assert [r.key for r in found] == [*KEYS, "d" * 16]
    assert found[0] == again


def test_a_repeated_attack_wins_over_a_packed_one_of_another_recipe(folder):
    old = record(0.1).model_copy(update={"key": KEYS[0], "recipe": "a_recipe"})
    save_attack(folder, old)
    pack_attacks(folder)
    again = record(0.9).model_copy(update={"key": KEYS[0], "recipe": "quick"})
    save_attack(folder, again)
    pack_attacks(folder)
    assert find_attack(folder, KEYS[0]) == again
    assert len(read_attacks([folder])) == len(KEYS)


def test_a_packed_file_that_cannot_be_read_is_not_lost(folder, caplog):
    (path,) = pack_attacks(folder)
    cut = path.read_bytes()[:-9]
    path.write_bytes(cut)
    save_attack(folder, record(0.9))
    with pytest.raises(DataError, match="cannot be added to"):
        pack_attacks(folder)
    assert path.read_bytes() == cut
    assert [r.key for r in read_attacks([folder])] == [KEYS[0]]
    assert path.name in caplog.text


def test_a_record_that_cannot_be_read_back_keeps_its_own_file(folder, monkeypatch):
    monkeypatch.setattr("feddg_bench.records.sources.lzma.compress", lambda *_, **__: b"cut short")
    with pytest.raises(DataError, match="no whole xz file"):
        pack_attacks(folder)
    assert all(attack_path(folder, key).exists() for key in KEYS)
