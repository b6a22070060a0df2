"""Text while tokens come: whole characters only, and no beginning of a stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crl_jax.serving.http.text import TextStream, pieces


def utf8(ids):
    return bytes(ids).decode("utf-8", "replace")


def test_V07_a_character_of_several_tokens_is_shown_when_it_is_whole():
    stream = TextStream(utf8)
    assert [stream.push(b) for b in b"a\xf0\x9f\x98\x80b"] == ["a", "", "", "", "\U0001f600", "b"]
    assert stream.flush() == ""


def test_V07_bytes_that_never_became_a_character_come_at_the_end():
    stream = TextStream(utf8)
    assert [stream.push(b) for b in b"a\xf0\x9f"] == ["a", "", ""]
    assert stream.flush() == "\ufffd"


def test_broken_bytes_before_good_ones_are_not_held_for_ever():
    stream = TextStream(utf8)
    assert [stream.push(b) for b in (0x80, 0x80, 0x41)] == ["", "\ufffd", "\ufffdA"]


@given(st.binary(max_size=40), st.text(max_size=20))
@settings(max_examples=300, deadline=None)
def test_V07_the_parts_joined_are_the_whole(noise, text):
    ids = [*text.encode(), *noise]
    assert "".join(pieces(TextStream(utf8), ids)) == utf8(ids)


def test_a_decoder_that_drops_a_leading_space_is_asked_with_what_came_before():
    words = ["▁the", "▁cat", "s"]
    stream = TextStream(lambda ids: "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" "))
    assert [stream.push(i) for i in (0, 1, 2, 1)] == ["the", " cat", "s", " cat"]


def test_a_stop_string_over_several_tokens_is_never_shown_in_part():
    stream = TextStream(utf8, stop_strings=["END"])
    assert [stream.push(b) for b in b"xEN.EEND!"] == ["x", "", "", "EN.", "", "E", "", "", ""]
    assert (stream.flush(), stream.stop_string) == ("", "END")


def test_what_only_began_like_a_stop_string_is_shown_at_the_end():
    stream = TextStream(utf8, stop_strings=["END"])
    assert [stream.push(b) for b in b"aEN"] == ["a", "", ""]
    assert (stream.flush(), stream.stop_string) == ("EN", "")


def test_R08_text_ends_before_a_stop_string_inside_a_larger_token():
    stream = TextStream(lambda ids: "".join(("a", "...", "b")[i] for i in ids), stop_strings=[".."])
    assert [stream.push(i) for i in (0, 1)] == ["a", ""]
    assert stream.stop_string == ".."


def test_of_two_stop_strings_the_first_in_the_text_counts_and_of_equal_ones_the_longer():
    stream = TextStream(lambda ids: "xabcab" * len(ids), stop_strings=["ab", "abc", "cab"])
    assert (stream.push(0), stream.stop_string) == ("x", "abc")


def test_stop_ids_have_no_text():
    assert pieces(TextStream(utf8, stop_ids=[66]), [65, 66]) == ["A", ""]


@given(st.lists(st.sampled_from("ab."), max_size=30), st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_stop_strings_cut_like_a_search_of_the_whole_text(letters, stops):
    text = "".join(letters)
    ends = [at for s in stops if (at := text.find(s)) >= 0]
    first_complete = min((text.find(s) + len(s) for s in stops if s in text), default=None)
    expected = text if not ends else text[: min(text[:first_complete].find(s) for s in stops if s in text[:first_complete])]
    stream = TextStream(utf8, stop_strings=stops)
    assert "".join(stream.push(ord(c)) for c in text) + stream.flush() == expected


@pytest.mark.parametrize("ids", [[], [65]])
def test_no_or_one_token(ids):
    assert "".join(pieces(TextStream(utf8), ids)) == utf8(ids)
