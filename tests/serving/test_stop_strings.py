"""Stop strings over tokens: the automaton against plain searching, and the room it takes."""

import random

import numpy as np
import pytest

from crl_jax.serving import stop_strings
from crl_jax.serving.stop_strings import NONE, REACHED, StopTable

PIECES = [b"a", b"b", b"ab", b"aab", b"bab", "é".encode()[:1], "é".encode()[1:], b"", b"...", b"."]


def first_stop(tokens: list[int], strings: tuple[str, ...]) -> int | None:
    """How many tokens it takes until their bytes contain a string."""
    for n in range(1, len(tokens) + 1):
        if any(s.encode() in b"".join(PIECES[t] for t in tokens[:n]) for s in strings):
            return n
    return None


def stopped(table: StopTable, tokens: list[int], strings: tuple[str, ...]) -> int | None:
    state = table.start(strings)
    for n, token in enumerate(tokens, 1):
        state = table.advance(state, token)
        if state == REACHED:
            return n
    return None


@pytest.mark.parametrize("seed", range(40))
def test_R08_it_stops_with_the_token_that_completes_a_string_and_not_before(seed):
    rng = random.Random(seed)
    strings = tuple("".join(rng.choice("ab.é") for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(1, 3)))
    table = StopTable(PIECES)
    for _ in range(30):
        tokens = [rng.randrange(len(PIECES)) for _ in range(rng.randint(1, 12))]
        assert stopped(table, tokens, strings) == first_stop(tokens, strings)


def test_R08_a_string_inside_a_larger_token():
    table = StopTable(PIECES)
    assert stopped(table, [0, 8, 1], ("..",)) == 2


def test_no_strings_is_state_none_and_never_stops():
    table = StopTable(PIECES)
    table.start(("ab",))
    assert table.start(()) == NONE
    table.release(())
    assert {table.advance(NONE, t) for t in range(len(PIECES))} == {NONE}


def test_sets_in_use_keep_their_rows_and_others_give_way():
    table = StopTable(PIECES, capacity=10)
    first = table.start(("aaa",))  # four states
    rows = table.table[first : first + 4].copy()
    table.start(("bbb",))
    with pytest.raises(ValueError, match=r"need 5 states and the table of 10 has no room .* more stop_states"):
        table.start(("abab",))
    version = table.version
    assert table.start(("aaa",)) == first
    assert table.version == version, "nothing new to copy to the device"
    table.release(("bbb",))
    assert stopped(table, [0, 1, 0, 1], ("abab",)) == 4
    np.testing.assert_array_equal(table.table[first : first + 4], rows)


def test_an_empty_string_is_refused():
    with pytest.raises(ValueError, match="would stop at once"):
        StopTable(PIECES).start(("a", ""))


def test_a_string_longer_than_the_table_is_refused_before_an_automaton_is_made(monkeypatch):
    monkeypatch.setattr(stop_strings, "automaton", lambda strings: pytest.fail("made one"))
    with pytest.raises(ValueError, match=r"\['aaaa.*a\.\.\.', 'b'\] need 1000001 states") as error:
        StopTable(PIECES).start(("a" * 1_000_000, "b"))
    assert len(str(error.value)) < 400
