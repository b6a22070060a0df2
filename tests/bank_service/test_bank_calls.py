"""Every call of the bank's service against a real server: the same results as the manager's own methods."""

import asyncio
import dataclasses

import pytest
from service_toys import add, episode, remote, run, serving

from crl_jax.bank_service import bank_pb2 as pb
from crl_jax.bank_service import codec
from crl_jax.bank_service.edge import BankRefused
from crl_jax.records import BankOp, OpKind, Status, Usage


def test_lessons_of_submitted_episodes_are_retrieved_and_counted():
    async def story():
        async with serving() as (url, manager, _), remote(url) as bank:
            assert await bank.submit(episode("e1", observation="a red door"), episode("e2", observation="a blue key"))
            assert await bank.drain(10) == 0
            shown = await bank.retrieve("room", "a red door")
            assert [s.text for s in shown] == ["a red door"]
            assert abs(shown[0].similarity - 1) < 1e-6
            await bank.observe([episode("e3", shown=[shown[0].id]), episode("e4", shown=[shown[0].id], success=False)])
            (entry,) = await bank.get([shown[0].id, "x99999999-0"])
            assert (entry.usage.shown, entry.usage.succeeded, entry.live) == (2, 1, True)
            assert entry.experience == manager.state.find(shown[0].id)
            assert entry.experience.episode_ids == ("e1",)
            assert (await bank.stats())["inbox"] == 0

    run(story())


def test_the_extractors_batch_and_its_checkpoint_travel_whole():
    async def story():
        async with serving() as (url, manager, _), remote(url) as bank:
            await bank.on_step(3)
            assert await bank.submit(episode("e1", observation="one door"), episode("e2", observation="two keys"))
            await bank.drain(10)
            assert await bank.pop_batch() is None
            ids = [e.experience.id async for e in bank.entries()]
            await bank.observe([episode("e3", shown=ids), episode("e4", shown=ids[:1], success=False)])
            saved = await bank.checkpoint()
            batch = await bank.pop_batch()
            assert [s.generation for s in batch] == [manager._store.generation(f"g0000000{n}") for n in (1, 2)]
            assert [(s.reward, s.evidence, s.train_count, s.last_trained_step) for s in batch] == [(0.0, 2, 0, -1), (1.0, 1, 0, -1)]
            assert isinstance(batch[0].evidence, int)
            await bank.record_trained([batch[0].generation.id], step=3)
            await bank.observe([episode("e5", shown=ids)])
            assert [s.train_count for s in await bank.pop_batch()] == [1, 0]
            await bank.write("room", add("later"))
            await bank.restore(saved)
            assert (saved["revision"], saved["step"]) == (manager.state.revision, manager.step) == (3, 3)
            assert [s.reward for s in await bank.pop_batch()] == [0.0, 1.0]
            await bank.restart()
            assert len(manager.state) == 0
            assert manager.step == 0

    run(story())


def test_questions_are_answered_and_only_a_training_question_is_kept():
    async def story():
        async with serving() as (url, manager, _), remote(url) as bank:
            assert await bank.ask("room", "where to?", episode_id="e1") is None
            await bank.write("room", add("the exit is north"))
            answer = await bank.ask("room", "where to?", episode_id="e1")
            assert (answer.text, answer.generation_id) == ("go north", "g00000001")
            looked = await bank.ask("room", "where to?", episode_id="e1", peek=True)
            assert (looked.text, looked.generation_id) == ("go north", None)
            assert manager._store.generation_count() == 1

    run(story())


def test_writing_by_hand_adds_updates_retires_and_says_what_it_could_not_do():
    async def story():
        async with serving() as (url, _, _), remote(url) as bank:
            one, two = (await bank.write("room", add("one", "two"))).written
            done = await bank.write("room", [BankOp(OpKind.UPDATE, "one better", (one,)), BankOp(OpKind.RETIRE, "", (two, "nobody"))])
            assert done.retired == (one, two)
            assert done.problems[0][0] == "unknown_target"
            assert len(done.written) == 1
            (new, old) = await bank.get([done.written[0], one])
            assert new.experience.parents == (one,)
            assert new.experience.generation_id == ""
            assert not old.live
            with pytest.raises(BankRefused, match="use one of add, update, merge"):
                await bank.write("room", [BankOp(OpKind.NOOP)])
            with pytest.raises(BankRefused, match="namespace is empty: give its name"):
                await bank.write("", add("lost"))

    run(story())


def test_an_export_has_every_entry_once_and_the_newest_come_first():
    async def story():
        async with serving() as (url, manager, _), remote(url) as bank:
            for name in ("b", "a", "c"):
                await bank.write(name, add(*(f"{name} lesson {n}" for n in range(3))))
            found = [e.experience for e in [e async for e in bank.entries()]]
            assert found == [e for name in "abc" for e in manager.state.space(name).values()]
            page = await bank._call("List", pb.ListRequest(limit=2, after='["a", "x00000004-0"]'), pb.ListReply)
            assert [e.experience.text for e in page.entries] == ["a lesson 1", "a lesson 2"]
            assert page.revision == 9
            assert [e.experience.text for e in await bank.newest(2)] == ["c lesson 2", "c lesson 1"]
            assert [e.experience.text async for e in bank.entries("b")] == ["b lesson 0", "b lesson 1", "b lesson 2"]

    run(story())


def test_without_an_extractor_the_bank_is_read_and_written_and_episodes_are_refused():
    async def story():
        async with serving(learns=False) as (url, _, _), remote(url) as bank:
            await bank.write("room", add("a lesson"))
            assert [s.text for s in await bank.retrieve("room", "lesson")] == ["a lesson"]
            for call in (bank.submit(episode()), bank.ask("room", "what?", episode_id="e"), bank.merge("room")):
                with pytest.raises(BankRefused, match=r"without --no-extractor, on a recipe with extractor\.server\.url") as refused:
                    await call
                assert refused.value.code == "FAILED_PRECONDITION"

    run(story())


def test_an_error_nobody_foresaw_is_logged_whole_and_tells_the_client_no_trace():
    class Broken:
        dim, fingerprint = 64, "broken"

        def embed(self, texts):
            raise ZeroDivisionError("secret detail")

    async def story():
        logged = []
        async with serving(embedder=Broken(), log=logged.append) as (url, _, _), remote(url) as bank:
            with pytest.raises(BankRefused, match=r"Retrieve failed in the server \(ZeroDivisionError\): its log says why") as refused:
                await bank.retrieve("room", "x")
            assert refused.value.code == "INTERNAL"
            assert "secret" not in str(refused.value)
            assert "Traceback" in logged[0]
            assert "secret detail" in logged[0]

    run(story())


def test_evaluation_changes_nothing():
    async def story():
        async with serving() as (url, manager, _), remote(url) as bank:
            await bank.write("room", add("a red door", "a blue door"))
            before = manager.state
            for _ in range(5):
                assert (await bank.retrieve("room", "red door", peek=True))[0].text == "a red door"
            assert manager.state is before
            assert manager._reader._reserved.count("x00000001-0") == 0

    run(story())


def test_every_field_of_every_record_travels():
    sent = dataclasses.replace(
        episode("e1", shown=("x1",), asks=("g1",), status=Status.TRUNCATED, success=False), reward=None, started_version=7
    )
    back = codec.episode_from_text(codec.episode_to_text(sent))
    assert dataclasses.replace(back, log=sent.log) == sent
    for record, message in ((Usage, pb.Usage), (type(sent.task), pb.Task)):
        assert {f.name for f in dataclasses.fields(record)} == set(message.DESCRIPTOR.fields_by_name)
    usage = Usage(3, 2, 5, 1.5, 0.25, -1)
    assert codec.usage_from_proto(codec.usage_to_proto(usage)) == usage


def test_200_concurrent_queries_arrive_in_few_calls_and_get_their_own_answers():
    async def story():
        async with serving(query_batch=64) as (url, _, server), remote(url, batch=128) as bank:
            await bank.write("room", add(*(f"word{n}" for n in range(50))))
            before = server.counts["calls"]
            found = await asyncio.gather(*(bank.retrieve("room", f"word{n % 50}", peek=True) for n in range(200)))
            assert [s[0].text for s in found] == [f"word{n % 50}" for n in range(200)]
            assert server.counts["calls"] - before <= 3
            assert bank.counters()["queries"] == 200
            assert bank.counters()["queue"] == 0

    run(story())
