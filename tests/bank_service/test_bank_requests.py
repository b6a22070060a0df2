"""What is asked twice is done once: lost answers, callers that give up, a server that was started again."""

import asyncio
import json
import time

import pytest
from service_toys import QUICK, add, episode, manager_on, remote, run, serving

from crl_jax.bank_service import bank_pb2 as pb
from crl_jax.bank_service import codec
from crl_jax.bank_service.edge import BankRefused, Retry
from crl_jax.bank_service.limits import Refused
from crl_jax.experience.store import Store, StoreError


def sent(bank, method, request):
    """One call with the request as it is: the same object again is a repeat after a lost answer."""
    return bank._edge.call(method, request, getattr(pb, f"{method}Reply"), timeout_s=10.0)


def write(request_id, *texts):
    return pb.WriteRequest(request_id=request_id, namespace="room", ops=map(codec.op_to_proto, add(*texts)))


def test_a_repeated_call_gets_the_first_answer_also_after_a_restart(tmp_path):
    async def story():
        first, observed = write("r1", "one"), pb.ObserveRequest(request_id="o1")
        async with serving(tmp_path / "bank.sqlite") as (url, manager, _), remote(url) as bank:
            answer = await sent(bank, "Write", first)
            assert await sent(bank, "Write", first) == answer
            observed.episodes.append(codec.episode_to_proto(episode(shown=answer.written)))
            await sent(bank, "Observe", observed)
            await sent(bank, "OnStep", pb.OnStepRequest(request_id="s1", step=4))
        async with serving(tmp_path / "bank.sqlite") as (url, manager, _), remote(url) as bank:
            assert await sent(bank, "Write", first) == answer
            await sent(bank, "Observe", observed)
            assert manager.state.usage[answer.written[0]].shown == 1
            assert (manager.state.revision, manager.step, manager.counts["repeated"]) == (2, 4, 2)
            other = await sent(bank, "Write", write("r2", "one"))
            assert other.written != answer.written

    run(story())


def test_two_calls_with_one_id_at_the_same_time_are_one(tmp_path):
    async def story():
        async with serving() as (url, manager, _), remote(url) as bank:
            answers = await asyncio.gather(*(sent(bank, "Write", write("same", "one")) for _ in range(8)))
            assert len(manager.state) == 1
            assert all(a == answers[0] for a in answers)

    run(story())


def test_work_goes_on_when_the_caller_gives_up_and_its_repeat_gets_the_answer():
    async def story():
        async with serving() as (url, manager, _):
            slow, embed = asyncio.get_running_loop().time() + 0.5, manager._writer._embedder.embed

            def late(texts):
                time.sleep(max(0.0, slow - time.monotonic()))
                return embed(texts)

            manager._writer._embedder.embed = late
            quick = Retry(attempts=50, first_wait_s=0.02, longest_wait_s=0.05, attempt_s=0.1)
            async with remote(url, retry=quick) as bank:
                done = await bank.write("room", add("one"))
                assert len(done.written) == len(manager.state) == 1
                assert bank.counters()["retried_deadline"] >= 1

    run(story())


def test_a_repeated_query_reserves_once_and_a_question_makes_one_generation():
    async def story():
        async with serving() as (url, manager, _), remote(url) as bank:
            (lesson,) = (await bank.write("room", add("the exit is north"))).written
            query = pb.RetrieveRequest(request_id="q", queries=[pb.Query(namespace="room", text="exit")])
            assert await sent(bank, "Retrieve", query) == await sent(bank, "Retrieve", query)
            assert manager._reader._reserved.count(lesson) == 1
            question = pb.AskRequest(request_id="a", namespace="room", query="where?", episode_id="e")
            assert await sent(bank, "Ask", question) == await sent(bank, "Ask", question)
            assert manager._store.generation_count() == 1

    run(story())


def test_a_popped_batch_is_not_lost_with_its_answer_nor_with_the_process(tmp_path):
    path = tmp_path / "bank.sqlite"

    async def story():
        pop = pb.PopBatchRequest(request_id="p")
        async with serving(path, keep=True) as (url, manager, _), remote(url) as bank:
            await bank.submit(episode("e1", observation="one"), episode("e2", observation="two"))
            await bank.drain(10)
            await bank.observe([episode("e3", shown=list(manager.state.space("room")))])
            popped = await sent(bank, "PopBatch", pop)
            await bank.record_trained([popped.samples[0].generation_id], step=1)
            on_disk = manager._store.load_buffer()  # what a killed process leaves
        assert json.loads(on_disk) == {"waiting": [], "trained": [["g00000001", 1, 1]], "counts": {"credits": 2}}
        async with serving(path) as (url, manager, _), remote(url) as bank:
            assert await sent(bank, "PopBatch", pop) == popped
            assert await bank.pop_batch() is None

    run(story())


def test_submitted_episodes_outlive_the_process_and_are_distilled_once(tmp_path):
    path = tmp_path / "bank.sqlite"

    async def story():
        async with serving(path, delay=lambda prompt: 30.0) as (url, manager, server), remote(url) as bank:
            assert await bank.submit(episode("e1", observation="one"), episode("e2", observation="two"))
            assert (await bank.stats())["inbox"] == 2
            await server.stop(0.1)
            assert await manager.aclose(0.1) == 2
        async with serving(path, learns=False) as (url, manager, _):
            assert manager.counts["inbox_at_start"] == 2
        async with serving(path) as (url, manager, _), remote(url) as bank:
            assert await bank.drain(10) == 0
            assert [e.text for e in manager.state.space("room").values()] == ["one", "two"]
            assert manager._store.inbox() == {}
        async with serving(path) as (url, manager, _), remote(url) as bank:
            assert await bank.drain(10) == 0
            assert len(manager.state) == 2

    run(story())


@pytest.mark.parametrize("reply", ["no JSON at all", '[{"op":"return"}]'])
def test_episodes_that_teach_nothing_leave_the_inbox(reply):
    async def story():
        async with serving(reply=lambda prompt: reply) as (url, manager, _), remote(url) as bank:
            await bank.submit(episode("e1"))
            assert await bank.drain(10) == 0
            assert manager._store.inbox() == {}

    run(story())


def test_episodes_whose_extractor_does_not_answer_leave_the_inbox():
    async def story():
        async with serving(delay=lambda prompt: 5.0, sample_timeout_s=0.05) as (url, manager, _), remote(url) as bank:
            await bank.submit(episode("e1"))
            assert await bank.drain(10) == 0
            assert manager._store.inbox() == {}
            assert manager.counts["distil_failed"] == 1

    run(story())


def test_a_full_inbox_is_refused_whole_and_counted():
    async def story():
        async with serving(delay=lambda prompt: 0.3, queue_size=2, distil_concurrency=1) as (url, manager, _), remote(url) as bank:
            with pytest.raises(Refused, match="the inbox holds 2: send them in several calls"):
                await manager.submit_once("k", [episode(str(n)) for n in range(3)], timeout_s=0.1)
            await manager.submit_once("k1", [episode("a"), episode("b")], timeout_s=0.1)
            with pytest.raises(Refused, match="2 episodes wait for distillation, 2 at most: submit fewer"):
                await manager.submit_once("k2", [episode("c")], timeout_s=0.05)
            assert await bank.submit(episode("c"))  # waits for room
            assert await bank.drain(10) == 0
            assert manager.counts["generations_distil"] == 3

    run(story())


def test_runs_that_share_a_bank_do_not_take_each_others_episodes():
    async def story():
        async with serving(delay=lambda prompt: 0.2) as (url, manager, _), remote(url, run="a") as one, remote(url, run="b") as two:
            await one.submit(episode("s0/g0/0"))
            await two.submit(episode("s0/g0/0"))
            with pytest.raises(BankRefused, match="give every run its own name"):
                await two.submit(episode("s0/g0/0"))
            assert await one.drain(10) == 0
            assert [e.episode_ids for e in manager.state.space("room").values()] == [("a/s0/g0/0",), ("b/s0/g0/0",)]

    run(story())


def test_a_refused_commit_changes_nothing_in_memory_and_its_repeat_is_counted_once():
    async def story():
        store = Store.open(":memory:")
        manager = manager_on(store)
        await manager.start()
        await manager.submit_once("s", [episode("e1", observation="one")], timeout_s=1)
        await manager.drain(10)
        (lesson,) = manager.state.space("room")
        before, commit, transaction = manager.buffer.to_json(), store.commit, store.transaction

        def full(*args, **kwargs):
            raise StoreError("the disk is full: free it")

        store.commit = store.transaction = full
        with pytest.raises(StoreError):
            await manager.observe_once("o", [episode("e2", shown=[lesson])])
        with pytest.raises(StoreError):
            await manager.record_once("t", ["g00000001"], 1)
        assert manager.buffer.to_json() == before
        store.commit, store.transaction = commit, transaction
        await manager.observe_once("o", [episode("e2", shown=[lesson])])
        await manager.observe_once("o", [episode("e2", shown=[lesson])])
        assert manager.state.usage[lesson].shown == manager.buffer.counts["credits"] == 1
        await manager.aclose()

    run(story())


def test_a_restore_goes_back_and_drops_what_waits_and_a_wrong_one_is_refused(tmp_path):
    async def story():
        async with serving(delay=lambda prompt: 0.2) as (url, manager, _), remote(url, retry=QUICK) as bank:
            await bank.write("room", add("kept"))
            saved = await bank.checkpoint()
            await bank.submit(episode("e1", observation="gone"))
            await bank.restore(saved)
            assert [e.text for e in manager.state.space("room").values()] == ["kept"]
            assert manager._store.inbox() == {}
            with pytest.raises(BankRefused, match="revision 99"):
                await bank.restore({**saved, "revision": 99})
            with pytest.raises(BankRefused, match="send that text as it was"):
                await sent(bank, "Restore", pb.RestoreRequest(request_id="x", saved="{}"))
            with pytest.raises(BankRefused, match="a new id for every change"):
                await sent(bank, "Write", write("", "one"))

    run(story())


EMPTY = json.dumps({"waiting": [], "trained": [], "counts": {}})


@pytest.mark.parametrize(
    "saved",
    [
        "null",
        "[" * 100_000,
        json.dumps(["revision", "step", "buffer"]),
        json.dumps({"revision": 1, "step": 1, "buffer": 5}),
        json.dumps({"revision": 1, "step": 1, "buffer": '{"waiting": 5, "trained": [], "counts": {}}'}),
        json.dumps({"revision": 1, "step": 1, "buffer": '{"waiting": [["g1", NaN, 1, 0]], "trained": [], "counts": {}}'}),
        json.dumps({"revision": 1, "step": "y", "buffer": EMPTY}),
        json.dumps({"revision": -1, "step": 1, "buffer": EMPTY}),
        json.dumps({"revision": 1, "step": 10**30, "buffer": EMPTY}),
    ],
)
def test_a_restore_of_what_no_checkpoint_answered_changes_nothing_and_the_bank_starts_again(saved, tmp_path):
    async def story():
        async with serving(tmp_path / "bank.sqlite") as (url, manager, _), remote(url, retry=QUICK) as bank:
            await bank.write("room", add("one"))
            await bank.write("room", add("two"))
            for rewind in (False, True):
                request = pb.RestoreRequest(request_id=f"x{rewind}", saved=saved, rewind=rewind)
                with pytest.raises(BankRefused, match="send that text as it was"):
                    await sent(bank, "Restore", request)
            assert (manager.state.revision, manager.step) == (2, 0)
        async with serving(tmp_path / "bank.sqlite") as (url, manager, _):
            assert len(manager.state) == 2

    run(story())


def test_evidence_of_a_request_that_is_not_committed_is_in_no_other_ones_transaction(tmp_path):
    path = tmp_path / "bank.sqlite"

    async def story():
        kept = []  # after each commit: the evidence on disk, and the observations that are answered
        async with serving(path) as (_, manager, _):
            ids = [(await manager.write_once(f"w{n}", "room", add(f"lesson {n}")))["written"][0] for n in range(2)]
            store, observe = manager._store, manager._writer.observe
            store.read(lambda db: db.execute("UPDATE entries SET generation_id='g' || id"))

            def slow(*args, **options):
                time.sleep(0.2)  # meanwhile the event loop takes up the other request
                observe(*args, **options)
                waiting = json.loads(store.load_buffer())["waiting"]
                kept.append((len(waiting), sum(store.answered(f"o{n}") is not None for n in range(2))))

            manager._writer.observe = slow
            both = (manager.observe_once(f"o{n}", [episode(f"e{n}", shown=(i,))]) for n, i in enumerate(ids))
            await asyncio.gather(*both)
        return kept

    assert run(story()) == [(1, 1), (2, 2)], "a process that is killed between the two would count the second one twice"
