"""An attacker sees exactly the messages that are visible to it."""

import pytest
import torch

from feddg_attacks.capture import visible
from feddg_attacks.records import ATTACKERS
from feddg_bench.testing.toy import TaskRecorder, start_toy_run
from tests.privacy.scenes import CLIENTS, attacked_federation, captured

PIXEL = {"hyper": {"style": "pixel"}}


def test_a_server_sees_one_style_of_every_client_as_it_was_sent() -> None:
    _, capture = captured("pardon", PIXEL)
    recorder = TaskRecorder()
    toy = start_toy_run(
        "pardon",
        {"partition": {"clients": CLIENTS}, "federation": {"per_round": None}},
        PIXEL,
        federation=attacked_federation(),
        executor=recorder,
    )
    toy.rounds(1)
    sent = {r.client: r.value["style"] for r in recorder.replies if isinstance(r.value, dict)}
    seen = {m.client: m.value for m in visible(capture.exchanges, "server") if m.item == "style"}
    assert seen.keys() == sent.keys()
    assert len(seen) == CLIENTS
    assert all(torch.equal(seen[name], sent[name]) for name in sent)
    assert all(m.up for m in visible(capture.exchanges, "server", "client_0"))


def test_a_client_sees_what_it_is_sent_and_no_reply() -> None:
    _, capture = captured("ccst", PIXEL)
    seen = list(visible(capture.exchanges, "client", "client_0"))
    assert {m.client for m in seen} == {"client_0"}
    assert not any(m.up for m in seen)
    assert {m.item for m in seen} == {"weights", "styles"}


def test_an_eavesdropper_sees_both_ways() -> None:
    _, capture = captured("ccst", PIXEL)
    ways = {(m.item, m.up) for m in visible(capture.exchanges, "eavesdropper")}
    assert ways == {("overall", True), ("weights", True), ("weights", False), ("styles", False)}


@pytest.mark.parametrize("attacker", ATTACKERS)
def test_what_a_client_remembers_is_never_seen(attacker: str) -> None:
    persist = {"train": {"optimizer_state": "persist"}}
    _, capture = captured("fedavg", persist, rounds=2)
    seen = list(visible(capture.exchanges, attacker, "client_0"))  # type: ignore[arg-type]
    assert seen
    assert {m.item for m in seen} == {"weights"}
    assert not any(m.exchange.task.memory for m in seen)


def test_what_was_seen_stays_as_it_crossed() -> None:
    toy, capture = captured("fedavg")
    first = {n: t.clone() for n, t in capture.exchanges[0].sent["weights"].items()}
    toy.rounds(2)
    assert all(torch.equal(first[n], capture.exchanges[0].sent["weights"][n]) for n in first)
