"""A server that is killed and started again under clients that keep working: known faults X (lost or doubled writes)."""

import asyncio
import random
import shutil
import signal
import subprocess

import pytest
from service_toys import BankOp, OpKind, Retry, Store, add, episode, remote, run, serving, start_process

from crl_jax.bank_service.edge import Address, BankUnavailable
from crl_jax.bank_service.server import Tls
from crl_jax.experience.verify import verify

PATIENT = Retry(attempts=200, first_wait_s=0.02, longest_wait_s=0.2, attempt_s=5.0)


def test_X_a_server_killed_in_the_middle_of_writes_has_every_acknowledged_write_once(tmp_path):
    """Three writers, one reader and one submitter keep going over three kills; what is in the file at the end is what was answered."""
    path, rng = tmp_path / "bank.sqlite", random.Random(7)
    acknowledged: dict[str, str] = {}  # text -> id

    async def story():
        process, port = await asyncio.to_thread(start_process, path, 0, "0.01")
        url, stop = f"grpc://127.0.0.1:{port}", asyncio.Event()
        submitted = reads = 0

        async def writer(bank, name):
            n = 0
            while not stop.is_set():
                texts = [f"{name} lesson {n} {k}" for k in range(2)]
                done = await bank.write("room", add(*texts))
                acknowledged.update(zip(texts, done.written, strict=True))
                n += 1

        async def submitter(bank):
            nonlocal submitted
            while not stop.is_set():
                assert await bank.submit(episode(f"e{submitted}", observation=f"episode {submitted}"))
                submitted += 1
                await asyncio.sleep(0.01)

        async def reader(bank):
            nonlocal reads
            while not stop.is_set():
                await bank.retrieve("room", "lesson")
                reads += 1
                await asyncio.sleep(0.01)

        async with remote(url, retry=PATIENT, timeout_s=40.0) as bank:
            tasks = [asyncio.create_task(t) for t in (*(writer(bank, n) for n in "abc"), submitter(bank), reader(bank))]
            for _ in range(3):
                await asyncio.sleep(0.1 + 0.3 * rng.random())
                process.kill()
                process.wait()
                process, _ = await asyncio.to_thread(start_process, path, port, "0.01")
            await asyncio.sleep(0.2)
            stop.set()
            await asyncio.gather(*tasks)
            assert await bank.drain(20) == 0
            assert bank.counters()["retries"] > 0
        process.kill()
        process.wait()
        store = Store.open(path)
        texts = [e.text for e in store.load().space("room").values()]
        assert {t: i for t, i in acknowledged.items() if (e := store.load().find(i)) is None or e.text != t} == {}
        assert sorted(texts) == sorted([*acknowledged, *(f"episode {n}" for n in range(submitted))])  # each exactly once
        assert store.inbox() == {}
        assert verify(store).faults == ()
        store.close()
        assert len(acknowledged) > 10
        assert submitted > 3
        assert reads > 3

    run(story())


def test_a_client_goes_on_when_the_server_was_away_for_a_while(tmp_path):
    async def story():
        path = tmp_path / "bank.sqlite"
        async with serving(path) as (url, _, server), remote(url, retry=PATIENT) as bank:
            await bank.write("room", add("before"))
            port = server.port
            await server.stop(0.1)
            late = asyncio.create_task(bank.write("room", add("while away")))
            await asyncio.sleep(0.3)
            assert not late.done()
            assert bank.counters()["retried_unavailable"] > 0
        async with remote(url, retry=PATIENT) as bank:
            late = asyncio.create_task(bank.retrieve("room", "before"))
            await asyncio.sleep(0.1)
            async with serving(path, port=port):
                assert (await late)[0].text == "before"

    run(story())


def test_TLS_needs_the_root_that_signed_the_server(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate of this test: apt-get install openssl")
    key, certificate, other = (tmp_path / name for name in ("key.pem", "cert.pem", "other.pem"))
    for name in (other, certificate):
        words = f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=bank.test -keyout {key} -out {name}"
        subprocess.run(["openssl", *words.split(), "-addext", "subjectAltName=DNS:bank.test"], check=True, capture_output=True, timeout=20)

    async def story():
        tls = Tls(certificate.read_bytes(), key.read_bytes())
        async with serving(tls=tls, token="t") as (url, _, _):
            async with remote(url, token="t", address=Address.of(url, certificate, "bank.test")) as bank:
                assert (await bank.write("room", add("sealed"))).written
            few = Retry(attempts=2, first_wait_s=0.01, attempt_s=2.0)
            for address in (Address.of(url, other, "bank.test"), Address.of(url.replace("grpcs", "grpc"))):
                async with remote(url, token="t", address=address, retry=few) as bank:
                    with pytest.raises(BankUnavailable, match="with TLS or without"):
                        await bank.stats()

    run(story())


def test_a_stopped_process_is_a_lost_connection_and_not_an_answer(tmp_path):
    async def story():
        process, port = await asyncio.to_thread(start_process, tmp_path / "bank.sqlite", 0)
        try:
            quick = Retry(attempts=3, first_wait_s=0.02, longest_wait_s=0.05, attempt_s=0.2)
            async with remote(f"grpc://127.0.0.1:{port}", retry=quick, timeout_s=5.0) as bank:
                await bank.write("room", add("one"))
                process.send_signal(signal.SIGSTOP)
                with pytest.raises(BankUnavailable, match="3 attempts"):
                    await bank.write("room", [BankOp(OpKind.ADD, "two")])
                process.send_signal(signal.SIGCONT)
                assert [e.experience.text async for e in bank.entries()] in (["one"], ["one", "two"])
        finally:
            process.kill()
            process.wait()

    run(story())
