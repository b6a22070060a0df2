"""One row of metrics from those of several processes, by hand."""

import json

from crl_jax.records import Sum
from crl_jax.telemetry.joined import join_rows, pack_row


def test_sums_and_counts_are_those_of_all_and_what_is_shared_is_the_firsts() -> None:
    rows = [
        {
            "success/guided": Sum(3, 4),
            "rollout/env_steps": 10,
            "rollout/collect_s": 2.5,
            "rollout/tokens": 100.0,
            "lag/max": 1,
            "actor/samples": 6,
            "actor/version": 7,
            "extractor/updates": 2,
            "serve/actor/version": 7,
            "serve/actor/decoded_tokens": 40,
            "publish/actor/seconds": 0.25,
            "bank/entries": 9,
            "host/peak_rss_gib": 1.5,
        },
        {
            "success/guided": Sum(1, 2),
            "rollout/env_steps": 30,
            "rollout/collect_s": 4.5,
            "rollout/tokens": 50.0,
            "lag/max": 3,
            "actor/samples": 0,
            "actor/version": 7,
            "extractor/updates": 2,
            "serve/actor/version": 7,
            "serve/actor/decoded_tokens": 2,
            "publish/actor/seconds": 0.75,
            "bank/entries": 9,
            "host/peak_rss_gib": 0.5,
            "eval/known/without/greedy": Sum(1.0, 1.0),  # of tasks the first had none of
        },
    ]
    joined = join_rows(json.loads(json.dumps([pack_row(row) for row in rows])))
    assert joined == {
        "success/guided": Sum(4.0, 6.0),
        "rollout/env_steps": 40.0,
        "rollout/collect_s": 4.5,
        "rollout/tokens": 150.0,
        "lag/max": 3.0,
        "actor/samples": 6.0,
        "actor/version": 7.0,
        "extractor/updates": 2.0,
        "serve/actor/version": 7.0,
        "serve/actor/decoded_tokens": 42.0,
        "publish/actor/seconds": 0.25,
        "bank/entries": 9.0,
        "host/peak_rss_gib": 1.5,
        "eval/known/without/greedy": Sum(1.0, 1.0),
    }


def test_a_row_does_not_depend_on_how_episodes_were_shared_out() -> None:
    each = [{"rollout/turns": Sum(n, 1), "lag/max": n, "rollout/asks": Sum(0, 1)} for n in range(6)]

    def joined(shares: list[range]) -> dict[str, object]:
        return join_rows([pack_row(join_rows([pack_row(each[i]) for i in share])) for share in shares])

    assert joined([range(0, 6)]) == joined([range(0, 3), range(3, 6)]) == joined([range(0, 1), range(1, 6)])
