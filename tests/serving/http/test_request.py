"""Reading requests: what is meant, what is refused and how."""

import json

import pytest

from crl_jax.serving.http.errors import ApiError
from crl_jax.serving.http.fields import parse_object
from crl_jax.serving.http.request import MAX_TOKENS, read_completion


def read(**body):
    return read_completion(body, model="m", vocab_size=40, stop_ids=(7,))


def refused(status=400, **body):
    with pytest.raises(ApiError) as error:
        read(**body)
    assert error.value.status == status
    shown = error.value.body()["error"]
    assert set(shown) == {"message", "type", "param", "code"}
    return shown


def test_the_forms_of_a_prompt():
    assert read(prompt="ab").prompts == ("ab",)
    assert read(prompt=[1, 2]).prompts == ((1, 2),)
    assert read(prompt=["a", "b"]).prompts == ("a", "b")
    assert read(prompt=[[1], "b"]).prompts == ((1,), "b")
    for wrong in (None, [], 5, [1, "a"], [[]], [[1], 2], [True], {"a": 1}, [1.0]):
        assert refused(prompt=wrong)["param"] == "prompt"
    assert read(prompt=[], session="s").prompts == ((),), "a session may go on without new ids"
    assert refused(prompt=None, session="s")["param"] == "prompt"
    assert "0..39, got 1..40" in refused(prompt=[1, 40])["message"]
    assert refused(prompt=[-1])["param"] == "prompt"


def test_defaults_are_openais():
    request = read(prompt="a")
    p = request.params
    assert (p.max_new_tokens, p.temperature, p.top_p, p.top_k, p.min_p) == (MAX_TOKENS, 1.0, 1.0, 0, 0.0)
    assert (p.stop_ids, p.stop_strings, p.forbidden_ids, request.n, request.stream, request.logprobs) == ((7,), (), (), 1, False, False)
    assert 0 <= p.seed < 2**31


def test_every_sampling_field_arrives():
    p = read(
        prompt="a",
        max_tokens=3,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        seed=5,
        stop_token_ids=[1, 2],
        logit_bias={"3": -100, "4": -100},
    ).params
    assert (p.max_new_tokens, p.temperature, p.top_p, p.top_k, p.min_p, p.seed) == (3, 0.0, 0.5, 0, 0.1, 5)
    assert (p.stop_ids, p.forbidden_ids) == ((1, 2, 7), (3, 4))
    assert read(prompt="a", ignore_eos=True).params.stop_ids == ()
    assert read(prompt="a", max_tokens=None).params.max_new_tokens == MAX_TOKENS


def test_C09_a_stop_string_stays_whole():
    assert read(prompt="a", stop="ab").params.stop_strings == ("ab",)
    assert read(prompt="a", stop=["ab", "c"]).params.stop_strings == ("ab", "c")
    assert read(prompt="a", stop=None).params.stop_strings == ()
    for wrong in ("", [""], [1], 3, ["x"] * 17):
        assert refused(prompt="a", stop=wrong)["param"] == "stop"


def test_S10_log_probs_0_is_not_off():
    assert read(prompt="a", logprobs=0).logprobs is True
    assert read(prompt="a", logprobs=None).logprobs is False
    assert read(prompt="a").logprobs is False
    assert "use 0" in refused(prompt="a", logprobs=5)["message"]
    assert refused(prompt="a", logprobs=True)["param"] == "logprobs"


def test_S08_every_choice_has_a_seed_of_its_own_and_the_same_again():
    first, again = (read(prompt=["a", "a"], n=4, seed=7) for _ in range(2))
    seeds = [first.choice(k)[1].seed for k in range(8)]
    assert len(set(seeds)) == 8
    assert seeds[0] == 7
    assert seeds == [again.choice(k)[1].seed for k in range(8)]
    assert [read(prompt=["a", "b"], n=2).choice(k)[0] for k in range(4)] == ["a", "a", "b", "b"]
    assert read(prompt="a").params.seed != read(prompt="a").params.seed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("temperature", 10**400),
        ("n", 0),
        ("seed", 1.5),
        ("stop_token_ids", [40]),
        ("stop_token_ids", 3),
        ("logit_bias", {"3": 5}),
        ("logit_bias", {"x": -100}),
        ("logit_bias", {"40": -100}),
        ("logit_bias", {"1" * 5000: -100}),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("echo", True),
        ("best_of", 3),
        ("presence_penalty", 0.5),
        ("repetition_penalty", True),
        ("suffix", "z"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name, value):
    assert refused(prompt="a", **{name: value})["param"] == name


def test_an_unknown_field_an_unknown_model_and_too_much():
    assert "did you mean `max_tokens`" in refused(prompt="a", max_token=3)["message"]
    shown = refused(404, prompt="a", model="other")
    assert (shown["param"], shown["code"], shown["type"]) == ("model", "model_not_found", "not_found_error")
    assert read(prompt="a", model="m").prompts == ("a",)
    assert refused(prompt=["a"] * 65, n=2)["param"] == "n"
    assert refused(prompt="a", n=2, session="s")["param"] == "session"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"3", b'{"a": NaN}', b'{"a": 1, "a": 2}', b"\xff", b"[" * 100_000, b'{"a": "\\ud800"}'])
def test_E10_a_body_that_is_no_strict_json_object_is_refused(raw):
    with pytest.raises(ApiError) as error:
        parse_object(raw)
    assert (error.value.status, error.value.code) == (400, "invalid_json")


def test_neutral_values_of_what_is_not_done_are_accepted():
    body = {"prompt": "a", "echo": False, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "user": "me", "suffix": None}
    assert read(**json.loads(json.dumps(body))).n == 1
