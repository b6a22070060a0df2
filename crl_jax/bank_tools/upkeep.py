"""``crl bank verify | repair | compact | snapshot``: what keeps a store file whole and small.

Owns: their messages and exit codes. Promises: checking changes nothing; the others (but `snapshot`) are refused while another process
writes the bank. Does not: check, mend or fold anything itself (``experience.verify``, ``recover``, ``compact``).
"""

from __future__ import annotations

import json
from typing import Any

from crl_jax.bank_tools.place import BankInputError, Place, claimed, reading, writing
from crl_jax.errors import UserError


def verify(place: Place, *, as_json: bool) -> int:
    """Say whether the file is what was written into it: 0, or 1 with every fault."""
    from crl_jax.experience.verify import verify as check

    try:
        with reading(place) as store:
            verdict = check(store)
    except UserError as error:  # too damaged to be opened
        found: dict[str, Any] = {"whole": False, "faults": [str(error)]}
        print(json.dumps(found) if as_json else f"FAULT  {error}")
        return 1
    if as_json:
        print(json.dumps({"whole": not verdict.faults, **verdict._asdict()}))
        return 1 if verdict.faults else 0
    for fault in verdict.faults:
        print(f"FAULT  {fault}")
    what = f"revision {verdict.revision}, {verdict.operations} operations, {verdict.entries} entries, {verdict.generations} generations"
    if verdict.faults:
        print(f"{len(verdict.faults)} faults in {place.path} ({what}): `crl bank repair` brings back the last good state")
        return 1
    print(f"{place.path} is whole: {what}; its log replays to the state it holds (digest {verdict.digest:08x})")
    return 0


def repair(place: Place) -> int:
    """Put the last good state in place of a damaged file; leave a whole one alone."""
    from crl_jax.experience.recover import begun, emptied, recover
    from crl_jax.experience.store import StoreDamaged
    from crl_jax.experience.verify import verify as check

    with claimed(place):
        try:
            if begun(place.path):
                faults: tuple[str, ...] = ("a repair was killed in its middle",)
            else:
                with reading(place) as store:
                    faults = check(store).faults
        except StoreDamaged as error:
            faults = (str(error),)
        except UserError:  # foreign, of another version, not readable by this user: nothing that a repair may replace
            if not emptied(place.path):
                raise
            faults = ("it has no byte",)
        if not faults:
            print(f"{place.path} is whole: nothing to repair")
            return 0
        done = recover(place.path)
    print(f"revision {done.revision} of {place.path} is back, from its {done.source}; the damaged file is kept as {done.damaged.name}")
    return 0


def compact(place: Place, *, keep: int | None) -> int:
    """Drop what only the past before revision ``keep`` needs (None: before the oldest checkpoint of the run, or before now)."""
    from crl_jax.bank_tools.statistics import file_bytes
    from crl_jax.experience.compact import compact as fold
    from crl_jax.experience.store import StoreDamaged
    from crl_jax.experience.verify import verify as check

    with writing(place) as store:
        oldest, why, waiting = _resumable(place, store.revision)
        keep = oldest if keep is None else keep
        if keep > oldest:
            raise BankInputError(f"--keep-revision {keep}: {why}, so keep {oldest} or an earlier one")
        if faults := check(store).faults:  # folded into the state they could no longer be seen
            raise StoreDamaged(f"{place.path} is not folded, because it is damaged ({faults[0]}): `crl bank repair` first")
        before = file_bytes(place.path)
        try:
            done = fold(store, keep_revision=keep, generations=waiting)
        except ValueError as error:
            raise BankInputError(f"--keep-revision {keep}: {error}") from error
    gone = f"{done.operations} operations, {done.entries} entries, {done.generations} generations"
    print(f"{place.path}: {gone} dropped; {before / 2**20:.1f} MiB before, {file_bytes(place.path) / 2**20:.1f} MiB now")
    print(f"the oldest revision that can be opened is {keep}")
    return 0


def _resumable(place: Place, now: int) -> tuple[int, str, set[str]]:
    """The revision that the oldest checkpoint goes back to, what says so, and the generations that wait in checkpoints to be trained on."""
    if place.folder is None:
        return now, f"the bank is at revision {now}", set()
    from crl_jax.checkpoint import store as checkpoints

    root = place.folder / "checkpoints"
    steps = checkpoints.committed(root) if root.is_dir() else []
    records = [(checkpoints.read_records(root, step).get("bank"), step) for step in steps]
    saved = [(int(bank["revision"]), step) for bank, step in records if bank]
    if not saved:
        return now, f"the bank is at revision {now}", set()
    revision, step = min(saved)
    waiting = {generation for bank, _ in records if bank for generation, *_ in json.loads(bank["buffer"])["waiting"]}
    return min(revision, now), f"the checkpoint of step {step} goes back to revision {revision}", waiting


def take_snapshot(place: Place) -> int:
    """A whole copy beside the file, from which `repair` can bring it back. A run may be training."""
    from crl_jax.experience.recover import snapshot_folder

    with reading(place) as store:
        made = snapshot_folder(place.path) / f"r{store.revision:010d}.sqlite"
        if made.exists():
            print(f"{made} is there already")
            return 0
        store.backup(made)
    print(f"{made}: a copy of revision {int(made.stem[1:])}")
    return 0
