"""The server with fake clients: accepted and dropped replies, bytes, means, checkpoints."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch.testing import assert_close

from feddg_bench.common.errors import ClientError, PluginError
from feddg_bench.config.schema import FederationSettings
from feddg_bench.core.aggregation import weighted_mean
from feddg_bench.core.messages import LocalUpdate, Reply, decode, encode
from feddg_bench.core.server import Broadcast, Ledger, NoReplyError, Server
from tests.helpers import refused

CLIENTS = ("client_0", "client_1", "client_2")
SIZES = {"client_0": 10, "client_1": 30, "client_2": 60}


class FakeExecutor:
    """Answers each task with a function of it and records the tasks."""

    workers = 1

    def __init__(self, answer):
        self.answer = answer
        self.memories = {}
        self.tasks = []

    def map(self, tasks):
        for task in tasks:
            self.tasks.append(task)
            answer, memory = self.answer(task), {"round": task.round}
            self.memories[task.client] = memory  # as executors do
            yield Reply(task.client, SIZES[task.client], answer, {"loss": 1.0}, memory)


def fit(client):
    """Stand for a method's client function: only its name is sent."""


def style(client):
    """Stand for another client function."""


UPLINK = {"fit": ("weights", "loss"), "style": ("style",)}


def make_server(answer=None, *, downlink=("style",), **federation):
    weights = {"w": torch.tensor([1.0, 2.0, -1.0]), "n": torch.tensor(3)}
    return Server(
        weights,
        CLIENTS,
        FakeExecutor(answer or (lambda task: LocalUpdate(dict(task.weights)))),
        seed=0,
        federation=FederationSettings(**federation),
        uplink=UPLINK,
        downlink=downlink,
    )


def sends(values):
    """Return an answer: the model with ``w`` set to the client's own values."""
    return lambda task: LocalUpdate({"w": torch.tensor(values[task.client]), "n": torch.tensor(4)})


SOUND = {"client_0": [2.0, 2.0, 0.0], "client_1": [0.0, 3.0, -3.0], "client_2": [1.0, 1.0, 1.0]}


# -------------------------------------------------------------------------------- dropping


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_that_sends_nan_is_dropped_for_the_round(bad, client, caplog):
    server = make_server(sends({**SOUND, client: [1.0, bad, 1.0]}))
    server.round = 4
    with caplog.at_level(logging.WARNING):
        replies = list(server.ask(fit))
    assert [reply.client for reply in replies] == [c for c in CLIENTS if c != client]
    reason = "holds NaN or infinity"
    assert server.ledger.dropped == [{"client": client, "tensor": "weights.w", "reason": reason}]
    assert caplog.messages == [f"round 4: dropped {client}, its weights.w holds NaN or infinity"]
    assert server._executor.memories == {c: {"round": 4} if c != client else {} for c in CLIENTS}


def test_shares_are_renormalised_over_the_rest():
    """Equal, bit for bit, to the mean without the dropped client."""
    server = make_server(sends({**SOUND, "client_1": [math.nan] * 3}))
    replies = list(server.ask(fit))
    mean = weighted_mean([r.value.weights for r in replies], [server.share(r) for r in replies])
    states = [{"w": torch.tensor(SOUND[c]), "n": torch.tensor(4)} for c in ("client_0", "client_2")]
    assert_close(mean, weighted_mean(states, [10, 60]), rtol=0, atol=0)


def test_nan_in_what_a_method_adds_is_found_too():
    def answer(task):
        bad = task.client == "client_2"
        return {"style": [torch.ones(2), torch.tensor([1.0, math.nan if bad else 0.0])]}

    server = make_server(answer)
    assert [r.client for r in server.ask(style)] == ["client_0", "client_1"]
    assert [entry["tensor"] for entry in server.ledger.dropped] == ["style[1]"]


def test_nan_in_a_number_is_found_too():
    def answer(task):
        gap = math.nan if task.client == "client_0" else 0.5
        return LocalUpdate(dict(task.weights), {"loss": gap})

    server = make_server(answer)
    assert [r.client for r in server.ask(fit)] == ["client_1", "client_2"]
    assert [entry["tensor"] for entry in server.ledger.dropped] == ["loss"]


WRONG = {
    "broadcastable": ({"w": torch.zeros(1), "n": torch.tensor(4)}, "weights.w"),
    "shape": ({"w": torch.zeros(3, 5), "n": torch.tensor(4)}, "weights.w"),
    "half": ({"w": torch.zeros(3).half(), "n": torch.tensor(4)}, "weights.w"),
    "double": ({"w": torch.zeros(3).double(), "n": torch.tensor(4)}, "weights.w"),
    "integer": ({"w": torch.zeros(3, dtype=torch.int64), "n": torch.tensor(4)}, "weights.w"),
    "complex": ({"w": torch.zeros(3) * 1j, "n": torch.tensor(4)}, "weights.w"),
    "extra": ({"w": torch.zeros(3), "n": torch.tensor(4), "x": torch.zeros(1)}, "weights.x"),
    "missing": ({"n": torch.tensor(4)}, "weights.w"),
    "empty": ({}, "weights.w"),
    "string": ({"w": "zero", "n": torch.tensor(4)}, "weights.w"),
    "no mapping": ("weights", "weights"),
    "huge": ({"w": torch.tensor([0, 3e38, 0]), "n": torch.tensor(4)}, "weights.w"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_reply_of_another_form_is_dropped_and_named(kind, caplog):
    """The method gets the replies of the other clients only."""
    weights, tensor = WRONG[kind]
    sound = sends(SOUND)
    server = make_server(
        lambda task: LocalUpdate(weights) if task.client == "client_1" else sound(task)
    )
    server.round = 3
    with caplog.at_level(logging.WARNING):
        replies = list(server.ask(fit))
    assert [reply.client for reply in replies] == ["client_0", "client_2"]
    (entry,) = server.ledger.dropped
    assert (entry["client"], entry["tensor"]) == ("client_1", tensor)
    assert caplog.messages == [f"round 3: dropped client_1, its {tensor} {entry['reason']}"]


@pytest.mark.parametrize("kind", WRONG)
def test_a_fault_may_end_the_run(kind):
    weights, tensor = WRONG[kind]
    sound = sends(SOUND)
    server = make_server(
        lambda task: LocalUpdate(weights) if task.client == "client_1" else sound(task),
        on_fault="fail",
    )
    server.round = 3
    with pytest.raises(ClientError, match=rf"round 3: client_1, its {tensor} .*on_fault=drop"):
        list(server.ask(fit))


def test_a_method_whose_every_reply_is_wrong_breaks_its_contract():
    server = make_server(lambda _: LocalUpdate({"w": torch.zeros(1), "n": torch.tensor(4)}))
    with refused(PluginError, "every client's 'fit'", "weights.w"):
        list(server.ask(fit))


def test_declared_forms_are_kept():
    def answer(task):
        return {"style": torch.ones(2, 3 if task.client == "client_2" else 4)}

    server = make_server(answer)
    server._uplink = {"style": {"style": "float32 [2, C]"}}
    assert [r.client for r in server.ask(style)] == ["client_0", "client_1"]
    assert (
        server.ledger.dropped[0]["reason"]
        == "is float32 [2, 3], expected float32 [2, C] with C = 4"
    )


# ------------------------------------------------------------------------------------ sums


def test_a_sum_that_overflows_is_undone(caplog):
    server = make_server()
    server.round, server.memory["step"] = 2, 1
    server.broadcast["style"] = "old"
    before, memories = server.weights, {"client_0": {"a": 1}}
    server._executor.memories = dict(memories)

    def round_of_a_method():
        with server.checking_sums():
            server.memory["step"] = 2
            server.broadcast["style"] = "new"
            server._executor.memories["client_0"] = {"a": 2}
            server.weights = {"w": torch.tensor([1.0, math.inf, 0.0]), "n": torch.tensor(3)}

    with pytest.raises(NoReplyError):
        round_of_a_method()
    assert server.weights is before
    assert (server.memory, dict(server.broadcast)) == ({"step": 1}, {"style": "old"})
    assert server._executor.memories == memories
    assert [entry["client"] for entry in server.ledger.dropped] == ["server"]
    assert "weights.w holds NaN or infinity" in caplog.text


def test_a_block_that_gets_no_reply_is_undone():
    """As when a method asks twice and every client diverges the second time."""
    server = make_server()
    server.memory["step"] = 1
    before = server.weights

    def round_of_a_method():
        with server.checking_sums():
            server.memory["step"] = 2
            server.broadcast["style"] = "new"
            server.weights = {"w": torch.ones(3), "n": torch.tensor(3)}
            raise NoReplyError("the clients' answers to fit")

    with pytest.raises(NoReplyError, match="fit"):
        round_of_a_method()
    assert server.weights is before
    assert (server.memory, dict(server.broadcast)) == ({"step": 1}, {})


def test_what_clients_log_does_not_reach_the_method():
    server = make_server(sends(SOUND))
    server.round = 1
    replies = list(server.ask(fit))
    assert replies
    assert all(reply.metrics == {} for reply in replies)
    assert server.ledger.means()["loss"] == 1.0


def test_a_broadcast_that_overflows_is_undone_too():
    server = make_server()
    with pytest.raises(NoReplyError), server.checking_sums():
        server.broadcast["style"] = torch.tensor([math.inf])
    assert dict(server.broadcast) == {}


def test_a_sum_that_overflows_may_end_the_run():
    server = make_server(on_fault="fail")
    server.round = 2
    with refused(ClientError, "round 2: the sum", "weights.w"), server.checking_sums():
        server.weights = {"w": torch.full((3,), 3e38), "n": torch.tensor(3)}


@pytest.mark.parametrize(
    "weights",
    [{"w": torch.zeros(3)}, {"w": torch.zeros(1), "n": torch.tensor(3)}],
    ids=["missing", "shape"],
)
def test_the_server_half_keeps_the_models_form(weights):
    server = make_server()
    with refused(PluginError, "the global model's"), server.checking_sums():
        server.weights = weights
    with refused(PluginError, "the global model is a NoneType, expected"), server.checking_sums():
        server.weights = None


def test_no_sound_reply_at_all():
    server = make_server(sends(dict.fromkeys(CLIENTS, [math.nan] * 3)))
    with pytest.raises(NoReplyError):
        list(server.ask(fit))
    assert [entry["client"] for entry in server.ledger.dropped] == list(CLIENTS)


def test_metrics_of_a_dropped_client_do_not_count():
    server = make_server(sends({**SOUND, "client_1": [math.nan] * 3}))
    server._executor.map = lambda tasks: (
        Reply(t.client, SIZES[t.client], server._executor.answer(t), {"loss": loss}, {})
        for t, loss in zip(tasks, (1.0, 100.0, 2.0), strict=True)
    )
    list(server.ask(fit))
    assert server.ledger.means() == {"loss": pytest.approx((10 * 1.0 + 60 * 2.0) / 70)}


# ------------------------------------------------------------------------------ declaring


def test_what_a_client_sends_must_be_declared():
    server = make_server(lambda _: LocalUpdate({}, {"images": torch.ones(1), "gaps": 1.0}))
    with pytest.raises(PluginError) as caught:
        list(server.ask(fit))
    assert str(caught.value) == (
        "client function 'fit' sent gaps, images from client_0, which the method does not declare: "
        "add it to uplink['fit']"
    )


def test_a_function_without_declaration_may_send_nothing():
    server = make_server(lambda _: {"style": torch.ones(1)})
    with refused(PluginError, "add it to uplink['fit']"):
        list(server.ask(fit))


def test_what_is_broadcast_must_be_declared():
    server = make_server(downlink=("style",))
    server.broadcast["bank"] = torch.ones(1)
    with pytest.raises(PluginError) as caught:
        server.ask(fit)
    assert str(caught.value) == (
        "the server tells clients bank, which the method does not declare: add it to downlink"
    )
    assert server.ledger.bytes == {"up": 0, "down": 0}


def test_a_reply_that_may_not_cross_is_refused():
    server = make_server(lambda _: {"style": (1, 2)})
    with refused(PluginError, "a message holds a tuple"):
        list(server.ask(style))


# ------------------------------------------------------------------------------------ asking


def test_the_cohort_is_asked_in_its_order():
    server = make_server()
    server.cohort = ("client_0", "client_2")
    assert [r.client for r in server.ask(fit)] == ["client_0", "client_2"]
    assert [r.client for r in server.ask(fit, everyone=True)] == list(CLIENTS)


def test_a_task_says_what_to_do():
    server = make_server()
    server.round = 7
    server.broadcast["style"] = torch.ones(2)
    list(server.ask(fit))
    task = server._executor.tasks[0]
    assert (task.client, task.call, task.round) == ("client_0", "fit", 7)
    assert_close(dict(task.weights), server.weights)
    assert_close(task.broadcast["style"], torch.ones(2))


def test_one_client_alone_may_be_told_something():
    server = make_server(downlink=("style", "mine"))
    server.broadcast["style"] = torch.ones(2)
    for _ in range(2):
        list(server.ask(fit, tell={"client_1": {"mine": torch.zeros(5)}}))
    told = [(task.client, list(task.told), list(task.broadcast)) for task in server._executor.tasks]
    assert told[:3] == [(c, ["mine"] if c == "client_1" else [], ["style"]) for c in CLIENTS]
    assert told[3:] == told[:3]
    model, style_once, mine = 3 * 20, 3 * 8, 2 * 20
    assert server.ledger.bytes["down"] == model + style_once + mine


def test_what_one_client_is_told_must_be_declared():
    server = make_server()
    with refused(PluginError, "the server tells clients mine, which"):
        server.ask(fit, tell={"client_1": {"mine": 1}})


def test_a_call_may_do_without_the_model():
    server = make_server(lambda _: {"style": torch.ones(1)})
    list(server.ask(style, weights=False))
    assert all(task.weights == {} for task in server._executor.tasks)
    assert server.ledger.bytes["down"] == 0


def test_tasks_are_fixed_when_asked():
    """Work happens later, but with the model and the broadcast at the time of asking."""
    server = make_server()
    server.broadcast["style"] = "old"
    replies = server.ask(fit)
    server.weights = {"w": torch.zeros(3), "n": torch.tensor(0)}
    server.broadcast["style"] = "new"
    server.cohort = ("client_1",)
    assert len(list(replies)) == 3
    assert all(task.weights["w"].tolist() == [1, 2, -1] for task in server._executor.tasks)
    assert all(task.broadcast["style"] == "old" for task in server._executor.tasks)


def test_work_happens_as_replies_are_taken():
    server = make_server()
    replies = server.ask(fit)
    assert server._executor.tasks == []
    next(replies)
    assert [task.client for task in server._executor.tasks] == ["client_0"]


def test_shares():
    reply = Reply("client_1", 30, None, {}, {})
    assert make_server(weighting="samples").share(reply) == 30
    assert make_server(weighting="uniform").share(reply) == 1


# ------------------------------------------------------------------------------------ bytes


def test_bytes_of_the_model_up_and_down():
    """Three floats and one 8-byte counter are 20 bytes a client, each way."""
    server = make_server()
    list(server.ask(fit))
    assert server.ledger.bytes == {"up": 60, "down": 60}


def test_a_client_is_not_sent_a_model_that_it_has():
    """Neither for a second question of a round nor if it already received the current model."""
    server = make_server()
    server.cohort = ("client_0", "client_1")
    list(server.ask(fit))
    list(server.ask(fit))
    assert server.ledger.bytes["down"] == 2 * 20
    server.weights = {name: tensor.clone() for name, tensor in server.weights.items()}
    list(server.ask(fit))
    assert server.ledger.bytes["down"] == 4 * 20
    server.cohort = ("client_1", "client_2")
    list(server.ask(fit))
    assert server.ledger.bytes["down"] == 5 * 20


def test_a_client_is_not_sent_again_a_model_that_a_skipped_round_left_as_it_was():
    server = make_server()

    def skipped():
        with server.checking_sums():
            list(server.ask(fit))
            raise NoReplyError("the answers to another question")

    for _ in range(2):
        with pytest.raises(NoReplyError):
            skipped()
    assert server.ledger.bytes["down"] == 3 * 20


def test_bytes_of_extras():
    server = make_server(lambda task: LocalUpdate(dict(task.weights), {"loss": 0.5}))
    list(server.ask(fit))
    assert server.ledger.bytes == {"up": 3 * 28, "down": 60}


def test_bytes_of_a_dropped_reply_were_sent_all_the_same():
    server = make_server(sends({**SOUND, "client_0": [math.nan] * 3}))
    list(server.ask(fit))
    assert server.ledger.bytes["up"] == 60


def down(server):
    """Return the bytes that the server sends in a new round without the model."""
    server.ledger = Ledger()
    list(server.ask(style, weights=False))
    return server.ledger.bytes["down"]


def test_a_broadcast_counts_once_for_every_client():
    server = make_server(lambda _: {"style": torch.ones(1)}, downlink=("style", "round"))
    server.broadcast["style"] = torch.zeros(2, 512)
    server.cohort = ("client_0", "client_1")
    assert down(server) == 2 * 4096
    assert down(server) == 0
    server.cohort = ("client_1", "client_2")
    assert down(server) == 4096
    server.broadcast["round"] = 1
    assert down(server) == 2 * 8
    server.broadcast["style"] = torch.zeros(2, 512)
    server.cohort = CLIENTS
    assert down(server) == 3 * 4096 + 8


def test_an_entry_that_was_taken_back_is_not_sent():
    server = make_server(lambda _: {"style": torch.ones(1)})
    server.broadcast["style"] = torch.zeros(8)
    del server.broadcast["style"]
    assert down(server) == 0
    server.broadcast["style"] = torch.zeros(8)
    assert down(server) == 3 * 32


@pytest.mark.parametrize(
    "change",
    [
        lambda broadcast: broadcast.update(style=torch.zeros(8)),
        lambda broadcast: broadcast.setdefault("style", torch.zeros(8)),
    ],
    ids=["update", "setdefault"],
)
def test_every_way_to_change_the_broadcast_counts(change):
    server = make_server(lambda _: {"style": torch.ones(1)})
    change(server.broadcast)
    assert down(server) == 3 * 32
    assert down(server) == 0


def test_reading_the_broadcast_sends_nothing():
    broadcast = Broadcast({"a": torch.zeros(2)})
    assert broadcast["a"].tolist() == [0, 0]
    assert broadcast.deliver("client_0") == 8
    assert broadcast.deliver("client_0") == 0


# ----------------------------------------------------------------------------------- ledger


def test_means_are_weighted_by_images_and_leave_nan_out():
    ledger = Ledger()
    ledger.log({"loss": 1.0, "triplet": math.nan}, 10)
    ledger.log({"loss": 3.0, "triplet": 5.0}, 30)
    ledger.log({"loss": math.inf}, 60)
    assert ledger.means() == {"loss": 2.5, "triplet": 5.0}


def test_seconds_by_phase_add_up():
    ledger = Ledger()
    ledger.spend("training", 1.5)
    ledger.spend("training", 0.25)
    ledger.spend("evaluation", 2.0)
    assert ledger.seconds == {"training": 1.75, "evaluation": 2.0}


# ------------------------------------------------------------------------------ checkpoints


def test_a_restored_server_goes_on_where_it_was():
    server = make_server(lambda _: {"style": torch.ones(1)})
    server.round = 3
    server.weights["w"] += 1
    server.broadcast["style"] = torch.arange(4.0)
    server.memory["weights of clients"] = [0.25, 0.75]
    server._executor.memories["client_1"] = {"moments": torch.ones(2)}
    server.cohort = ("client_0", "client_1")
    assert down(server) == 2 * 16

    new = make_server(lambda _: {"style": torch.ones(1)})
    addresses = {name: tensor.data_ptr() for name, tensor in new.weights.items()}
    new.restore(decode(encode(server.state())))
    assert new.round == 3
    assert_close(new.weights, server.weights, rtol=0, atol=0)
    assert {name: tensor.data_ptr() for name, tensor in new.weights.items()} == addresses
    assert new.memory == server.memory
    assert_close(dict(new.broadcast), dict(server.broadcast))
    assert_close(new._executor.memories, server._executor.memories)
    new.cohort = CLIENTS
    assert down(new) == 16  # the two others have it already
    new.broadcast["style"] = torch.arange(4.0)
    assert down(new) == 3 * 16
